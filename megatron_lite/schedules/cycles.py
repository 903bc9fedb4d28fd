"""Compute the phase boundaries of a learning-rate schedule: integer arithmetic on its options.
Imports no torch.

    [warmup][stable][decay] {[rewarmup][stable][decay]} x (cycles - 1) [cooldown]

Steps count from 0. Shares are relative to the cycle's length (for cycles and the cooldown, the
schedule's) and rounded down. A warmup is cut to the length of its cycle, and a decay to what
remains after the warmup.
Source: Levanter, optim/config.py, with the clamping of its continuation in Marin; WSD-S: Wen et al.
2024.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from megatron_lite.config.optimizer import LearningRateConfig
from megatron_lite.config.option import Share


class Cycle(NamedTuple):
    """One cycle of `length` steps from `start`: `warmup` steps, a stable phase, `decay` steps."""

    number: int  # from 0
    start: int
    length: int
    warmup: int
    decay: int

    @property
    def decay_start(self) -> int:
        return self.start + self.length - self.decay


def steps_of(length: int | Share, whole: int) -> int:
    """Return a length in steps, given in steps or as a share of the whole."""
    return length if isinstance(length, int) else int(float(length) * whole)


def cooldown_steps(options: LearningRateConfig) -> int:
    """Return the length of the cooldown at the end of the schedule; 0 if there is none."""
    return steps_of(options.lr_cooldown, options.lr_decay_iters)


def cycle_steps(options: LearningRateConfig) -> int:
    """Return the total length of all cycles: the schedule without the cooldown."""
    return options.lr_decay_iters - cooldown_steps(options)


def boundaries(options: LearningRateConfig) -> tuple[int, Callable[[int], int]]:
    """Return the number of cycles n and a function b: for i < n, cycle i covers steps b(i) to b(i +
    1) - 1.

    The last cycle ends where the cooldown begins or the schedule ends. Later minima are kept: the
    run ends before them. b is a function and not a list, because there may be very many cycles.
    """
    total = cycle_steps(options)
    count = options.lr_num_cycles
    if count > 1:
        return count, lambda index: total if index == count else int(total / count * index)
    if options.lr_cycle is not None:
        length = steps_of(options.lr_cycle, total)
        whole = max(total // length, 1)  # the last cycle also takes the remainder
        return whole, lambda index: total if index == whole else index * length
    points = (0, *(options.lr_cycle_minima or accumulate(options.lr_cycle_lengths)))
    points += (total,) if points[-1] < total else ()
    return len(points) - 1, points.__getitem__


def warmup_steps(options: LearningRateConfig, index: int, length: int) -> int:
    """Return the requested warmup of one cycle, possibly longer than the cycle."""
    return steps_of(options.lr_rewarmup if index else options.lr_warmup, length)


def cycle(options: LearningRateConfig, index: int) -> Cycle:
    """Return the phases of one cycle. index: from 0."""
    _, boundary = boundaries(options)
    start, length = boundary(index), boundary(index + 1) - boundary(index)
    warmup = min(warmup_steps(options, index, length), length)
    left = length - warmup
    decay = (
        left if options.lr_wsd_decay is None else min(steps_of(options.lr_wsd_decay, length), left)
    )
    return Cycle(index, start, length, warmup, decay)


def cycle_at(options: LearningRateConfig, step: int) -> Cycle:
    """Return the cycle that contains a step; after the end, the last one."""
    assert step >= 0, step
    count, boundary = boundaries(options)
    return cycle(options, bisect_right(range(count), step, key=boundary) - 1)
