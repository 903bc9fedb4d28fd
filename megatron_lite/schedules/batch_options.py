"""Batch sizes of a configuration: --batch_size, or --batch_size_schedule as a string."""

from __future__ import annotations

import functools

from megatron_lite.config import BatchConfig
from megatron_lite.config.values import BadValueError, parse_int, shown
from megatron_lite.errors import UsageError
from megatron_lite.schedules.batch_size import BatchSchedule, Segment


@functools.cache  # called several times a step
def parse_schedule(items: tuple[str, ...]) -> BatchSchedule:
    """Parse --batch_size_schedule: `0:32 1000:64` means 32 samples for iterations 1 to 1000, then 64.

    Raises:
        UsageError: for an item that is not iteration:size, a size below 1, a first iteration other than 0, or
            iterations that do not rise.
    """
    typed = "--batch_size_schedule=" + shown(" ".join(items))
    segments: list[Segment] = []
    for item in items:
        fix = "write <iteration>:<size>, as in 0:32 1000:64"
        start, _, size = item.partition(":")
        if not start or not size or ":" in size:
            raise UsageError(f"{typed}: {shown(item)}: {fix}")
        try:
            segments.append(Segment(parse_int(start), parse_int(size)))
        except BadValueError as error:
            raise UsageError(f"{typed}: {shown(item)}: {error}; {fix}") from None
        if segments[-1].size < 1:
            raise UsageError(f"{typed}: {shown(item)}: a batch needs at least one sample; write a size >= 1")
    if not segments or segments[0].start != 0:
        raise UsageError(f"{typed}: the first size must start at iteration 0; write 0:<size> first")
    for before, after in zip(segments, segments[1:], strict=False):
        if after.start <= before.start:
            raise UsageError(f"{typed}: {after.start} follows {before.start}; write rising iterations")
    return BatchSchedule(tuple(segments))


def batch_schedule(batch: BatchConfig) -> BatchSchedule:
    """Return the batch sizes of a resolved configuration: constant, or as --batch_size_schedule says."""
    if batch.batch_size_schedule:
        return parse_schedule(batch.batch_size_schedule)
    assert batch.batch_size is not None, "resolved before"
    return BatchSchedule((Segment(0, batch.batch_size),))


def iteration_tokens(batch: BatchConfig, iteration: int) -> int:
    """Tokens of one iteration of a resolved configuration, over all ranks, without padding."""
    return batch_schedule(batch).batch_size(iteration) * batch.sequence_length


def consumed_tokens(batch: BatchConfig, iterations: int) -> int:
    """Return the number of tokens of the first `iterations` of a resolved configuration."""
    return batch_schedule(batch).consumed_samples(iterations) * batch.sequence_length
