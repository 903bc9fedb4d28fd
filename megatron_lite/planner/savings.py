"""Options that save memory, each with the bytes that it saves alone: what a run that died of memory leaves behind."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from megatron_lite.config import RECOMPUTE_LEVELS, Config
from megatron_lite.config.values import written
from megatron_lite.errors import Remedy
from megatron_lite.planner.advice import (
    UNCHANGED,
    Changes,
    Choice,
    Question,
    cheapest_fit,
    dimensions,
    larger_sizes,
    level_choices,
    with_more_sharing,
)
from megatron_lite.planner.runtime import GIB

# The share of the plan that an option must save: a run that ran out of memory needs more than a trifle.
SMALLEST_SAVING = 0.002
# The combination of options that is advised needs at most this share of the plan of the run.
ADVISED_SHARE = 0.9


def remedies(question: Question) -> list[Remedy]:
    """Return the options that save memory, those that cost the least speed first, each applied alone.

    Raises:
        SearchTooLongError: if the time of the question is over.
    """
    config = question.resolved({})
    if config is None:
        return []
    needed = question.needs(config)(UNCHANGED)
    found = []
    for name, changes in _candidates(question, config):
        saving = needed - _needed(question, changes, needed)
        if saving >= SMALLEST_SAVING * needed:
            flags = " ".join(f"--{option}={written(value)}" for option, value in changes.items())
            found.append(Remedy(name, _json_value(changes[name]), saving, flags))
    for ranks in larger_sizes(question)[:1]:
        saving = needed - _needed(question.on(ranks), {}, needed)
        if saving >= SMALLEST_SAVING * needed:
            found.append(Remedy("world_size", ranks, saving, ""))
    return found


def less_memory(question: Question) -> str:
    """Return what to append to a command that ran out of memory, although its plan may fit: "" if nothing helps.

    Raises:
        SearchTooLongError: if the time of the question is over.
    """
    config = question.resolved({})
    if config is None:
        return ""
    needed = question.needs(config)(UNCHANGED)
    most = min(question.device_bytes, int(needed * ADVISED_SHARE))
    fit = cheapest_fit(dataclasses.replace(question, device_bytes=most))
    if fit is None:
        return ""
    return f"to plan {fit.needed_bytes / GIB:,.1f} GiB instead of {needed / GIB:,.1f} GiB, append {fit.flags}"


def _needed(question: Question, changes: Changes, otherwise: int) -> int:
    """Return the memory that a rank needs with `changes`, or `otherwise` if they contradict other options."""
    config = question.resolved(changes)
    return otherwise if config is None else question.needs(config)(UNCHANGED)


def _candidates(question: Question, config: Config) -> Iterator[tuple[str, Changes]]:
    """Yield the option that saves memory, and all options that change with it. config: of the run, resolved."""
    micro, breadth, evaluation, zero, split = dimensions(question)
    smaller = [choice for choice in micro if "micro_batch_size" in choice.changes]
    yield from _named("micro_batch_size", smaller[:1])
    yield from _named("breadth_first_micro_batches", breadth[1:])
    yield from _named("eval_micro_batch_size", evaluation[1:])
    whole = [choice for choice in level_choices(config) if choice.changes["mlp_recompute_level"] in RECOMPUTE_LEVELS]
    yield from _named("mlp_recompute_level", whole)
    if config.performance.recompute_layers < (blocks := config.model.num_layers):
        yield "recompute_layers", {"recompute_layers": blocks}
    present = config.multi_stage.zero_stage
    assert isinstance(present, int), "resolved"
    yield from _named("zero_stage", [choice for choice in zero if choice.changes.get("zero_stage", 0) > present])
    yield from _named("tensor_parallel", _more_sharing(question, config))
    yield from _named("split_master_weights", split[1:])


def _more_sharing(question: Question, config: Config) -> list[Choice]:
    """Return the next size of groups that share each layer, with the same micro-batches: more of them on each rank."""
    (micro, *_), batch = dimensions(question), config.batch
    follows = {name: None for name in ("depth_first_micro_batches", "sequential_micro_batches")}
    typed = {name: value for name, value in follows.items() if getattr(question.asked.batch, name)}
    same = {**micro[0].changes, "micro_batch_size": batch.micro_batch_size, **typed}
    shared = [changes for changes, _ in with_more_sharing(question, same_ranks=True)]
    return [Choice(0.0, {**changes, **same}) for changes in shared[:1]]


def _json_value(value: Any) -> int | str:
    """Return a value as exit.json holds it: a number, or as a user types it."""
    return value if type(value) is int else written(value)


def _named(name: str, choices: list[Choice]) -> Iterator[tuple[str, Changes]]:
    return zip(itertools.repeat(name), (choice.changes for choice in choices))
