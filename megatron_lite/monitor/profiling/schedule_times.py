"""Times of an iteration's schedule: recorded, and split into exposed and hidden time of each
collective.

A collective is posted, runs while the device computes, and is waited for where its result is
needed:

    posted ------- window: the computation continues ------- waits ---- exposed ---- done

On a GPU collectives run one after the other, and the end of each is known: it runs from its
posting, or from the end of the previous one if that is later, and the part before the wait is
hidden. On CPU the end of a transfer is unknown: `alone_s`, its duration with nothing else running,
is taken as its duration; the part not exposed is hidden, at most the window. The exposed time
includes the wait for slower ranks.

A recorder marks each verb of a stage and each wait. On CPU a mark is a time. On a GPU it is an
event on the compute stream, so that nothing is read before the profile ends; a second stream waits
for each collective and records its arrival.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_lite.distributed.traffic import FirstWait, Handle

# verbs of the schedule; the others start collectives or wait for them
COMPUTING = ("forward", "backward")
STARTING = "starting gathers and reductions"
Mark = Any  # a point in time; only its own clock can read it


def range_name(verb: str, stage: int | None, micro_batch: int | None = None) -> str:
    """Return a verb's or collective's name in traces and tables: `forward stage 2, micro-batch
    0`."""
    if stage is None:
        return verb
    return f"{verb} stage {stage}" + ("" if micro_batch is None else f", micro-batch {micro_batch}")


def iterations_in_words(first: int, last: int) -> str:
    """Return `iteration 3` or `iterations 3-4`."""
    return f"iteration {first}" if first == last else f"iterations {first}-{last}"


@dataclass
class Transfer:
    """One collective that the iteration waited for, possibly posted in the previous one.

    Times here are seconds on one clock; during recording, they are the clock's marks.
    """

    kind: str  # as in `distributed.traffic`
    stage: int | None  # None: outside the stages
    bytes: int  # of the full buffer
    posted_s: float
    waits_s: float = math.inf
    done_s: float = math.inf  # the end of the wait
    ran_s: tuple[float, float] | None = None  # its start and end on a GPU
    alone_s: float | None = None  # its duration with nothing else running; None: unknown

    @property
    def exposed_s(self) -> float:
        """Time that the computation waited."""
        return self.done_s - self.waits_s

    @property
    def takes_s(self) -> float | None:
        """Its duration; None: unknown."""
        return self.alone_s if self.ran_s is None else self.ran_s[1] - self.ran_s[0]

    @property
    def under_way_s(self) -> tuple[float, float]:
        """Its start and end; on CPU, its posting and the end of the wait."""
        return self.ran_s or (self.posted_s, self.done_s)

    @property
    def window_s(self) -> float:
        """The time in flight before the wait."""
        start_s, end_s = self.under_way_s
        return max(min(end_s, self.waits_s) - start_s, 0.0)

    @property
    def hidden_s(self) -> float | None:
        """The part of its duration in which nothing waited for it; None: unknown."""
        if self.ran_s is not None:
            return self.window_s
        return (
            None
            if self.alone_s is None
            else min(max(self.alone_s - self.exposed_s, 0.0), self.window_s)
        )


@dataclass
class TimedVerb:
    """One verb of one stage."""

    verb: str
    stage: int
    micro_batch: int | None
    start_s: float
    end_s: float = math.inf
    waits: list[Transfer] = field(default_factory=list)  # collectives waited for inside the verb

    @property
    def waited_s(self) -> float:
        return sum(transfer.exposed_s for transfer in self.waits)

    @property
    def own_s(self) -> float:
        """Its time without waits."""
        return self.end_s - self.start_s - self.waited_s


@dataclass
class IterationTimes:
    """All verbs and collectives of one iteration, in order, from the previous iteration's end to
    its own."""

    iteration: int
    start_s: float
    end_s: float = math.inf
    steps: list[TimedVerb] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)


def runs(posted_s: Sequence[float], arrived_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return each collective's span: it starts when posted, but not before the previous one has
    ended."""
    begun = [
        max(posted, before)
        for posted, before in zip(posted_s, [float("-inf"), *arrived_s], strict=False)
    ]
    return [(start, max(end, start)) for start, end in zip(begun, arrived_s, strict=True)]


def hid_behind(transfer: Transfer, steps: Sequence[TimedVerb]) -> dict[tuple[str, int], float]:
    """Return the seconds that each computation, by (verb, stage), overlaps with a collective before
    the wait."""
    start_s = transfer.under_way_s[0]
    end_s = start_s + transfer.window_s
    behind = defaultdict[tuple[str, int], float](float)
    for step in steps:
        seconds = min(step.end_s, end_s) - max(step.start_s, start_s)
        if step.verb in COMPUTING and seconds > 0:
            behind[step.verb, step.stage] += seconds
    return behind


