"""The time that a run still needs: its steps at their usual pace, its pauses as often as they came so far."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping

WARM_UP_STEPS = 1  # of a start, which compile kernels and allocate memory
STEPS = 1000  # the newest ones, from which the pace is taken
STALL = 3.0  # times the median, from which on a step has waited for something that is not expected again


class Forecast:
    """The pace of this start's steps, and the time left.

    Args:
        consumed_samples: samples consumed after N iterations, which may have different batch sizes.
        iteration: iterations done before this start.
    """

    def __init__(self, consumed_samples: Callable[[int], int], train_iters: int, iteration: int) -> None:
        self._consumed_samples, self._train_iters = consumed_samples, train_iters
        self._first = iteration
        self._warm_up = WARM_UP_STEPS
        self._sample_s: deque[float] = deque(maxlen=STEPS)  # seconds per sample of each step
        self._pauses: dict[
            str, tuple[float, int]
        ] = {}  # by kind: seconds in all, and the iteration after which it came

    def add(self, iteration: int, step_s: float, pauses_s: Mapping[str, float]) -> None:
        """Count a step and the pauses before it, by kind (validation, save ...); leave out those before the first."""
        samples = self._consumed_samples(iteration) - self._consumed_samples(iteration - 1)
        if self._warm_up:
            self._warm_up -= 1
            return
        self._sample_s.append(step_s / samples)
        for kind, seconds in pauses_s.items():
            self._pauses[kind] = (seconds + self._pauses.get(kind, (0.0, 0))[0], iteration - 1)

    def sample_s(self) -> float | None:
        """Return the seconds per sample, without stalls; None before the first step that counts."""
        if not self._sample_s:
            return None
        longest_s = STALL * statistics.median(self._sample_s)
        return statistics.fmean(seconds for seconds in self._sample_s if seconds <= longest_s)

    def remaining_s(self, iteration: int) -> float | None:
        """Return the seconds that the run needs after `iteration`, pauses included; None if unknown."""
        sample_s = self.sample_s()
        if sample_s is None:
            return None
        samples = self._consumed_samples(self._train_iters) - self._consumed_samples(iteration)
        # Iterations up to the last pause of a kind hold whole periods of that kind.
        pause_s = sum(seconds / (last - self._first) for seconds, last in self._pauses.values())
        return max(samples, 0) * sample_s + max(self._train_iters - iteration, 0) * pause_s
