"""Times of an iteration's schedule, and what follows from them: exposed and hidden time of each collective.

A collective is posted, runs while the device computes, and is waited for where its result is needed:

    posted ------- window: the computation goes on ------- waits ---- exposed ---- done

On a GPU collectives run one after the other, and each is seen to end: it takes the time from the end of the one before,
if that is later than its posting, and the part before somebody waits is hidden. On CPU nothing tells when a transfer
ends. `alone_s`, its time with nothing else running, stands for the time that it takes, and as much of it as was not
exposed was hidden, at most the window. The exposed time also holds the wait for ranks that came later.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

# The verbs of the schedule that compute; the others start collectives, or wait for them and zero padding.
COMPUTING = ("forward", "backward")
STARTING = ("gather", "require", "accumulate", "reduce", "finish")


@dataclass(frozen=True)
class StepTime:
    """One verb of one stage; times in seconds on one clock."""

    verb: str
    stage: int
    micro_batch: int | None
    start_s: float
    end_s: float
    waited_s: float = 0.0  # for collectives, inside of the verb

    @property
    def own_s(self) -> float:
        """Its time without waits."""
        return self.end_s - self.start_s - self.waited_s


@dataclass(frozen=True)
class Transfer:
    """One collective that was waited for in the iteration; it may have been posted in the one before."""

    kind: str  # as in `distributed.traffic`
    stage: int | None  # None: of no stage
    bytes: int  # of the full buffer
    posted_s: float
    waits_s: float
    done_s: float  # the end of the wait
    ran_s: tuple[float, float] | None = None  # its start and end on a GPU
    alone_s: float | None = None  # how long it takes with nothing else running; None: unknown

    @property
    def exposed_s(self) -> float:
        """Time that the computation stood still."""
        return self.done_s - self.waits_s

    @property
    def takes_s(self) -> float | None:
        """Time that it takes; None: unknown."""
        return self.alone_s if self.ran_s is None else self.ran_s[1] - self.ran_s[0]

    @property
    def hidden_s(self) -> float | None:
        """Time that it took without anybody waiting; None: unknown."""
        if self.ran_s is not None:
            return max(min(self.ran_s[1], self.waits_s) - self.ran_s[0], 0.0)
        if self.alone_s is None:
            return None
        return min(max(self.alone_s - self.exposed_s, 0.0), max(self.waits_s - self.posted_s, 0.0))

    @property
    def under_way_s(self) -> tuple[float, float]:
        """When it began and ended, as far as that is known: on CPU its posting and the end of the wait."""
        return self.ran_s or (self.posted_s, self.done_s)


@dataclass(frozen=True)
class IterationTimes:
    """All verbs and collectives of one iteration, in order, from the end of the one before to its own end."""

    iteration: int
    start_s: float
    end_s: float
    steps: Sequence[StepTime]
    transfers: Sequence[Transfer]

    @property
    def wall_s(self) -> float:
        return self.end_s - self.start_s


def runs(posted_s: Sequence[float], arrived_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return when each collective ran, if each began when it was posted, but not before the end of the one before."""
    begun = [max(posted, before) for posted, before in zip(posted_s, [float("-inf"), *arrived_s], strict=False)]
    return [(start, max(end, start)) for start, end in zip(begun, arrived_s, strict=True)]


def hid_behind(transfer: Transfer, steps: Sequence[StepTime]) -> dict[tuple[str, int], float]:
    """Return the seconds of each computation, by (verb, stage), that ran while the collective did, before the wait."""
    start_s, end_s = transfer.under_way_s
    end_s = min(end_s, transfer.waits_s)
    computing = [step for step in steps if step.verb in COMPUTING]
    behind: dict[tuple[str, int], float] = {}
    first = max(bisect.bisect_right([step.start_s for step in computing], start_s) - 1, 0)
    for step in computing[first:]:
        if step.start_s >= end_s:
            break
        seconds = min(step.end_s, end_s) - max(step.start_s, start_s)
        if seconds > 0:
            behind[step.verb, step.stage] = behind.get((step.verb, step.stage), 0.0) + seconds
    return behind


def parts(times: IterationTimes) -> dict[str, float]:
    """Return the seconds of the iteration by what they went into; they add up to its wall time.

    `waits for <kind>` is the exposed time. `gaps` is the time between the steps of the schedule, the throttle's on the
    host included. The schedule ends with the last "finish"; the gathers after it are part of the optimizer's step.
    """
    assert times.steps, "an iteration without steps"
    begins = times.steps[0].start_s
    ends = max(step.end_s for step in times.steps if step.verb == "finish")
    updated = max(times.steps[-1].end_s, ends)
    result = {verb: 0.0 for verb in COMPUTING}
    result["starting gathers and reductions"] = 0.0
    for step in times.steps:
        result[step.verb if step.verb in COMPUTING else "starting gathers and reductions"] += step.own_s
    for transfer in times.transfers:
        name = f"waits for {transfer.kind}s"
        result[name] = result.get(name, 0.0) + transfer.exposed_s

    def spent(start_s: float, end_s: float) -> float:
        """Time within the bounds that is counted above: verbs, and waits outside of them."""
        waits = sum(t.exposed_s for t in times.transfers if start_s <= t.waits_s < end_s)
        return waits + sum(step.own_s for step in times.steps if start_s <= step.start_s < end_s)

    for name, start_s, end_s in (
        ("data and inputs", times.start_s, begins),
        ("gaps", begins, ends),
        ("optimizer", ends, updated),
        ("log, evaluation, saves", updated, times.end_s),
    ):
        result[name] = end_s - start_s - spent(start_s, end_s)
    return result
