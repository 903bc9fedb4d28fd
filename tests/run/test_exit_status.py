"""exit.json tells how the latest start ended, on a full disk too, and belongs to the run that has the directory."""

import errno
import os
from pathlib import Path

import pytest

from megatron_lite.errors import OutOfMemoryError, Remedy, UsageError
from megatron_lite.run import exit_status
from megatron_lite.run.experiment import FolderLock
from tests.support.launch import read_exit


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on no file gets another block: new files stay empty, and a write beyond the blocks of a file fails."""
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
    """The space for the ending is taken when the run begins; a longer message is cut to it, in any characters.

    Advice on memory is not cut: ten options are more than there are.
    """
    died = OutOfMemoryError(message)
    died.remedies = [Remedy("mlp_recompute_level", "activation", 2**50, "--mlp_recompute_level=activation")] * 10
    died.snapshot = "/folder" * 60
    exit_status.write_exit(str(tmp_path), None, "running", "", run=3)
    assert read_exit(tmp_path)["status"] == "running"
    fill_disk(monkeypatch)
    exit_status.write_exit(str(tmp_path), 8, "failed", message, run=3, details={"detail": "x" * 400, **died.details()})
    ended = read_exit(tmp_path)
    assert len(ended["advice"]) == 10
    assert (ended["exit_code"], ended["status"], ended["run"]) == (8, "failed", 3)
    assert message.startswith(ended["message"].removesuffix(" (cut)")) and len(ended["message"]) >= min(
        800, len(message)
    )


def test_an_exit_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The console says that the file is of an earlier start."""
    (tmp_path / "exit.json").mkdir()
    exit_status.write_exit(str(tmp_path), 8, "failed", "", run=3)
    said = capsys.readouterr().err
    assert (
        said == f"WARNING: cannot write {tmp_path}/exit.json, which tells how an earlier start ended: Is a directory\n"
    )


def test_a_wrong_command_leaves_the_exit_file_of_a_running_start_alone(tmp_path: Path) -> None:
    """Once that start has ended, the next ending is recorded."""
    lock = FolderLock(tmp_path)
    lock.take()
    exit_status.write_exit(str(tmp_path), None, "running", "", run=0)
    assert exit_status.report(UsageError("no"), str(tmp_path), prints=False) == 2
    assert read_exit(tmp_path)["status"] == "running"
    lock.release()
    assert exit_status.report(UsageError("no"), str(tmp_path), prints=True) == 2
    assert read_exit(tmp_path)["exit_code"] == 2
