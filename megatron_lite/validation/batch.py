"""Rules about the batch: how it divides into micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_lite.validation.problem import Problem, nearest_multiples, typed

BATCH = (
    "batch_size", "micro_batch_size", "depth_first_micro_batches", "breadth_first_micro_batches",
    "sequential_micro_batches",
)  # fmt: skip
_BATCH_RULE = (*BATCH, "dry_run", "world_size")  # all that decide about the batch arithmetic


def batch(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """batch_size = micro_batch_size * depth_first * breadth_first * world_size; derive what is missing."""
    batch, micro, depth, breadth, sequential = (values[name] for name in BATCH)
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    if batch is not None and micro is not None:
        if batch % (micro * world_size):
            yield Problem(
                _BATCH_RULE,
                f"{typed(values, 'batch_size', 'micro_batch_size')} on {ranks}: batch_size must be a multiple of "
                f"{micro} * {world_size} = {micro * world_size}; "
                f"nearest: {nearest_multiples(batch, micro * world_size)}",
            )
            return
        total = batch // (micro * world_size)
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
    elif micro is None and batch % (sequential * world_size):
        yield Problem(
            _BATCH_RULE,
            f"{typed(values, 'batch_size')} on {ranks} with {sequential} sequential micro-batch"
            f"{'es' if sequential > 1 else ''}: must be a multiple of {sequential * world_size}; "
            f"nearest: {nearest_multiples(batch, sequential * world_size)}",
        )
        return
    micro = batch // (sequential * world_size)
    values.update(zip(BATCH, (batch, micro, depth, breadth, sequential), strict=True))
    tokens, splits = micro * values["sequence_length"], values["cross_entropy_splits"]
    if splits is not None and splits > tokens:
        yield Problem(
            ("cross_entropy_splits", "sequence_length", *_BATCH_RULE),
            f"--cross_entropy_splits={splits}: a micro-batch has only {tokens} tokens; write at most that",
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
