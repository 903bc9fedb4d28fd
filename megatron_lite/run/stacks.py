"""Thread stacks and newest collectives of a rank, written on SIGUSR2 and on a time-out.

`faulthandler` writes the stacks inside the C signal handler, so that it works while a library holds the GIL. The
collectives follow as soon as a thread can run. Training continues.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from pathlib import Path

from megatron_lite.distributed.traffic import Progress

# When all ranks are signalled, each also requests the stacks of all others: write them once.
PAUSE_S = 10.0


class Stacks:
    """Writes the stacks of this rank to stderr, or after `open` to a file."""

    def __init__(self, rank: int, progress: Progress) -> None:
        self._rank, self._progress = rank, progress
        self._path: Path | None = None
        self._descriptor = 2
        self._written_s = -PAUSE_S
        self._lock = threading.Lock()
        signal.signal(signal.SIGUSR2, lambda number, frame: None)  # for the wake-up descriptor of `StopSignal`
        self._register()

    def open(self, folder: Path | None) -> None:
        """Write to a file in this folder from now on; stay with stderr if it is None or the file cannot be opened."""
        if folder is None:
            return
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            self._path = folder / f"stacks_rank_{self._rank:03d}.txt"
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._register()

    def close(self) -> None:
        """Stop handling requests, and remove an empty file."""
        faulthandler.unregister(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a late request must not end the process
        with contextlib.suppress(OSError):
            if self._path is not None and self._path.stat().st_size == 0:
                self._path.unlink()
                self._path.parent.rmdir()  # fails if the folder has other files

    def write(self, reason: str) -> None:
        """Write the stacks of all threads and the newest collectives, at most once every PAUSE_S seconds."""
        with self._lock:
            if time.monotonic() - self._written_s < PAUSE_S:
                return
            self._written_s = time.monotonic()
            with contextlib.suppress(OSError, ValueError):
                faulthandler.dump_traceback(self._descriptor, all_threads=True)
            self._write_collectives(reason)

    def complete(self) -> None:
        """Append the newest collectives to the stacks that the signal handler has written."""
        with self._lock:
            self._written_s = time.monotonic()
            self._write_collectives("SIGUSR2")
            signal.siginterrupt(signal.SIGUSR2, False)  # faulthandler resets this: do not interrupt system calls

    def _write_collectives(self, reason: str) -> None:
        progress = self._progress
        lines = [
            f"Above: rank {self._rank}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')}, {reason}.",
            f"It is in {progress.phase}, iteration {progress.iteration}. Its newest collectives:",
            *(f"  {one}" for one in progress.recent),
        ]
        with contextlib.suppress(OSError):
            os.write(self._descriptor, ("\n".join(lines) + "\n\n").encode())

    def _register(self) -> None:
        if self._descriptor == 2 and sys.stderr is None:
            return
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # a closed stderr
            faulthandler.register(signal.SIGUSR2, self._descriptor, all_threads=True, chain=True)
            signal.siginterrupt(signal.SIGUSR2, False)
