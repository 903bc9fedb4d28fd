"""Processes that libraries start for themselves, and that this process must not leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path


def kill_children(program: str) -> None:
    """Kill the direct children of this process that run `program`, by the name of its file. Linux only."""
    for child in _children():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if os.path.basename(words[0]) == program.encode():
                os.kill(child, signal.SIGKILL)


def _children() -> Iterator[int]:
    """Yield the children that any thread of this process has started."""
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                yield from map(int, (thread / "children").read_text("ascii").split())
