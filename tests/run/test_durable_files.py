"""A file is replaced whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from megatron_lite.run.durable_files import replace_file, sync_folder


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failed_replacement_leaves_the_old_file_and_nothing_else(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the disk fills up: the old content stays, no temporary file does."""
    path = tmp_path / "a.json"
    replace_file(path, b"old")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(OSError, match="No space"):
        replace_file(path, b"new", sync=True)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_folders_that_cannot_be_synced_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems answer EINVAL; a real failure is raised."""
    for code, raised in ((errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)):

        def fail(descriptor: int, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "fsync", fail)
        if raised:
            with pytest.raises(OSError, match=os.strerror(code)):
                sync_folder(tmp_path)
        else:
            sync_folder(tmp_path)
