"""Limits on the time of a start: it saves and stops before somebody else ends it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from megatron_lite.config import Config
from megatron_lite.run.launch import job_end_s

# Numbers for the ranks' agreement, above those of all signals.
MAX_MINUTES, BEFORE_END = 100, 101
FLAGS = {MAX_MINUTES: "--max_minutes", BEFORE_END: "--stop_before_end_s"}


class TimeLimit(NamedTuple):
    """The moment at which a start stops, in seconds since 1970."""

    number: int
    end_s: float

    def describe(self) -> str:
        """Return when the run stops, for the log."""
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.end_s))
        return f"the run saves and stops at {moment} ({FLAGS[self.number]})"


def time_limits(config: Config, now_s: float) -> tuple[TimeLimit, ...]:
    """Return the limits of a start that begins now."""
    training, limits = config.training, []
    if training.max_minutes is not None:
        limits.append(TimeLimit(MAX_MINUTES, now_s + 60 * training.max_minutes))
    if training.stop_before_end_s is not None and (end_s := job_end_s()) is not None:
        limits.append(TimeLimit(BEFORE_END, end_s - training.stop_before_end_s))
    return tuple(limits)


def idle_limit(config: Config) -> str | None:
    """Return a warning if --stop_before_end_s has no effect."""
    if config.training.stop_before_end_s is None or job_end_s() is not None:
        return None
    return "--stop_before_end_s has no effect: there is no SLURM_JOB_END_TIME, which Slurm sets since version 22.05"


def passed(limits: Sequence[TimeLimit], now_s: float) -> int:
    """Return the number of a limit that has passed; 0 if none has."""
    return max((limit.number for limit in limits if now_s >= limit.end_s), default=0)