def parts(times: IterationTimes) -> dict[str, float]:
    """Return the seconds of each part of the iteration; they add up to its wall time.

    `waits for <kind>` is the exposed time. `gaps` is the time between the steps of the schedule,
    including the host's throttle. The schedule ends with the last "finish"; the gathers after it
    belong to the optimizer's step.
    """
    assert times.steps, "an iteration without steps"
    begins = times.steps[0].start_s
    ends = max(step.end_s for step in times.steps if step.verb == "finish")
    updated = max(times.steps[-1].end_s, ends)
    spent = [(s.start_s, s.own_s, s.verb if s.verb in COMPUTING else STARTING) for s in times.steps]
    spent += [(t.waits_s, t.exposed_s, f"waits for {t.kind}s") for t in times.transfers]
    result = defaultdict(float, dict.fromkeys((*COMPUTING, STARTING), 0.0))
    for _, seconds, name in spent:
        result[name] += seconds
    names = ("data and inputs", "gaps", "optimizer", "log, evaluation, saves")
    borders = itertools.pairwise((times.start_s, begins, ends, updated, times.end_s))
    for name, (start_s, end_s) in zip(names, borders, strict=True):
        result[name] = (
            end_s - start_s - sum(seconds for at_s, seconds, _ in spent if start_s <= at_s < end_s)
        )
    return result


# -- recording
# --------------------------------------------------------------------------------------------------------


class HostClock:
    """Marks points in time on a CPU, where a transfer's arrival is unknown before the wait for
    it."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def arrival(self, work: Handle) -> Mark | None:
        return None

    def seconds(self, mark: Mark) -> float:
        return float(mark)


class DeviceClock(HostClock):
    """The clock of a GPU's compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._origin, self._side = self.mark(), torch.cuda.Stream(device)

    def mark(self) -> Mark:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def arrival(self, work: Handle) -> Mark | None:
        """Record an event after the collective, on a stream reserved for this; the host does not
        wait."""
        with torch.cuda.stream(self._side):
            work.wait()
            return self.mark()

    def seconds(self, mark: Mark) -> float:
        """Return the seconds since the clock was created. Waits for the mark."""
        mark.synchronize()
        return float(self._origin.elapsed_time(mark)) / 1e3


class ScheduleRecorder:
    """Records every verb and collective from its creation on; `lap` ends an iteration.

    alone_s: seconds of a collective with nothing else running, by (kind, stage), where the clock
    sees no arrival.
    """

    def __init__(self, clock: HostClock, alone_s: Mapping[tuple[str, int | None], float]) -> None:
        self._clock, self._alone_s = clock, alone_s
        self._verb: TimedVerb | None = None  # in progress
        self._posted: list[
            tuple[Transfer, Mark | None]
        ] = []  # every collective with its arrival, in order
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
        """Record a collective of the current verb, and return a handle that records the wait for
        it."""
        stage = None if self._verb is None else self._verb.stage
        transfer = Transfer(
            kind, stage, bytes, self._clock.mark(), alone_s=self._alone_s.get((kind, stage))
        )
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
        """End an iteration; `keep`: it belongs to the profile, not to the warm-up."""
        done, end = self._current, self._clock.mark()
        done.iteration, done.end_s = iteration, end
        if keep and done.steps:
            self._kept.append(done)
        self._current = IterationTimes(0, end)

    def take(self) -> list[IterationTimes]:
        """Return the recorded iterations, in seconds. Synchronize the device first."""
        seconds, kept = self._clock.seconds, self._kept
        # Collectives without a wait so far were posted last, and may still be in flight.
        waited = [
            (transfer, arrival) for transfer, arrival in self._posted if transfer.done_s != math.inf
        ]
        for transfer, _ in waited:
            transfer.posted_s = seconds(transfer.posted_s)
            transfer.waits_s, transfer.done_s = seconds(transfer.waits_s), seconds(transfer.done_s)
        seen = [(transfer, seconds(arrival)) for transfer, arrival in waited if arrival is not None]
        ran_s = runs(
            [transfer.posted_s for transfer, _ in seen], [arrived_s for _, arrived_s in seen]
        )
        for (transfer, _), ran in zip(seen, ran_s, strict=True):
            transfer.ran_s = ran
        spans: list[IterationTimes | TimedVerb] = [
            *kept,
            *(verb for times in kept for verb in times.steps),
        ]
        for timed in spans:
            timed.start_s, timed.end_s = seconds(timed.start_s), seconds(timed.end_s)
        self._kept, self._posted = [], []
        return kept
