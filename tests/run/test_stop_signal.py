"""What asks a run to stop: some signals, a number of minutes after its beginning, or the end of its
Slurm job."""

import datetime
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from megatron_lite.pretrain import close
from megatron_lite.run import launch, stop_signal
from megatron_lite.run.stop_signal import (
    BEFORE_END,
    MAX_MINUTES,
    StopRequested,
    StopSignal,
    TimeLimit,
    idle_limit,
    time_limits,
)
from tests.support.harness import tiny_config, usual_signals
from tests.support.launch import ROOT

# A fork for each signal, with SIGHUP ignored for a negative number: the interpreter starts and
# imports once.
PROGRAM = """
import os, signal, sys, time
from megatron_lite.run.stop_signal import StopSignal

children = []
for number in map(int, sys.argv[1:]):
    child = os.fork()
    children.append(child)
    if not child:
        break
if child:
    sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
signal.signal(signal.SIGHUP, signal.SIG_IGN if number < 0 else signal.SIG_DFL)
stop = StopSignal()
stop.saves = True
os.kill(os.getpid(), abs(number))
time.sleep(0.1)
os.write(1, f"{number} {stop.received}\\n".encode())
stop.ignore()
time.sleep(1.1)
os.kill(os.getpid(), abs(number))  # a second one, much later, would end the process
time.sleep(0.1)
"""


