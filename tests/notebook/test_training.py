"""`megatron_lite.train`: a result, the command's errors, an interrupt, and nothing left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import megatron_lite
from megatron_lite.errors import DataError, UsageError
from megatron_lite.generation.tasks import record_results
from tests.support import warm_python
from tests.support.launch import STARTED, find_marked

ROOT = Path(__file__).resolve().parents[2]
OPTIONS: dict[str, Any] = {**STARTED, "train_iters": 4, "validation_iters": 1, "seed": 3}
OPTIONS |= {"validation_interval": 2, "checkpoint_interval": 2, "log_interval": 1}
# A run without torch: it says that it is ready, and on SIGINT saves, or on SIGTERM leaves a file.
FAKE = """
import json, os, signal, sys, time
def end(number, frame):
    if sys.argv[2:] == ["early"]:
        sys.exit(75)
    open(sys.argv[1] + "/exit.json", "w").write(json.dumps(
        {"exit_code": 75, "status": "stopped", "message": "saved", "signal": number}))
    sys.exit(75)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, end)
print("ready", os.getpid(), flush=True)
time.sleep(60)
"""
CALL = """
import json, sys, threading
from megatron_lite.notebook import training
from megatron_lite.run import run_process
training._checked = lambda words, ranks: training.Path(sys.argv[1])
run_process.program = lambda ranks: ["-c", open(sys.argv[1] + "/fake.py").read(), sys.argv[1]]
result = training.train()
file = training.Path(sys.argv[1], "exit.json")
file.write_text(json.dumps({**json.loads(file.read_text()), "exit_code": 1, "status": "failed"}))
print(result.status, threading.active_count(), flush=True)
result = training.train("early")
print(result.status, "again", flush=True)
"""


def state() -> tuple[Any, ...]:
    """What a call may not change in its process."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    threads = threading.enumerate()
    streams = (sys.stdout, sys.stderr, os.fstat(1), os.fstat(2))
    return handlers, threads, children, streams, dict(os.environ), os.getcwd()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs in interpreters that have imported torch, without a GPU."""
    folder = warm_python.folder()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield


def test_a_result_and_a_second_train(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second goes back to an earlier checkpoint: what it trains anew replaces the metrics."""
    options = OPTIONS | {"experiment_dir": tmp_path / "run"}
    before = state()
    first = megatron_lite.train(**options)
    assert state() == before
    assert "iteration 4/4" in capsys.readouterr().out
    assert (first.folder, first.status) == (tmp_path / "run", "done")
    phases = [(record["phase"], record["iteration"]) for record in first.metrics]
    assert phases.count(("training", 4)) == phases.count(("validation", 4)) == 1
    losses = {r["iteration"]: r["loss"] for r in first.metrics if r["phase"] == "validation"}
    best = min(losses, key=losses.__getitem__)
    assert first.best_checkpoint == tmp_path / "run" / "checkpoints" / str(best)
    assert "metrics=" not in repr(first)
    for task in ("one", "two"):
        record_results(first.folder / "export" / "2", {task: {"acc,none": 0.5}})
    flags = ("--train_iters=3", "--resume_iteration=2")
    second = megatron_lite.train(*flags, **{**options, "train_iters": 3})
    numbers = [r["iteration"] for r in second.metrics if r["phase"] == "training"]
    assert numbers == [1, 2, 3] and second.metrics[:3] == first.metrics[:3]
    (tasks,) = (r for r in second.metrics if r["phase"] == "tasks")
    assert (tasks["iteration"], tasks["one/acc"], tasks["two/acc"]) == (2, 0.5, 0.5)


def test_errors_are_those_of_the_command(
    quick: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake is found at once, before the run has a process; others come from it."""
    for options, said in (
        ({"lr": "x", "nope": 1}, "--lr=x: not a number"),
        ({"experiment_dir": None, "checkpoint_interval": None}, "write experiment_dir='run'"),
        ({"dry_run": 1}, "--dry_run=1: train() trains; leave"),
        ({"train_tokens": 64}, "--train_iters and --train_tokens: write one of"),
    ):
        with pytest.raises(UsageError) as raised:
            megatron_lite.train(**{**OPTIONS, "experiment_dir": tmp_path / "run", **options})
        assert said in str(raised.value) and capsys.readouterr().out == ""
    with pytest.raises(UsageError, match="ranks=0: write"):
        megatron_lite.train(**OPTIONS, experiment_dir=tmp_path / "run", ranks=0)
    with pytest.raises(UsageError, match="usage: "):
        megatron_lite.train("--help")
    missing = {"dataset_source": "list", "data_path": [str(tmp_path / "none"), "x"]}
    before = state()
    with pytest.raises(DataError) as failed:
        megatron_lite.train(**{**OPTIONS, **missing, "experiment_dir": tmp_path / "run"})
    assert state() == before
    ending = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert str(failed.value) == ending["message"] and "no such file" in ending["message"]
    assert f"ERROR: {ending['message']}" in capsys.readouterr().out


@contextlib.contextmanager
def calling(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that calls `train` twice, on runs that take no torch and wait for a signal."""
    (folder / "fake.py").write_text(FAKE)
    with subprocess.Popen(
        [sys.executable, "-c", CALL, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


def test_an_interrupt_saves_and_returns(tmp_path: Path) -> None:
    """Sent to the process alone, as Jupyter may, or to its group; the run gets one signal, and is
    waited for. The second one has not taken the folder yet, where an earlier one has failed."""
    with calling(tmp_path) as process:
        assert line(process)[0] == "ready"
        process.send_signal(signal.SIGINT)
        assert line(process) == ["stopped", "1"]
        assert json.loads((tmp_path / "exit.json").read_text())["signal"] == signal.SIGINT
        assert line(process)[0] == "ready"
        os.killpg(process.pid, signal.SIGINT)
        assert line(process) == ["stopped", "again"]
        assert process.wait(10) == 0


def test_a_run_saves_when_the_kernel_dies(tmp_path: Path) -> None:
    """SIGKILL, as of a kernel that is restarted."""
    with calling(tmp_path) as process:
        run = int(line(process)[1])
        process.kill()
        deadline = time.monotonic() + 10
        while run in find_marked("", [run]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert json.loads((tmp_path / "exit.json").read_text())["signal"] == signal.SIGTERM
