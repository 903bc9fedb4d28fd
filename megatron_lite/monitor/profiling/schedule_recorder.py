"""Recording of a schedule: marks around each verb of a stage and each wait for a collective.

On CPU a mark is a time. On a GPU it is an event on the compute stream, so that nothing is read before the profile ends;
a second stream, which waits for each collective, records when that has arrived.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megatron_lite.distributed.traffic import FirstWait, Handle
from megatron_lite.monitor.profiling.schedule_times import IterationTimes, TimedVerb, Transfer, runs

Mark = Any  # a point in time; only the clock that made it can read it


class HostClock:
    """Marks points in time on a CPU, where the arrival of a transfer is not seen before the wait for it."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def arrival(self, work: Handle) -> Mark | None:
        return None

    def seconds(self, mark: Mark) -> float:
        return float(mark)


class DeviceClock(HostClock):
    """The clock of a GPU's compute stream.

    wait_for_device: waits for everything queued so far, with a time-out.
    """

    def __init__(self, device: torch.device, wait_for_device: Callable[[], None]) -> None:
        self._wait_for_device, self._side = wait_for_device, torch.cuda.Stream(device)
        self._origin, self._is_read = self.mark(), False

    def mark(self) -> Mark:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._is_read = False
        return event

    def arrival(self, work: Handle) -> Mark | None:
        """Record an event after the collective, on a stream that nothing else uses; the host does not wait."""
        with torch.cuda.stream(self._side):
            work.wait()
            return self.mark()

    def seconds(self, mark: Mark) -> float:
        """Return the seconds since the clock was made; the first call after a mark waits for the device."""
        if not self._is_read:
            self._wait_for_device()
            self._is_read = True
        mark.synchronize()  # on the other stream: reached before the compute stream continued
        return float(self._origin.elapsed_time(mark)) / 1e3


class ScheduleRecorder:
    """Records every verb and collective from its creation on; `lap` ends an iteration.

    alone_s: seconds of a collective with nothing else running, by (kind, stage), where the clock sees no arrival.
    """

    def __init__(self, clock: HostClock, alone_s: Mapping[tuple[str, int | None], float]) -> None:
        self._clock, self._alone_s = clock, alone_s
        self._verb: TimedVerb | None = None  # under way
        self._posted: list[tuple[Transfer, Mark | None]] = []  # every collective with its arrival, in order
        self._current = IterationTimes(0, clock.mark())
        self._kept: list[IterationTimes] = []

    @contextlib.contextmanager
    def around(self, verb: str, stage: int, micro_batch: int | None) -> Iterator[None]:
        """Time a verb."""
        timed = self._verb = TimedVerb(verb, stage, micro_batch, self._clock.mark())
        self._current.steps.append(timed)
        try:
            yield
        finally:
            self._verb = None
            timed.end_s = self._clock.mark()

    def started(self, kind: str, bytes: int, work: Handle) -> Handle:
        """Record a collective of the verb under way, and return a handle that records the wait for it."""
        stage = None if self._verb is None else self._verb.stage
        transfer = Transfer(kind, stage, bytes, self._clock.mark(), alone_s=self._alone_s.get((kind, stage)))
        self._posted.append((transfer, self._clock.arrival(work)))
        return FirstWait(work, lambda: self._wait(transfer, work))

    def _wait(self, transfer: Transfer, work: Handle) -> None:
        transfer.waits_s = self._clock.mark()
        work.wait()
        transfer.done_s = self._clock.mark()
        self._current.transfers.append(transfer)
        if self._verb is not None:
            self._verb.waits.append(transfer)

    def lap(self, iteration: int, keep: bool) -> None:
        """End an iteration; `keep`: it is part of the profile, not of the warm-up."""
        done, end = self._current, self._clock.mark()
        done.iteration, done.end_s = iteration, end
        if keep and done.steps:
            self._kept.append(done)
        self._current = IterationTimes(0, end)

    def take(self) -> list[IterationTimes]:
        """Return the iterations that were kept, in seconds. On a GPU, wait for it."""
        seconds, kept = self._clock.seconds, self._kept
        # Collectives without a wait so far were posted last, and may still be under way.
        waited = [(transfer, arrival) for transfer, arrival in self._posted if transfer.done_s != math.inf]
        for transfer, _ in waited:
            transfer.posted_s = seconds(transfer.posted_s)
            transfer.waits_s, transfer.done_s = seconds(transfer.waits_s), seconds(transfer.done_s)
        seen = [(transfer, seconds(arrival)) for transfer, arrival in waited if arrival is not None]
        ran_s = runs([transfer.posted_s for transfer, _ in seen], [arrived_s for _, arrived_s in seen])
        for (transfer, _), ran in zip(seen, ran_s, strict=True):
            transfer.ran_s = ran
        spans: list[IterationTimes | TimedVerb] = [*kept, *(verb for times in kept for verb in times.steps)]
        for timed in spans:
            timed.start_s, timed.end_s = seconds(timed.start_s), seconds(timed.end_s)
        self._kept, self._posted = [], []
        return kept