def test_a_signal_is_a_request_until_all_is_saved() -> None:
    """A closed terminal (SIGHUP) asks to save, too, but not under nohup, where SIGHUP is ignored
    from the start. After the last save no signal changes the exit code."""
    expected = {
        number: int(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    }
    expected |= {-signal.SIGHUP: 0}
    command = [sys.executable, "-c", PROGRAM, *(str(int(number)) for number in expected)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done
    assert dict(tuple(map(int, line.split())) for line in done.stdout.splitlines()) == expected


def test_signals_are_ignored_as_soon_as_a_peer_may_end() -> None:
    """Leaving the process groups takes time; a second signal within would replace the exit code of
    a saved run."""
    run = MagicMock()
    close(run, 75, "stopped")
    steps = [call[0] for call in run.mock_calls]
    assert (
        steps.index("distributed.barrier")
        < steps.index("stop.ignore")
        < steps.index("distributed.close")
    )


# -- limits on the time
# ---------------------------------------------------------------------------------------------

NOW_S = 1_800_000_000.0


def passed(limits: Sequence[TimeLimit]) -> int:
    """Return what a process has received from its limits alone."""
    return StopSignal.received.fget(SimpleNamespace(signal=0, limits=limits))  # type: ignore[attr-defined]


def test_a_signal_to_an_interpreter_that_ends_is_ignored() -> None:
    """The exit code is that of the mistake; Python's handlers are gone by then."""
    at_end = "atexit.register(os.kill, os.getpid(), signal.SIGTERM)"
    words = "sys.argv[1:] = ['--zero_stage=9']; sys.exit(pretrain_gpt.command())"
    code = f"import atexit, os, signal, sys, pretrain_gpt; {at_end}; {words}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "--zero_stage=9" in done.stderr


def test_limits_and_when_they_have_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour that somebody adds to the time of day, or takes from it, changes no minute of
    --max_minutes."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1800001000")
    config = tiny_config(max_minutes=10.0, stop_before_end_s=300.0, experiment_dir="/x")
    now = {"clock": 5.0, "wall clock": NOW_S}
    limits = time_limits(config, lambda: now["clock"], lambda: now["wall clock"])
    assert [limit.number for limit in limits] == [MAX_MINUTES, BEFORE_END] and idle_limit(
        config, limits
    ) is None
    assert [limit.left_s() for limit in limits] == [600, 700]
    assert limits[1].describe().endswith(" (--stop_before_end_s)")
    for now["wall clock"] in (NOW_S, NOW_S + 699, NOW_S - 3600):
        now["clock"] = 5.0 + 599
        assert passed(limits) == 0
        now["clock"] = 5.0 + 600
        assert passed(limits) == MAX_MINUTES
    now["wall clock"] = NOW_S + 700
    assert passed(limits) == BEFORE_END
    assert time_limits(tiny_config()) == () and passed(()) == 0


def test_without_slurms_word_there_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command may run by hand."""
    config = tiny_config(stop_before_end_s=300.0, experiment_dir="/x")
    for end in ("", "soon", "2026-11-23T02:00:00", None):
        monkeypatch.setenv("SLURM_JOB_END_TIME", end or "")
        if end is None:
            monkeypatch.delenv("SLURM_JOB_END_TIME")
        assert time_limits(config) == (), end
        assert "--stop_before_end_s has no effect: there is no SLURM_JOB_END_TIME" in str(
            idle_limit(config, ())
        ), end
    assert idle_limit(tiny_config(), ()) is None


@pytest.mark.parametrize("answer", ["2026-11-23T02:00:00", "N/A", "", "exit 1", "sleep 60"])
def test_an_older_slurm_is_asked_once(
    answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rank 0 alone; squeue may name no end, fail or hang."""
    calls, squeue = tmp_path / "calls", tmp_path / "squeue"
    act = answer if " " in answer else f"echo {answer}"
    squeue.write_text(f'#!/bin/sh\necho "$@" >>{calls}\n{act}\n')
    squeue.chmod(0o755)
    for name, value in (
        ("PATH", f"{tmp_path}:{os.environ['PATH']}"),
        ("SLURM_JOB_ID", "42"),
        ("RANK", "1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.setattr(launch, "SQUEUE_S", 1.0 if "sleep" in answer else 60.0)
    config, now_s = tiny_config(stop_before_end_s=300.0, experiment_dir="/x"), 1_700_000_000.0
    assert time_limits(config) == () and time_limits(tiny_config()) == () and not calls.exists()
    monkeypatch.setenv("RANK", "0")
    limits = time_limits(config, wall_clock_s=lambda: now_s)
    assert calls.read_text() == "--noheader --jobs=42 --format=%e\n"
    if answer.startswith("2026"):
        end_s = datetime.datetime(2026, 11, 23, 2).timestamp()
        assert [limit.left_s() for limit in limits] == [end_s - 300 - now_s] and idle_limit(
            config, limits
        ) is None
    else:
        assert limits == () and "squeue names no end" in str(idle_limit(config, limits))


def test_an_end_that_has_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`scontrol update TimeLimit`: squeue is asked when the known end is near, and only then; by
    two numbers for a task of an array, as one of them has the number of all."""
    answer, calls = tmp_path / "answer", tmp_path / "calls"
    (tmp_path / "squeue").write_text(f'#!/bin/sh\necho "$@" >>{calls}\ncat {answer}\n')
    (tmp_path / "squeue").chmod(0o755)
    given = {
        "SLURM_JOB_END_TIME": str(int(NOW_S) + 1000),
        "SLURM_JOB_ID": "81236",
        "SLURM_ARRAY_JOB_ID": "81234",
    }
    for name, value in {
        **given,
        "SLURM_ARRAY_TASK_ID": "2",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }.items():
        monkeypatch.setenv(name, value)
    now_s = NOW_S
    config = tiny_config(stop_before_end_s=300.0, experiment_dir="/x")
    (limit,) = time_limits(config, wall_clock_s=lambda: now_s)
    assert limit.left_s() == 700 and not calls.exists()
    answer.write_text(datetime.datetime.fromtimestamp(NOW_S + 5000).isoformat())
    now_s += 700
    assert limit.left_s() == 4000
    answer.write_text("")
    now_s += 4000
    assert [limit.left_s(), limit.left_s()] == [0, 0], "it has not moved again"
    assert calls.read_text() == "--noheader --jobs=81234_2 --format=%e\n" * 2
    monkeypatch.setenv("RANK", "1")
    assert time_limits(config) == () and idle_limit(config, ()) is None, (
        "rank 0 alone looks at the end"
    )


def test_slurms_second_sigterm_ends_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm repeats it at the end of a grace time; outside of a step, and for Ctrl-C, a second one
    ends the rank."""
    monkeypatch.setattr(stop_signal, "SAME_REQUEST_S", -1.0)
    ended, reader = list[int](), iter(())
    monkeypatch.setattr(stop_signal, "leave_at_once", ended.append)
    with usual_signals():
        stop = StopSignal()
        stop.saves = True
        for step, number, ends in (
            ("0", signal.SIGTERM, 0),
            ("0", signal.SIGINT, 1),
            ("", signal.SIGTERM, 1),
        ):
            monkeypatch.setenv("SLURM_STEP_ID", step)
            if not step:
                monkeypatch.delenv("SLURM_STEP_ID")
            ended.clear()
            reader = iter([bytes([signal.SIGTERM, number])[place : place + 1] for place in (0, 1)])
            monkeypatch.setattr(os, "read", lambda descriptor, size: next(reader))  # noqa: B023
            with pytest.raises(StopIteration):
                stop._watch(-1)
            assert ended == [number] * ends
            stop._requested_s = None


def test_a_limit_counts_as_a_request_of_this_rank() -> None:
    """All ranks take the largest number, so one rank whose clock is ahead stops all; a signal keeps
    its own number."""
    with usual_signals():
        stop = StopSignal()
        assert stop.received == 0
        stop.limits = time_limits(tiny_config(max_minutes=1e-9, experiment_dir="/x"))
        assert stop.received == MAX_MINUTES
        stop.signal = 15
        assert stop.received == 15
    assert (
        StopRequested(MAX_MINUTES).reason == "--max_minutes"
        and StopRequested(15).reason == "a signal"
    )
