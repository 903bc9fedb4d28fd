"""Handle checkpoints that a live run deletes or replaces while another program reads them: look
again for the newest.

A reader pins a listed folder before reading there. Any later failure is damage if the folder is
still the same, and rotation if it is not: a run renames a checkpoint before it deletes its files.
Imports no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatron_lite.errors import RotatedError

T = TypeVar("T")
Identity = tuple[int, int]
ATTEMPTS = (
    20  # a run that saves faster than its checkpoints can be read must not keep a reader forever
)


def identity(folder: Path) -> Identity | None:
    """Return what distinguishes a folder from a later one of its name, even if inodes are reused;
    None without one."""
    with contextlib.suppress(OSError):
        found = folder.lstat()
        return found.st_ino, found.st_mtime_ns
    return None


def pinned(folder: Path) -> Callable[[], None]:
    """Return a check of a listed folder that raises RotatedError once the folder is gone or
    replaced."""
    before = identity(folder)

    def check() -> None:
        if before is None or identity(folder) != before:
            raise RotatedError(
                f"{folder}: its run deleted or replaced it while it was read; try again"
            )

    return check


def again(read: Callable[[], T]) -> T:
    """Call `read`, which looks for the newest checkpoint, until no rotation interrupts it.

    Raises:
        RotatedError: if rotation interrupts `ATTEMPTS` calls.
    """
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(RotatedError):
            return read()
    return read()
