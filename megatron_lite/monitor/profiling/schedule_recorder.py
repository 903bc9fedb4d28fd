"""Recording of a schedule: marks around each verb of a stage and each wait for a collective.

On CPU a mark is a time. On a GPU it is an event on the computing stream, so that nothing is read before the cycle ends;
a second stream, which waits for each collective, tells when that has arrived.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_lite.distributed.traffic import FirstWait, Handle
from megatron_lite.monitor.profiling.schedule_times import IterationTimes, StepTime, Transfer, runs

Mark = Any  # a point in time; only the clock that made it can read it


class HostClock:
    """Marks points in time on a CPU. Nothing tells when a transfer has arrived before somebody waits for it."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def arrival(self, work: Handle) -> Mark | None:
        return None

    def seconds(self, mark: Mark) -> float:
        return float(mark)


class DeviceClock(HostClock):
    """The clock of a GPU's computing stream.

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
        mark.synchronize()  # of the other stream: reached before the computing stream went on
        return float(self._origin.elapsed_time(mark)) / 1e3


@dataclass
class _Verb:
    name: str
    stage: int
    micro_batch: int | None
    start: Mark
    end: Mark = None
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)


@dataclass
class _Collective:
    kind: str
    stage: int | None
    bytes: int
    posted: Mark
    arrival: Mark | None
    wait: tuple[Mark, Mark] | None = None


@dataclass
class _Iteration:
    number: int
    start: Mark
    end: Mark
    verbs: list[_Verb]
    waited: list[_Collective]


class ScheduleRecorder:
    """Records every verb and collective from its creation on; `lap` ends an iteration.

    alone_s: seconds of a collective with nothing else running, by (kind, stage), where the clock sees no arrival.
    """

    def __init__(self, clock: HostClock, alone_s: Mapping[tuple[str, int | None], float]) -> None:
        self._clock, self._alone_s = clock, alone_s
        self._verbs: list[_Verb] = []
        self._open: list[_Verb] = []  # verbs under way
        self._posted: list[_Collective] = []  # all of them, in order
        self._waited: list[_Collective] = []  # waited for in this iteration
        self._kept: list[_Iteration] = []
        self._start = clock.mark()

    @contextlib.contextmanager
    def around(self, verb: str, stage: int, micro_batch: int | None) -> Iterator[None]:
        """Time a verb."""
        entry = _Verb(verb, stage, micro_batch, self._clock.mark())
        self._verbs.append(entry)
        self._open.append(entry)
        try:
            yield
        finally:
            self._open.pop()
            entry.end = self._clock.mark()

    def started(self, kind: str, bytes: int, work: Handle) -> Handle:
        """Record a collective of the verb under way, and return a handle that records the wait for it."""
        stage = self._open[-1].stage if self._open else None
        entry = _Collective(kind, stage, bytes, self._clock.mark(), self._clock.arrival(work))
        self._posted.append(entry)
        return FirstWait(work, lambda: self._wait(entry, work))

    def _wait(self, entry: _Collective, work: Handle) -> None:
        start = self._clock.mark()
        work.wait()
        entry.wait = (start, self._clock.mark())
        self._waited.append(entry)
        if self._open:
            self._open[-1].waits.append(entry.wait)

    def lap(self, iteration: int, keep: bool) -> None:
        """End an iteration; `keep`: it is part of the profile, not of the warm-up."""
        end = self._clock.mark()
        if keep and self._verbs:
            self._kept.append(_Iteration(iteration, self._start, end, self._verbs, self._waited))
        self._verbs, self._waited, self._start = [], [], end

    def take(self) -> list[IterationTimes]:
        """Return the iterations that were kept. On a GPU, wait for it."""
        seconds, ran_s = self._clock.seconds, self._runs()
        result = []
        for kept in self._kept:
            steps = [
                StepTime(
                    verb.name,
                    verb.stage,
                    verb.micro_batch,
                    seconds(verb.start),
                    seconds(verb.end),
                    sum(seconds(end) - seconds(start) for start, end in verb.waits),
                )
                for verb in kept.verbs
            ]
            transfers = [
                Transfer(
                    entry.kind,
                    entry.stage,
                    entry.bytes,
                    seconds(entry.posted),
                    seconds(entry.wait[0]),
                    seconds(entry.wait[1]),
                    ran_s.get(id(entry)),
                    self._alone_s.get((entry.kind, entry.stage)),
                )
                for entry in kept.waited
                if entry.wait is not None
            ]
            result.append(IterationTimes(kept.number, seconds(kept.start), seconds(kept.end), steps, transfers))
        self._kept, self._posted = [], []
        return result

    def _runs(self) -> dict[int, tuple[float, float]]:
        """Return when each collective ran, by the identity of its entry; empty if the clock sees no arrival.

        Those nobody has waited for yet come last, and may still be under way.
        """
        seen = [entry for entry in self._posted if entry.arrival is not None and entry.wait is not None]
        posted = [self._clock.seconds(entry.posted) for entry in seen]
        arrived = [self._clock.seconds(entry.arrival) for entry in seen]
        return {id(entry): run for entry, run in zip(seen, runs(posted, arrived), strict=True)}
