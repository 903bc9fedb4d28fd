"""Whatever ends a start early leaves its reason in exit.json, once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lite.distributed.peers import Place, own_place
from megatron_lite.run import ending, exit_status
from megatron_lite.run.ending import Ending
from tests.support.launch import ended_process


class LeaveError(Exception):
    """The process would have ended."""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ending]:
    """A start that has got its experiment directory, as its fourth start."""

    def leave(code: int) -> None:
        raise LeaveError(code)

    monkeypatch.setattr(exit_status, "leave", leave)
    before = signal.getsignal(signal.SIGUSR2)
    one = Ending(str(tmp_path), 0)
    experiment: Any = SimpleNamespace(run=3, root=tmp_path, artifacts=None, is_lost=lambda: False)
    one.opened(experiment)
    yield one
    one.finish()
    signal.signal(signal.SIGUSR2, before)


def ended(tmp_path: Path) -> tuple[int, str, str]:
    content = json.loads((tmp_path / "exit.json").read_text())
    assert content["run"] == 3
    return content["exit_code"], content["status"], content["message"]


def test_a_stop_signal_during_the_set_up(start: Ending, tmp_path: Path) -> None:
    """Nothing is lost and the same command goes on, as after a stop later; batch systems look at exit.json."""
    with pytest.raises(LeaveError, match="75"):
        start.stopped(signal.SIGTERM)
    assert ended(tmp_path) == (
        75,
        "stopped",
        "stopped by SIGTERM during the set-up: nothing to save; the same command starts again",
    )


def test_a_stop_signal_after_the_death_of_a_peer(start: Ending, tmp_path: Path) -> None:
    """torchrun signals the others when a rank has died: the death is the reason."""
    pid = ended_process()
    start.places = [own_place(0), Place(1, own_place(1).host, own_place(1).machine, pid)]
    with pytest.raises(LeaveError, match="6"):
        start.stopped(signal.SIGTERM)
    code, status, message = ended(tmp_path)
    assert (code, status) == (6, "failed") and message.startswith(f"lost rank 1 (process {pid} on ")


def test_the_death_of_torchrun_is_named_unless_the_run_is_over(
    start: Ending, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []
    start.kill_children = lambda: killed.append(os.getpid())
    start.launcher_gone("torchrun is gone")
    assert ended(tmp_path) == (6, "failed", "torchrun is gone") and killed
    assert capsys.readouterr().err == "ERROR: torchrun is gone\n"


def test_the_last_exit_json_is_not_replaced(start: Ending, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is over may lose its launcher while it leaves its groups."""
    start.finish()
    exit_status.write_exit(str(tmp_path), 0, "done", "training complete", 3)
    start.launcher_gone("torchrun is gone")
    assert ended(tmp_path) == (0, "done", "training complete")


def test_only_the_first_reason_is_reported(start: Ending, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "LAUNCHER_S", 0.1)
    start.report(MemoryError("first"))
    start.launcher_gone("second")
    assert ended(tmp_path)[0] == 7
