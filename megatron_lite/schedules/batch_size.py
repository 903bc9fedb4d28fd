"""Batch sizes over a run, and how a batch is split over ranks and micro-batches.

Samples are numbered by their position in the run and consumed in order, so that changing the batch
size neither repeats nor skips samples, and the iteration number determines where a run continues.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from megatron_lite.config import BatchConfig
from megatron_lite.config.values import BadValueError, parse_int, shown
from megatron_lite.errors import UsageError


class Segment(NamedTuple):
    """Batches of `size` samples over all ranks, after the first `start` iterations."""

    start: int
    size: int  # 0: unknown
    length: int = 0  # tokens per sample


class BatchSchedule(NamedTuple):
    """Batch sizes over a run; the first segment starts at 0, the rest follow in ascending order."""

    segments: tuple[Segment, ...]

    def batch_size(self, iteration: int) -> int:
        """Return an iteration's number of samples; iterations count from 1."""
        return self.segment(iteration).size

    def segment(self, iteration: int) -> Segment:
        """Return an iteration's segment; iterations count from 1."""
        assert iteration >= 1, iteration
        return next(segment for segment in reversed(self.segments) if segment.start < iteration)

    def consumed_samples(self, iterations: int) -> int:
        """Return the samples consumed by the first `iterations`, which is the index of the next
        sample."""
        return sum(count * segment.size for segment, count in self.parts(iterations))

    def consumed_tokens(self, iterations: int) -> int:
        """Return the tokens consumed by the first `iterations`."""
        return sum(
            count * segment.size * segment.length for segment, count in self.parts(iterations)
        )

    def iterations_of(self, tokens: int) -> int:
        """Return the fewest iterations that consume this many tokens."""
        return bisect.bisect_left(range(2**62), tokens, key=self.consumed_tokens)

    def parts(self, iterations: int) -> Iterator[tuple[Segment, int]]:
        """Yield each segment with its number of iterations among the first `iterations`."""
        ends = [segment.start for segment in self.segments[1:]] + [
            max(iterations, self.segments[-1].start)
        ]
        for segment, end in zip(self.segments, ends, strict=True):
            yield segment, max(0, min(iterations, end) - segment.start)

    @property
    def since(self) -> str:
        """A suffix for messages about the sums: where they begin; empty if all segments are
        known."""
        return "" if self.segments[0].size else f" since iteration {self.segments[1].start:,}"

    @property
    def sizes(self) -> list[int]:
        """The distinct batch sizes in ascending order."""
        return sorted({segment.size for segment in self.segments})

    def __str__(self) -> str:
        return " ".join(f"{segment.start}:{segment.size}" for segment in self.segments)


def continued(before: BatchSchedule, now: BatchSchedule, iterations: int) -> BatchSchedule:
    """Join two schedules: `before` for the first `iterations`, `now` after them."""
    past = tuple(segment for segment in before.segments if segment.start < iterations)
    coming = tuple(segment for segment in now.segments if segment.start > iterations)
    following = now.segment(iterations + 1)._replace(start=iterations)
    goes_on = past and past[-1]._replace(start=iterations) == following
    return BatchSchedule((*past, *(() if goes_on else (following,)), *coming))


def once_through(samples: int, batch_size: int) -> tuple[BatchSchedule, int]:
    """Return a schedule that reads every sample once, the last batch being smaller, and its number
    of batches."""
    iterations = -(-samples // batch_size)
    last = Segment(iterations - 1, samples - (iterations - 1) * batch_size)
    return BatchSchedule((Segment(0, batch_size), last) if iterations > 1 else (last,)), iterations


class Split(NamedTuple):
    """A batch split over ranks and micro-batches: in micro-step m, rank r starts at sample (m *
    ranks + r) * b.

    If the batch does not divide evenly, the last micro-batches are padded and contain fewer real
    samples, or none. The number of micro-steps is rounded up to a multiple of `breadth_first`.
    """

    samples: int  # in the batch
    micro_batch_size: int  # b
    world_size: int
    breadth_first: int = 1

    @property
    def micro_steps(self) -> int:
        """Number of sequential micro-batches of each rank."""
        return self.breadth_first * -(
            -self.samples // (self.breadth_first * self.micro_batch_size * self.world_size)
        )

    def piece(self, micro_step: int, rank: int) -> tuple[int, int]:
        """Return a micro-batch's first sample, relative to the batch, and its number of real
        samples."""
        first = min((micro_step * self.world_size + rank) * self.micro_batch_size, self.samples)
        return first, min(self.samples - first, self.micro_batch_size)

    def real_samples(self, micro_step: int) -> int:
        """Return a micro-step's number of real samples over all ranks."""
        first, _ = self.piece(micro_step, 0)
        return min(self.samples - first, self.micro_batch_size * self.world_size)


@functools.cache  # called several times a step
def parse_schedule(items: tuple[str, ...], length: int = 0) -> BatchSchedule:
    """Parse --batch_size_schedule: `0:32 1000:64` means 32 samples for iterations 1 to 1000, then
    64.

    Raises:
        UsageError: for an item that is not iteration:size, a size below 1, a first iteration other
            than 0, or iterations out of order.
    """
    typed = "--batch_size_schedule=" + shown(" ".join(items))
    segments: list[Segment] = []
    for item in items:
        fix = "write <iteration>:<size>, as in 0:32 1000:64"
        start, _, size = item.partition(":")
        if not start or not size or ":" in size:
            raise UsageError(f"{typed}: {shown(item)}: {fix}")
        try:
            segments.append(Segment(parse_int(start), parse_int(size), length))
        except BadValueError as error:
            raise UsageError(f"{typed}: {shown(item)}: {error}; {fix}") from None
        if segments[-1].size < 1:
            raise UsageError(
                f"{typed}: {shown(item)}: a batch needs at least one sample; write a size >= 1"
            )
    if not segments or segments[0].start != 0:
        raise UsageError(f"{typed}: the first size must start at iteration 0; write 0:<size> first")
    for before, after in itertools.pairwise(segments):
        if after.start <= before.start:
            raise UsageError(f"{typed}: {after.start} follows {before.start}; sort the iterations")
    return BatchSchedule(tuple(segments))


def batch_schedule(batch: BatchConfig) -> BatchSchedule:
    """Return the batch sizes of a resolved configuration: constant, or from
    --batch_size_schedule."""
    if batch.batch_size_schedule:
        return parse_schedule(batch.batch_size_schedule, batch.sequence_length)
    return BatchSchedule((Segment(0, batch.batch_size, batch.sequence_length),))
