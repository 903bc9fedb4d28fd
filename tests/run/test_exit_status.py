"""exit.json tells how the latest start ended, on a full disk too, and belongs to the run that has
the directory."""

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_lite.distributed.processes import machine_name, start_ticks
from megatron_lite.errors import OutOfMemoryError, Remedy, StoppedError, UsageError
from megatron_lite.run import exit_status, experiment
from megatron_lite.run.exit_status import name_missing_package
from megatron_lite.run.experiment import FolderLock, Holder
from tests.support.launch import read_exit


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no file gets another block: new files stay empty, and a write beyond the blocks
    of a file fails."""
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        room = os.fstat(descriptor).st_blocks * 512 - os.lseek(descriptor, 0, os.SEEK_CUR)
        if len(data) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    def no_room(path: Path, data: bytes, sync: bool = False) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(exit_status, "replace_file", no_room)


@pytest.mark.parametrize(
    "message", ["No space left", "a long message, " * 1000, "\N{SNOWMAN}" * 5000, '"\n\x01' * 5000]
)
def test_a_full_disk_does_not_keep_the_ending_of_an_earlier_start(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The space for the ending is taken when the run begins; a longer message is cut to it, in any
    characters.

    Advice on memory is not cut: ten options are more than there are.
    """
    died = OutOfMemoryError(message)
    died.remedies = [
        Remedy("mlp_recompute_level", "activation", 2**50, "--mlp_recompute_level=activation")
    ] * 10
    died.snapshot = "/folder" * 60
    exit_status.write_exit(str(tmp_path), None, "running", "", run=3)
    assert read_exit(tmp_path)["status"] == "running"
    fill_disk(monkeypatch)
    exit_status.write_exit(
        str(tmp_path), 8, "failed", message, run=3, details={"detail": "x" * 400, **died.details()}
    )
    ended = read_exit(tmp_path)
    assert len(ended["advice"]) == 10
    assert (ended["exit_code"], ended["status"], ended["run"]) == (8, "failed", 3)
    assert message.startswith(ended["message"].removesuffix(" (cut)")) and len(
        ended["message"]
    ) >= min(800, len(message))


def test_an_exit_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The console says that the file is of an earlier start."""
    (tmp_path / "exit.json").mkdir()
    exit_status.write_exit(str(tmp_path), 8, "failed", "", run=3)
    said = capsys.readouterr().err
    assert (
        said
        == f"WARNING: cannot write {tmp_path}/exit.json, which tells how an earlier start ended: Is a directory\n"
    )


def test_a_wrong_command_leaves_the_exit_file_of_a_running_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once that start has ended, the next ending is recorded."""
    parent = os.getppid()
    other = Holder("here", machine_name(), parent, start_ticks(parent))
    monkeypatch.setattr(experiment, "_this_process", lambda nonce: other._replace(nonce=nonce))
    lock = FolderLock(tmp_path)
    lock.take()
    exit_status.write_exit(str(tmp_path), None, "running", "", run=0)
    assert exit_status.report(UsageError("no"), str(tmp_path), prints=False) == 2
    assert read_exit(tmp_path)["status"] == "running"
    lock.release()
    assert exit_status.report(UsageError("no"), str(tmp_path), prints=True) == 2
    assert read_exit(tmp_path)["exit_code"] == 2


def test_a_signal_while_this_start_takes_the_directory(tmp_path: Path) -> None:
    """Its own lock does not keep it from telling how it ended."""
    lock = FolderLock(tmp_path)
    lock.take()
    assert exit_status.report(StoppedError("stopped"), str(tmp_path), prints=True) == 75
    assert read_exit(tmp_path)["status"] == "stopped"
    lock.release()


# -- ranks that leave the printing to another one
# ---------------------------------------------------------------------


class EndedError(Exception):
    """torchrun's SIGTERM."""


@pytest.fixture
def silent_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this process rank 1 of torchrun; return the file for torchrun."""
    path = tmp_path / "error.json"
    variables = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_ERROR_FILE": str(path),
    }
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    return path


def missing_package() -> None:
    name_missing_package(ModuleNotFoundError, ModuleNotFoundError(name="some_package"), None)


def wrong_flag() -> None:
    sys.exit(exit_status.report(UsageError("--lr=x: no some_package"), None, prints=False))


@pytest.mark.parametrize("fails", [wrong_flag, missing_package])
def test_a_silent_rank_tells_torchrun_and_waits_for_its_end(
    fails: Callable[[], None],
    silent_rank: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A rank that ends makes torchrun end rank 0, which may still be importing and has said
    nothing."""
    handler = signal.getsignal(signal.SIGTERM)

    def slept(seconds: float) -> None:
        assert seconds >= 10 and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        raise EndedError

    monkeypatch.setattr(exit_status.time, "sleep", slept)
    try:
        with pytest.raises(EndedError):
            fails()
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert "some_package" in json.loads(silent_rank.read_text("utf-8"))["message"]["message"]
    assert capsys.readouterr().err == ""


def test_a_silent_rank_that_nobody_ends_speaks_for_itself(
    silent_rank: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its command line alone is wrong, and rank 0 waits for it."""
    monkeypatch.setattr(exit_status.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(exit_status.signal, "signal", lambda number, handler: None)
    assert exit_status.report(UsageError("--lr=x: no"), str(tmp_path / "run"), prints=False) == 2
    assert capsys.readouterr().err == "ERROR on rank 1: --lr=x: no\n"
    assert read_exit(tmp_path / "run")["message"] == "--lr=x: no"


def test_ranks_without_torchrun_do_not_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr(exit_status.time, "sleep", lambda seconds: pytest.fail("waits"))
    assert exit_status.report(UsageError("no"), None, prints=False) == 2
    assert capsys.readouterr().err == ""
