"""Rules for dividing the batch into micro-batches and ranks in every iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_lite.config import Draft
from megatron_lite.config.dimensions import ranks_per_sample
from megatron_lite.config.values import counted, typed
from megatron_lite.schedules.batch_size import Split, parse_schedule
from megatron_lite.validation.rules import Problem, Problems, nearest_multiples, parsing

_ACCUMULATION = (
    "depth_first_micro_batches",
    "breadth_first_micro_batches",
    "sequential_micro_batches",
)
BATCH = ("batch_size", "micro_batch_size", *_ACCUMULATION)
# All inputs of the batch arithmetic.
_BATCH_RULE = (
    *BATCH,
    "batch_size_schedule",
    "allow_nondivisible_batch_size",
    "dry_run",
    "world_size",
)


def batch(draft: Draft, world_size: int) -> Problems:
    """Derive missing sizes from batch_size = micro_batch_size * depth_first * breadth_first *
    world_size.

    With a schedule the equation holds for the largest batch; smaller batches have fewer depth-first
    micro-batches.
    """
    sizes: Sequence[int] = []
    if draft.batch_size_schedule:
        problems = [*parsing("batch_size_schedule", parse_schedule, draft.batch_size_schedule)]
        if problems:
            yield from problems
            return
        sizes = parse_schedule(draft.batch_size_schedule).sizes
        if draft.batch_size not in (None, sizes[-1]):
            rule = f"the schedule sets the batch sizes; leave batch_size out (it becomes the largest, {sizes[-1]})"
            yield "batch_size batch_size_schedule", rule
            return
        draft.batch_size = sizes[-1]
        _fill_micro_batch_size(draft, sizes, world_size)
    accumulation = draft.changed(*_ACCUMULATION)
    if unsolved := _largest(draft, sizes, world_size):
        yield unsolved
    else:
        yield from _smaller(draft, sizes, accumulation, world_size)
        yield from _limits(draft, world_size)


def _problem(draft: Draft, names: Sequence[str], world_size: int, rule: str) -> Problem:
    """Report options that do not fit the number of data-parallel ranks."""
    noun = "data-parallel rank" if ranks_per_sample(draft) > 1 else "rank"
    return Problem(
        (*_BATCH_RULE, *names), f"{typed(draft, *names)} on {counted(world_size, noun)}: {rule}"
    )


def _fill_micro_batch_size(draft: Draft, sizes: Sequence[int], world_size: int) -> None:
    """Choose the largest micro-batch size that divides every batch of a schedule, unless other
    options determine it.

    Without one: with padding, the smallest batch fills one micro-batch; otherwise 1, so that an
    error names the batch and not the micro-batch.
    """
    if draft.changed("micro_batch_size", "depth_first_micro_batches", "sequential_micro_batches"):
        return
    unit = world_size * (draft.breadth_first_micro_batches or 1)
    common = math.gcd(*sizes)
    if common % unit == 0:
        draft.micro_batch_size = common // unit
    else:
        draft.micro_batch_size = -(-sizes[0] // unit) if draft.allow_nondivisible_batch_size else 1


def _largest(draft: Draft, sizes: Sequence[int], world_size: int) -> Problem | None:
    """Solve the equation for the largest batch; return why there is no solution. sizes: all in a
    schedule."""
    batch, micro = draft.batch_size, draft.micro_batch_size
    depth, breadth = draft.depth_first_micro_batches, draft.breadth_first_micro_batches
    sequential, padded = draft.sequential_micro_batches, draft.allow_nondivisible_batch_size
    if batch is not None and micro is not None:
        if batch % (micro * world_size) and not padded:
            name, subject = _batch_name(draft)
            unit = micro * world_size
            rule = (
                f"{subject} must be a multiple of {micro} * {world_size} = {unit} (or write "
                f"--allow_nondivisible_batch_size=1); nearest: {nearest_multiples(batch, unit)}"
            )
            return _problem(draft, [name, "micro_batch_size"], world_size, rule)
        total = Split(batch, micro, world_size, breadth or 1 if padded else 1).micro_steps
        if sequential is not None and sequential != total:
            rule = f"batch_size / (micro_batch_size * ranks) is {total}, not {sequential}; "
            rule += "leave sequential_micro_batches out"
            if not draft.batch_size_schedule:
                rule += f" or write --batch_size={micro * sequential * world_size}"
            return _problem(draft, draft.changed(*BATCH), world_size, rule)
        sequential = total
    elif sequential is None:
        sequential = (depth or 1) * (breadth or 1)
    product, both = (depth or 1) * (breadth or 1), depth is not None and breadth is not None
    if sequential % product or (both and sequential != product):
        return _unsplit(draft, sequential, product, both, world_size)
    unit = sequential * world_size
    if batch is None:
        batch = (micro or 1) * unit
    elif micro is None and batch % unit and not padded:
        name, subject = _batch_name(draft)
        text = f"with {counted(sequential, 'sequential micro-batch')}, {subject} must be a multiple of {unit}"
        return _problem(
            draft, [name], world_size, f"{text}; nearest: {nearest_multiples(batch, unit)}"
        )
    micro = micro or -(-batch // unit)
    if depth is None and breadth is None and draft.pipeline_parallel > 1:
        # A group fills the pipeline once: the whole batch or, with a schedule, the most
        # micro-batches that divide each batch.
        breadth = math.gcd(
            *(Split(size, micro, world_size).micro_steps for size in sizes or [batch])
        )
    if depth is None:
        depth = sequential // (breadth or 1)
    breadth = sequential // depth
    filled = Split(batch, micro, world_size, breadth).micro_steps
    if filled != sequential:
        rule = (
            f"{counted(filled, 'micro-batch')} of {micro} hold the whole batch, and {sequential - filled} more "
            f"would be padding only; write --micro_batch_size={micro} and leave depth_first_micro_batches and "
            "sequential_micro_batches out"
        )
        return _problem(draft, draft.changed(*BATCH), world_size, rule)
    draft.batch_size = batch
    draft.micro_batch_size = micro
    draft.sequential_micro_batches = sequential
    draft.depth_first_micro_batches, draft.breadth_first_micro_batches = depth, breadth
    return None


def _smaller(
    draft: Draft, sizes: Sequence[int], accumulation: Sequence[str], world_size: int
) -> Problems:
    """Check a schedule's batches, whose micro-batches have the same size. accumulation: its options
    as typed."""
    micro, breadth = draft.micro_batch_size or 1, draft.breadth_first_micro_batches or 1
    unit = micro * breadth * world_size
    wrong = [size for size in sizes if size % unit]
    if wrong and not draft.allow_nondivisible_batch_size:
        product = f"{micro} * {world_size}" + (f" * {breadth} breadth-first" if breadth > 1 else "")
        share, rest = divmod(math.gcd(*sizes), world_size)
        smaller = f"--micro_batch_size={math.gcd(share, micro)}"
        smaller += f" and leave {' and '.join(accumulation)} out, or " if accumulation else ", or "
        rule = (
            f"every size must be a multiple of {product} = {unit}, and {wrong[0]} is not; write "
            f"{'' if rest else smaller}--allow_nondivisible_batch_size=1; nearest: {nearest_multiples(wrong[0], unit)}"
        )
        yield _problem(draft, ["batch_size_schedule", "micro_batch_size"], world_size, rule)


def _limits(draft: Draft, world_size: int) -> Problems:
    """Check options limited by the size of a micro-batch or a rank's share of the batch."""
    batch = draft.batch_size or 1
    micro = draft.micro_batch_size or 1
    evaluated = draft.eval_micro_batch_size
    tokens = micro * draft.sequence_length
    splits = draft.cross_entropy_splits
    share = -(-batch // world_size)
    if splits is not None and splits > tokens:
        rule = f"a micro-batch has only {tokens} tokens; write at most {tokens}"
        yield "cross_entropy_splits", rule, " ".join(("sequence_length", *_BATCH_RULE))
    if micro > share:
        rule = f"a rank gets at most {counted(share, 'sample')}, and the rest is padding; write at most {share}"
        yield _problem(draft, ["micro_batch_size", "batch_size"], world_size, rule)
    if evaluated is not None and evaluated > share:
        rule = f"a validation batch has batch_size samples, {share} per rank; write at most {share}"
        yield _problem(draft, ["eval_micro_batch_size", "batch_size"], world_size, rule)


def _batch_name(draft: Draft) -> tuple[str, str]:
    """Return the option that sets the largest batch, and a name for that batch."""
    if draft.batch_size_schedule:
        return "batch_size_schedule", f"its largest size, {draft.batch_size},"
    return "batch_size", "batch_size"


def _unsplit(draft: Draft, sequential: int, unit: int, both: bool, world_size: int) -> Problem:
    """Report that `sequential` is not depth_first * breadth_first, with batch sizes that would
    work.

    unit: their product, 1 for one that is not set. both: whether both are set.
    """
    rule = "depth_first * breadth_first micro-batches "
    rule += (
        f"are {unit}, not {sequential}"
        if both
        else f"are a multiple of {unit}, and {sequential} is not"
    )
    if draft.batch_size is None or draft.micro_batch_size is None:
        rule += "; leave sequential_micro_batches out"
    else:
        per_unit = draft.micro_batch_size * unit * world_size
        possible = str(per_unit) if both else nearest_multiples(draft.batch_size, per_unit)
        rule += "; leave one of them out"
        rule += "" if draft.batch_size_schedule else f", or set --batch_size to {possible}"
    return _problem(draft, draft.changed(*BATCH), world_size, rule)
