"""A start stops by the clock: a number of minutes after its beginning, or some seconds before Slurm ends the job."""

from __future__ import annotations

import pytest

from megatron_lite.run.stop_signal import StopRequested, StopSignal
from megatron_lite.run.time_limit import BEFORE_END, MAX_MINUTES, idle_limit, passed, time_limits
from tests.support.harness import tiny_config

NOW_S = 1_800_000_000.0


class Clock:
    """A clock that a test moves."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def test_limits_and_when_they_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour that somebody adds to the time of day, or takes from it, changes no minute of --max_minutes."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1800001000")
    config = tiny_config(max_minutes=10.0, stop_before_end_s=300.0, experiment_dir="/x")
    clock, wall_clock = Clock(5.0), Clock(NOW_S)
    limits = time_limits(config, clock, wall_clock)
    assert [limit.number for limit in limits] == [MAX_MINUTES, BEFORE_END] and idle_limit(config) is None
    assert [limit.left_s() for limit in limits] == [600, 700]
    assert limits[1].describe().endswith(" (--stop_before_end_s)")
    for wall_clock.now_s in (NOW_S, NOW_S + 699, NOW_S - 3600):
        clock.now_s = 5.0 + 599
        assert passed(limits) == 0
        clock.now_s = 5.0 + 600
        assert passed(limits) == MAX_MINUTES
    wall_clock.now_s = NOW_S + 700
    assert passed(limits) == BEFORE_END
    assert time_limits(tiny_config()) == () and passed(()) == 0


@pytest.mark.parametrize("end", [None, "", "soon", "2026-11-23T02:00:00"])
def test_without_slurms_word_there_is_a_warning(monkeypatch: pytest.MonkeyPatch, end: str | None) -> None:
    """The same command may run by hand."""
    if end is None:
        monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    else:
        monkeypatch.setenv("SLURM_JOB_END_TIME", end)
    config = tiny_config(stop_before_end_s=300.0, experiment_dir="/x")
    assert time_limits(config) == ()
    assert "--stop_before_end_s has no effect: there is no SLURM_JOB_END_TIME" in str(idle_limit(config))
    assert idle_limit(tiny_config()) is None


def test_a_limit_counts_as_a_request_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks take the largest number, so one rank whose clock is ahead stops all; a signal keeps its own number."""
    stop = StopSignal()
    try:
        assert stop.received == 0
        stop.limits = time_limits(tiny_config(max_minutes=1e-9, experiment_dir="/x"))
        assert stop.received == MAX_MINUTES
        stop.received = 15
        assert stop.received == 15
    finally:
        stop.restore()
    assert StopRequested(MAX_MINUTES).reason == "--max_minutes" and StopRequested(15).reason == "a signal"
