"""Patterns that select parameters by name: learning-rate scales, freezing, weight decay."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import itertools
import re
import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from megatron_lite.config.structured_values import module_expression
from megatron_lite.errors import UsageError
from megatron_lite.parameter import Parameter

MATCHING_S = 1.0  # CPU time per regular expression; sound ones take a millisecond


def set_lr_scales(parameters: Sequence[Parameter], scales: Sequence[tuple[str, float]]) -> None:
    """Set the learning-rate scale of every parameter that a pattern matches; the last match wins.

    A pattern is a name, a prefix of whole parts of a name (`blocks.0`), or has wildcards
    (`*.norm.*`).

    Raises:
        UsageError: if a pattern matches nothing or nothing is left to train.
    """
    names = [parameter.spec.name for parameter in parameters]
    for pattern, _ in scales:
        if not any(matches(pattern, name) for name in names):
            raise UsageError(
                f"--freeze or --lr_scales: {pattern!r} matches no parameter; {similar_names(pattern, names)}; "
                "a prefix selects everything below it (blocks.0), and * and ? are wildcards"
            )
    for parameter in parameters:
        for pattern, scale in scales:
            if matches(pattern, parameter.spec.name):
                parameter.spec = dataclasses.replace(parameter.spec, lr_scale=scale)
    if not any(parameter.spec.trainable for parameter in parameters):
        raise UsageError("--freeze, --lr_scales: every parameter is frozen; freeze fewer")


def set_weight_decay(
    parameters: Sequence[Parameter], mask: str | None, modules: Sequence[str]
) -> None:
    """Set which parameters decay: those selected by a pattern of `modules` or by the mask.

    mask: "fast_llm": all but norms and biases, as declared by the layers. "levanter": all but
    norms, biases and embeddings; a tied head is the embedding. "off": all. None: none.

    Raises:
        UsageError: if a pattern selects nothing.
    """
    assert mask is not None or modules
    names = [parameter.spec.name for parameter in parameters]
    chosen = {
        name for pattern in modules for name in selected("weight_decay_modules", pattern, names)
    }
    for parameter in parameters:
        spec = parameter.spec
        decays = spec.weight_decay > 0.0
        masks = {
            None: False,
            "fast_llm": decays,
            "levanter": decays and not spec.embedding,
            "off": True,
        }
        decays = spec.name in chosen or masks[mask]
        parameter.spec = dataclasses.replace(spec, weight_decay=float(decays))


def selected(flag: str, pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names selected by one item of a flag's list of modules.

    `regex:...` is a regular expression that matches from the start of a name, as in Levanter. Any
    other item is a name, a prefix of whole parts or a pattern with wildcards, as in --freeze; if
    none of these matches, the item selects every name that contains it, also as in Levanter.

    Raises:
        UsageError: if the item selects nothing.
    """
    expression = module_expression(flag, pattern)
    if expression is not None:
        found = _matched(flag, pattern, expression, names)
    else:
        found = [name for name in names if matches(pattern, name)] or [
            name for name in names if pattern in name
        ]
    if not found:
        rule = (
            "it must match from the start of a name (begin with .* to match anywhere), without commas or spaces"
            if expression is not None
            else "a prefix selects everything below it (blocks.0), * and ? are wildcards, other text is part of a name"
        )
        raise UsageError(
            f"--{flag}: {pattern!r} matches nothing; {similar_names(pattern, names)}; {rule}"
        )
    return found


def _matched(
    flag: str, pattern: str, expression: re.Pattern[str], names: Sequence[str]
) -> list[str]:
    """Return the names that a regular expression matches.

    Nested repeats, as in (.+)+X, can take exponential time, and no inspection of the expression
    finds them all. Python handles signals while matching, so a CPU-time timer aborts the match.
    Timers need the main thread.

    Raises:
        UsageError: if matching takes longer than `MATCHING_S`.
    """
    if threading.current_thread() is not threading.main_thread():
        return [name for name in names if expression.match(name)]

    def stop(*_: object) -> NoReturn:
        raise UsageError(
            f"--{flag}: {pattern!r} takes more than {MATCHING_S:g} s to match parameter names; "
            "write it without repeats within repeats, as in (a+)+"
        )

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MATCHING_S)
    try:
        return [name for name in names if expression.match(name)]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern, possibly with wildcards, matches a name or a prefix of its
    parts."""
    return name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)


def similar_names(pattern: str, names: Sequence[str]) -> str:
    """Return a hint for the error about a pattern that matches no name."""
    return f"similar names: {', '.join(difflib.get_close_matches(pattern, names, n=3, cutoff=0.0))}"


def describe(parameters: Iterable[Parameter]) -> str:
    """Return a log line that lists the decaying parameters in model order; equal blocks share one
    name."""
    trained = [parameter.spec for parameter in parameters if parameter.spec.trainable]
    decayed = [spec for spec in trained if spec.weight_decay]
    count, every = (f"{sum(spec.numel for spec in specs):,}" for specs in (decayed, trained))
    text = (
        f"weight decay on {len(decayed)} of {len(trained)} parameters ({count} of {every} weights)"
    )
    names = compressed((spec.name for spec in decayed), by_block(spec.name for spec in trained))
    return f"{text}: {', '.join(names)}" if decayed else text


_BLOCK = re.compile(r"(.*?\.)(\d+)(\..*)")


def compressed(names: Iterable[str], every: Mapping[str, Sequence[int]]) -> list[str]:
    """Return names with `*` as block index if all blocks in `every` are included, else with index
    ranges."""
    items = []
    for name, blocks in by_block(names).items():
        if blocks != [*every[name]]:
            name = name.replace("*", _ranges(blocks))
        items.append(f"{name} ({len(blocks)})" if len(blocks) > 1 else name)
    return items


def by_block(names: Iterable[str]) -> dict[str, list[int]]:
    """Map names with `*` as block index to the indices; names without an index map to an empty
    list."""
    groups: dict[str, list[int]] = {}
    for name in names:
        match = _BLOCK.fullmatch(name)
        indices = groups.setdefault(f"{match[1]}*{match[3]}" if match else name, [])
        if match:
            indices.append(int(match[2]))
    return groups


def _ranges(indices: Sequence[int]) -> str:
    """Return `3` for one index, `{0-2,5}` for several; indices are ascending."""
    runs = []
    for _, run in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        members = [index for _, index in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return runs[0] if runs == [str(indices[0])] else f"{{{','.join(runs)}}}"
