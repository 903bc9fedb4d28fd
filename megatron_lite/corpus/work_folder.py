"""The folder of unfinished work next to the output: one process at a time works in it."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from megatron_lite.errors import StorageError
from megatron_lite.run.durable_files import lock_file

LOCK = "lock"
_POLL_S = 0.2


def work_folder(prefix: str) -> Path:
    """Return the folder of unfinished work of a prefix."""
    return Path(prefix + ".partial")


@contextlib.contextmanager
def held(folder: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Make a work folder and hold it for a block; the system gives it up when the process ends, however it ends.

    on_wait: called once if another process holds the folder, which is then waited for.

    Raises: StorageError if the folder cannot be made; without `on_wait`, if another process holds it.
    """
    descriptor, waits = -1, False
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{folder}: cannot be created: {error.strerror}") from error
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if lock_file(descriptor, folder / LOCK):
                break
        except FileNotFoundError:  # its owner has just removed the folder
            continue
        except OSError as error:
            raise StorageError(f"{folder}: cannot be written: {error.strerror}") from error
        os.close(descriptor)
        if on_wait is None:
            raise StorageError(f"{folder}: another process is writing it; wait for it or take another prefix")
        if not waits:
            on_wait()
            waits = True
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(descriptor)


def sweep(folder: Path, keys: Collection[str]) -> None:
    """Delete pieces that are not among `keys`, and whatever else a killed process has left."""
    for path in folder.iterdir():
        if path.name != LOCK and path.name.partition(".")[0] not in keys:
            with contextlib.suppress(OSError):
                path.unlink()


def remove(folder: Path) -> None:
    """Remove a work folder that this process holds; the lock goes last."""
    with contextlib.suppress(OSError):
        sweep(folder, ())
        shutil.rmtree(folder)
