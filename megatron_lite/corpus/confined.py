"""Run the programs of strangers in a process of its own, with limits of time, memory and output.

Such a program can stay inside of one call of C, which no exception of Python ends; the kernel ends a process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import multiprocessing
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.errors import DataError
from megatron_lite.run.launcher_watch import end_with_parent

LONGEST_REASON = 1000  # characters of an error, which a stranger may have written


class Limits(NamedTuple):
    """Most that one call may take. program: the subject of errors."""

    seconds: float = 10.0  # of a processor, so that other programs do not count
    memory_bytes: int = 2**30  # more than the process has at its first call with these limits
    answer_bytes: int = 2**26
    program: str = "the chat template (--chat_template)"


class Confined:
    """A process for calls, one at a time."""

    _process: Any = None

    def start(self) -> None:
        """Begin the process, which imports what calls need, unless it is there."""
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def call(self, limits: Limits, function: Callable[..., Any] | str, *arguments: Any) -> Any:
        """Return the function's result as JSON holds it: a list for a tuple. Start the process if it is not there.

        function: or the name of one in `rendering`.

        Raises: DataError with the reason if the function raises an error or goes beyond a limit.
        """
        self.start()
        process = self._process
        try:
            self._connection.send((limits, function, arguments))
            result, reason = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            self.end()
            ended = (
                f"takes more than {limits.seconds:g} s" if process.exitcode == -signal.SIGPROF else "ended its process"
            )
            raise DataError(f"{limits.program} {ended}") from None
        if reason:
            raise DataError(reason)
        return result

    def end(self) -> None:
        """End the process; a later call starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = None


shared = functools.cache(Confined)  # the one of this process


def _serve(connection: Connection) -> None:
    """Answer calls until the other end is closed. The kernel ends this process at the limit of time."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's
    logging.disable(logging.WARNING)  # libraries tell of no torch, and of folders what our errors say
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # rendering needs none, and loading takes seconds
    rendering, last = importlib.import_module("megatron_lite.corpus.rendering"), None
    with contextlib.suppress(EOFError, OSError):
        while True:
            limits, function, arguments = connection.recv()
            if limits != last:
                _limit_memory(limits.memory_bytes)
                last = limits
            signal.setitimer(signal.ITIMER_PROF, limits.seconds)
            try:
                called = getattr(rendering, function) if isinstance(function, str) else function
                answer, reason = json.dumps([called(*arguments), ""]), ""
                if len(answer) > limits.answer_bytes:
                    reason = f"{limits.program} writes more than {limits.answer_bytes:,} bytes"
            except MemoryError:
                reason = f"{limits.program} needs more than {limits.memory_bytes:,} bytes of memory"
            except DataError as error:
                reason = str(error)
            except Exception as error:  # whatever the program of a stranger raises
                reason = f"{limits.program} refuses it: {error}"
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes((json.dumps(["", reason[:LONGEST_REASON]]) if reason else answer).encode())


def _limit_memory(more_bytes: int) -> None:
    """Limit what this process has to so much more than it has now."""
    with contextlib.suppress(OSError, ValueError):  # another system, or a lower limit
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most_bytes = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
