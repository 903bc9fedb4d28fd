"""Limits on the time of a start: it saves and stops before somebody else ends it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_lite.config import Config
from megatron_lite.run.launch import job_end_s

# Numbers for the ranks' agreement, above those of all signals.
MAX_MINUTES, BEFORE_END = 100, 101
FLAGS = {MAX_MINUTES: "--max_minutes", BEFORE_END: "--stop_before_end_s"}


class TimeLimit(NamedTuple):
    """The moment at which a start stops, by a clock."""

    number: int
    end_s: float
    clock_s: Callable[[], float]

    def left_s(self) -> float:
        """Return the time until the start stops; negative afterwards."""
        return self.end_s - self.clock_s()

    def describe(self) -> str:
        """Return when the run stops, for the log."""
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + self.left_s()))
        return f"the run saves and stops at {moment} ({FLAGS[self.number]})"


def time_limits(
    config: Config, clock_s: Callable[[], float] = time.monotonic, wall_clock_s: Callable[[], float] = time.time
) -> tuple[TimeLimit, ...]:
    """Return the limits of a start that begins now.

    Slurm's end is a time of day. Minutes are counted by a clock that nobody sets: a correction of the time of day (NTP)
    neither ends the run nor prolongs it.
    """
    training, limits = config.training, []
    if training.max_minutes is not None:
        limits.append(TimeLimit(MAX_MINUTES, clock_s() + 60 * training.max_minutes, clock_s))
    if training.stop_before_end_s is not None and (end_s := job_end_s()) is not None:
        limits.append(TimeLimit(BEFORE_END, end_s - training.stop_before_end_s, wall_clock_s))
    return tuple(limits)


def idle_limit(config: Config) -> str | None:
    """Return a warning if --stop_before_end_s has no effect."""
    if config.training.stop_before_end_s is None or job_end_s() is not None:
        return None
    return "--stop_before_end_s has no effect: there is no SLURM_JOB_END_TIME, which Slurm sets since version 22.05"


def passed(limits: Sequence[TimeLimit]) -> int:
    """Return the number of a limit that has passed; 0 if none has."""
    return max((limit.number for limit in limits if limit.left_s() <= 0), default=0)
