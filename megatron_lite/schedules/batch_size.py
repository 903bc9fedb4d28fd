"""Batch sizes over a run, and the split of a batch over ranks and micro-batches. Pure arithmetic.

Samples are numbered by their place in the run. Each iteration takes the next ones, so a change of the batch size
neither repeats nor skips samples, and the iteration number determines where a run continues.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """Batches of `size` samples over all ranks, once `start` iterations are done."""

    start: int
    size: int


@dataclass(frozen=True)
class BatchSchedule:
    """Batch sizes over a run; the first segment starts at 0, the others at rising iterations."""

    segments: tuple[Segment, ...]

    def batch_size(self, iteration: int) -> int:
        """Return the number of samples of an iteration, counted from 1."""
        assert iteration >= 1, iteration
        return next(segment.size for segment in reversed(self.segments) if segment.start < iteration)

    def consumed_samples(self, iterations: int) -> int:
        """Return the number of samples of the first `iterations`: the index of the first sample of the next one."""
        ends = [segment.start for segment in self.segments[1:]] + [max(iterations, self.segments[-1].start)]
        return sum(
            max(0, min(iterations, end) - segment.start) * segment.size
            for segment, end in zip(self.segments, ends, strict=True)
        )

    @property
    def sizes(self) -> list[int]:
        """The distinct batch sizes in rising order."""
        return sorted({segment.size for segment in self.segments})

    def __str__(self) -> str:
        return " ".join(f"{segment.start}:{segment.size}" for segment in self.segments)


def continued(before: BatchSchedule, now: BatchSchedule, iterations: int) -> BatchSchedule:
    """Join two schedules: `before` for the first `iterations`, `now` after them."""
    past = tuple(segment for segment in before.segments if segment.start < iterations)
    coming = tuple(segment for segment in now.segments if segment.start > iterations)
    return BatchSchedule((*past, Segment(iterations, now.batch_size(iterations + 1)), *coming))


def once_through(samples: int, batch_size: int) -> tuple[BatchSchedule, int]:
    """Return a schedule that takes every sample once, the last batch being smaller, and its number of batches."""
    iterations = -(-samples // batch_size)
    last = Segment(iterations - 1, samples - (iterations - 1) * batch_size)
    return BatchSchedule((Segment(0, batch_size), last) if iterations > 1 else (last,)), iterations


@dataclass(frozen=True)
class Split:
    """One batch over ranks and micro-batches: in micro-step m, rank r starts at sample (m * ranks + r) * b.

    If the batch does not divide, the last micro-batches are padded: they hold fewer real samples, or none. The number
    of micro-steps is rounded up to a multiple of `breadth_first`.
    """

    samples: int  # of the batch
    micro_batch_size: int  # b
    world_size: int
    breadth_first: int = 1

    @property
    def micro_steps(self) -> int:
        """Micro-batches of each rank, one after the other."""
        return self.breadth_first * -(-self.samples // (self.breadth_first * self.micro_batch_size * self.world_size))

    def piece(self, micro_step: int, rank: int) -> tuple[int, int]:
        """Return a micro-batch's first sample, counted from the start of the batch, and its number of real samples."""
        first = min((micro_step * self.world_size + rank) * self.micro_batch_size, self.samples)
        return first, min(self.samples - first, self.micro_batch_size)

    def real_samples(self, micro_step: int) -> int:
        """Return the number of real samples of a micro-step over all ranks."""
        first, _ = self.piece(micro_step, 0)
        return min(self.samples - first, self.micro_batch_size * self.world_size)
