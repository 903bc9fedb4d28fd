"""Whether training waits for its data: said once, with the remedy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from megatron_lite.config import DataConfig

ITERATIONS = 50  # over which waiting is summed
SHARE = 0.1  # of their time, from which data is the bottleneck
LEAST_S = 0.001  # of waiting in an iteration: what tiny models wait is not worth a word


class Waiting:
    """The time that a rank waits for data, and the time of its iterations."""

    def __init__(self, data: DataConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        self._data, self._clock = data, clock
        self._waits: deque[float] = deque(maxlen=ITERATIONS)
        self._ends: deque[float] = deque(maxlen=ITERATIONS + 1)
        self._told = data.dataset_source == "random"

    def add(self, waited_s: float) -> str | None:
        """Count a wait for data that has just ended; return a warning once the last 50 iterations show a bottleneck.

        The first two waits of a start are for files that are not in memory yet and for workers that start; leave them
        out. A validation or a save in between makes an iteration longer, and so a warning less likely.
        """
        self._waits.append(waited_s)
        self._ends.append(self._clock())
        if self._told or len(self._ends) <= ITERATIONS:
            return None
        waited_s, taken_s = sum(self._waits), self._ends[-1] - self._ends[0]
        if waited_s < max(SHARE * taken_s, LEAST_S * ITERATIONS):
            return None
        self._told = True
        each = f"{1e3 * waited_s / ITERATIONS:,.1f} of {1e3 * taken_s / ITERATIONS:,.1f} ms"
        return f"data is the bottleneck: the last {ITERATIONS} iterations waited {each} each for it; {self._remedy()}"

    def _remedy(self) -> str:
        workers = self._data.num_workers
        if workers == 0:
            return "use --num_workers=2"
        return (
            f"use --num_workers={2 * workers} if cores are free, a larger --prefetch_factor if some reads are slow, or "
            "copy the data to a faster disk"
        )
