"""Rules about the batch: how it divides into micro-batches and ranks, in every iteration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_lite.errors import UsageError
from megatron_lite.schedules.batch_size import Split, parse_schedule
from megatron_lite.validation.messages import Problem, nearest_multiples, typed

BATCH = (
    "batch_size",
    "micro_batch_size",
    "depth_first_micro_batches",
    "breadth_first_micro_batches",
    "sequential_micro_batches",
)
# All that decide about the batch arithmetic.
_BATCH_RULE = (*BATCH, "batch_size_schedule", "allow_nondivisible_batch_size", "dry_run", "world_size")


def batch(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """batch_size = micro_batch_size * depth_first * breadth_first * world_size; derive what is missing.

    Of a schedule, that holds for its largest batch; smaller ones have fewer depth-first micro-batches.
    """
    sizes: Sequence[int] = []
    if values["batch_size_schedule"]:
        try:
            sizes = parse_schedule(values["batch_size_schedule"]).sizes
        except UsageError as error:
            yield Problem(("batch_size_schedule",), str(error))
            return
        if values["batch_size"] not in (None, sizes[-1]):
            yield Problem(
                ("batch_size", "batch_size_schedule"),
                f"{typed(values, 'batch_size', 'batch_size_schedule')}: the schedule says how many samples an "
                f"iteration has; leave batch_size out (it becomes the largest, {sizes[-1]})",
            )
            return
        values["batch_size"] = sizes[-1]
        _fill_micro_batch_size(values, sizes, world_size)
    problems = [*_largest(values, world_size)]
    if not problems:
        problems = [*_smaller(values, sizes[:-1], world_size), *_consequences(values, world_size)]
    yield from problems


def _fill_micro_batch_size(values: dict[str, Any], sizes: Sequence[int], world_size: int) -> None:
    """The largest one that divides every batch of a schedule; with padding, that of which the smallest has one; else 1,
    which is not to blame if a batch does not divide.
    """
    given = ("micro_batch_size", "depth_first_micro_batches", "sequential_micro_batches")
    if any(values[name] is not None for name in given):
        return  # it follows from them
    unit = world_size * (values["breadth_first_micro_batches"] or 1)
    common = math.gcd(*sizes)
    if common % unit == 0:
        values["micro_batch_size"] = common // unit
    else:
        values["micro_batch_size"] = -(-sizes[0] // unit) if values["allow_nondivisible_batch_size"] else 1


def _largest(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    batch, micro, depth, breadth, sequential = (values[name] for name in BATCH)
    padded, ranks = values["allow_nondivisible_batch_size"], _ranks(world_size)
    if batch is not None and micro is not None:
        if batch % (micro * world_size) and not padded:
            yield _indivisible(values, batch, micro * world_size, f"{micro} * {world_size} = ", ranks)
            return
        total = Split(batch, micro, world_size, breadth or 1 if padded else 1).micro_steps
        if sequential is not None and sequential != total:
            yield Problem(
                _BATCH_RULE,
                f"{typed(values, *_given(values))} on {ranks}: batch_size / (micro_batch_size * ranks) is {total}, "
                f"not {sequential}; leave sequential_micro_batches out or write "
                f"--batch_size={micro * sequential * world_size}",
            )
            return
        sequential = total
    elif sequential is None:
        sequential = (depth or 1) * (breadth or 1)
    if not _splits(sequential, depth, breadth):
        yield _unsplit(values, sequential, ranks, world_size)
        return
    if depth is None:
        depth = sequential // (breadth or 1)
    breadth = sequential // depth
    if batch is None:
        batch = (micro or 1) * sequential * world_size
    elif micro is None and batch % (sequential * world_size) and not padded:
        yield Problem(
            _BATCH_RULE,
            f"{typed(values, 'batch_size')} on {ranks} with {sequential} sequential micro-batch"
            f"{'es' if sequential > 1 else ''}: must be a multiple of {sequential * world_size}; "
            f"nearest: {nearest_multiples(batch, sequential * world_size)}",
        )
        return
    micro = micro or -(-batch // (sequential * world_size))
    filled = Split(batch, micro, world_size, breadth).micro_steps
    if filled != sequential:
        yield Problem(
            _BATCH_RULE,
            f"{typed(values, *_given(values))} on {ranks}: micro-batches of {micro} are full after {filled}, and "
            f"{sequential - filled} would be padding alone; write --micro_batch_size={micro} and leave "
            f"depth_first_micro_batches and sequential_micro_batches out",
        )
        return
    values.update(zip(BATCH, (batch, micro, depth, breadth, sequential), strict=True))


def _smaller(values: dict[str, Any], sizes: Sequence[int], world_size: int) -> Iterator[Problem]:
    """The other batches of a schedule, in micro-batches of the same size."""
    micro, breadth = values["micro_batch_size"], values["breadth_first_micro_batches"]
    unit = micro * breadth * world_size
    wrong = [size for size in sizes if size % unit]
    if wrong and not values["allow_nondivisible_batch_size"]:
        product = f"{micro} * {world_size}" + (f" * {breadth} breadth-first" if breadth > 1 else "")
        yield Problem(
            _BATCH_RULE,
            f"{typed(values, 'batch_size_schedule', 'micro_batch_size')} on {_ranks(world_size)}: every size must be a "
            f"multiple of {product} = {unit}, and {wrong[0]} is not; write "
            + ("a smaller --micro_batch_size, or " if micro > 1 else "")
            + f"--allow_nondivisible_batch_size=1; nearest: {nearest_multiples(wrong[0], unit)}",
        )


def _consequences(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """What else depends on the size of a micro-batch."""
    batch, micro, evaluated = (values[name] for name in ("batch_size", "micro_batch_size", "eval_micro_batch_size"))
    tokens, splits = micro * values["sequence_length"], values["cross_entropy_splits"]
    if splits is not None and splits > tokens:
        yield Problem(
            ("cross_entropy_splits", "sequence_length", *_BATCH_RULE),
            f"--cross_entropy_splits={splits}: a micro-batch has only {tokens} tokens; write at most that",
        )
    share = -(-batch // world_size)
    if micro > share:
        yield Problem(
            _BATCH_RULE,
            f"{typed(values, 'micro_batch_size', 'batch_size')} on {_ranks(world_size)}: a rank never has more than "
            f"{share} sample{'s' if share > 1 else ''}, the rest would always be padding; write at most that",
        )
    if evaluated is not None and evaluated > share:
        yield Problem(
            ("eval_micro_batch_size", *_BATCH_RULE),
            f"{typed(values, 'eval_micro_batch_size', 'batch_size')} on {_ranks(world_size)}: a validation batch has "
            f"batch_size samples, {share} for a rank; write at most that",
        )


def _ranks(world_size: int) -> str:
    return f"{world_size} rank{'s' if world_size > 1 else ''}"


def _indivisible(values: dict[str, Any], batch: int, unit: int, product: str, ranks: str) -> Problem:
    name = "batch_size_schedule" if values["batch_size_schedule"] else "batch_size"
    what = f"its largest size, {batch}," if values["batch_size_schedule"] else "batch_size"
    return Problem(
        _BATCH_RULE,
        f"{typed(values, name, 'micro_batch_size')} on {ranks}: {what} must be a multiple of {product}{unit} "
        f"(or write --allow_nondivisible_batch_size=1); nearest: {nearest_multiples(batch, unit)}",
    )


def _given(values: dict[str, Any]) -> list[str]:
    return [name for name in BATCH if values[name] is not None]


def _splits(sequential: int, depth: int | None, breadth: int | None) -> bool:
    """Whether depth * breadth can be `sequential`, where a missing one follows from the other."""
    if depth is not None and breadth is not None:
        return depth * breadth == sequential
    return sequential % (depth or breadth or 1) == 0


def _unsplit(values: dict[str, Any], sequential: int, ranks: str, world_size: int) -> Problem:
    """`sequential` micro-batches that are not depth_first * breadth_first: which batch sizes would work?"""
    depth, breadth = values["depth_first_micro_batches"], values["breadth_first_micro_batches"]
    unit = (depth or 1) * (breadth or 1)
    both = depth is not None and breadth is not None
    message = f"{typed(values, *_given(values))} on {ranks}: depth_first * breadth_first micro-batches "
    message += f"are {unit}, not {sequential}" if both else f"are a multiple of {unit}, and {sequential} is not"
    batch, micro = values["batch_size"], values["micro_batch_size"]
    if batch is None or micro is None:
        return Problem(_BATCH_RULE, f"{message}; leave sequential_micro_batches out")
    per_unit = micro * unit * world_size
    fix = str(per_unit) if both else nearest_multiples(batch, per_unit)
    return Problem(_BATCH_RULE, f"{message}; leave one of them out, or batch_size must be {fix}")
