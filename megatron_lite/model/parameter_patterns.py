"""Which parameters decay: the masks of --weight_decay_default_mask and the patterns of --weight_decay_modules."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence

from megatron_lite.config.structured_values import decay_expression
from megatron_lite.errors import UsageError
from megatron_lite.parameter import Parameter, ParameterSpec, matches, similar_names


def set_weight_decay(parameters: Iterable[Parameter], mask: str | None, modules: Sequence[str]) -> None:
    """Decide of every parameter whether it decays: if a pattern of `modules` selects it, or else by the mask.

    mask: "fast_llm", as the layers declare it: all but norms and biases. "levanter": all but norms, biases and
    embeddings; a tied head is the embedding. "off": all. None: none, beside `modules`.

    Raises:
        UsageError: for a pattern that selects nothing.
    """
    assert mask is not None or modules
    parameters = list(parameters)
    names = [parameter.spec.name for parameter in parameters]
    chosen = {name for pattern in modules for name in selected(pattern, names)}
    for parameter in parameters:
        spec = parameter.spec
        decays = spec.name in chosen or _decays_by_default(spec, mask)
        parameter.spec = dataclasses.replace(spec, weight_decay=decays)


def _decays_by_default(spec: ParameterSpec, mask: str | None) -> bool:
    if mask == "levanter":
        return spec.weight_decay and not spec.embedding
    return mask == "off" or (mask == "fast_llm" and spec.weight_decay)


def selected(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that one item of --weight_decay_modules selects.

    `regex:...` is a regular expression that matches from the beginning of a name, as in Levanter. Anything else is a
    name, a prefix of whole parts or a pattern with wildcards, as in --freeze; if it is none of these, it selects every
    name that contains it, again as in Levanter.

    Raises:
        UsageError: if it selects nothing.
    """
    expression = decay_expression(pattern)
    if expression is not None:
        found = [name for name in names if expression.match(name)]
    else:
        found = [name for name in names if matches(pattern, name)] or [name for name in names if pattern in name]
    if not found:
        rule = (
            "it must match from a name's beginning (.* before it finds it anywhere), and no comma or space may be in it"
            if expression is not None
            else "a prefix takes all below it (blocks.0), wildcards are * and ?, any other text must be part of a name"
        )
        raise UsageError(
            f"--weight_decay_modules: {pattern!r} matches no parameter; {similar_names(pattern, names)}; {rule}"
        )
    return found


def describe(parameters: Iterable[Parameter]) -> str:
    """One line for the log: what decays, in the order of the model, with all blocks that are alike as one name."""
    trained = [parameter.spec for parameter in parameters if parameter.spec.trainable]
    decayed = [spec for spec in trained if spec.weight_decay]
    count, every = (f"{sum(spec.numel for spec in specs):,}" for specs in (decayed, trained))
    text = f"weight decay on {len(decayed)} of {len(trained)} parameters ({count} of {every} weights)"
    return f"{text}: {', '.join(_compressed(decayed, trained))}" if decayed else text


_BLOCK = re.compile(r"(.*?\.)(\d+)(\..*)")


def _compressed(specs: Sequence[ParameterSpec], of: Sequence[ParameterSpec]) -> list[str]:
    """Names with `*` for the index where all blocks of `of` are meant, else with the ranges of those that are."""
    every, items = _by_block(of), []
    for name, blocks in _by_block(specs).items():
        if blocks != every[name]:
            name = name.replace("*", _ranges(blocks))
        items.append(f"{name} ({len(blocks)})" if len(blocks) > 1 else name)
    return items


def _by_block(specs: Sequence[ParameterSpec]) -> dict[str, list[int]]:
    """Names with `*` for the index of a block -> the indices; none for names without."""
    groups: dict[str, list[int]] = {}
    for spec in specs:
        match = _BLOCK.fullmatch(spec.name)
        indices = groups.setdefault(f"{match[1]}*{match[3]}" if match else spec.name, [])
        if match:
            indices.append(int(match[2]))
    return groups


def _ranges(indices: Sequence[int]) -> str:
    """`3`, or `{0-2,5}` for several; the indices ascend."""
    runs = []
    for _, run in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        members = [index for _, index in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return runs[0] if runs == [str(indices[0])] else f"{{{','.join(runs)}}}"
