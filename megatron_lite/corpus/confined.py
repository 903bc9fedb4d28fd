"""Run the programs of strangers in a process of its own, with limits of time, memory and output.

Such a program can stay inside of one call of C, which no exception of Python ends; the kernel ends a process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.errors import DataError
from megatron_lite.run.launcher_watch import end_with_parent

LONGEST_REASON = 1000  # characters of an error, which a stranger may have written


class Limits(NamedTuple):
    """Most that one call may take."""

    seconds: float = 10.0  # of a processor, so that other programs do not count
    memory_bytes: int = 2**30  # more than the process has at its start
    answer_bytes: int = 2**26
    program: str = "the chat template (--chat_template)"  # the subject of errors


def confined(limits: Limits, function: Callable[..., Any] | str, *arguments: Any) -> Any:
    """Return the function's result as JSON holds it: a list for a tuple. Calls with the same limits share a process.

    function: or the name of one in `rendering`.

    Raises: DataError with the reason if the function raises an error or goes beyond a limit.
    """
    connection, process = _process(limits)
    try:
        connection.send((function, arguments))
        result, reason = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        process.join()
        _process.cache_clear()
        ended = f"takes more than {limits.seconds:g} s" if process.exitcode == -signal.SIGPROF else "ended its process"
        raise DataError(f"{limits.program} {ended}") from None
    if reason:
        raise DataError(reason)
    return result


@functools.cache
def _process(limits: Limits) -> tuple[Connection, Any]:
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, limits), daemon=True)
    process.start()
    theirs.close()
    return connection, process


def _serve(connection: Connection, limits: Limits) -> None:
    """Answer calls until the other end is closed. The kernel ends this process at the limit of time."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's
    rendering = importlib.import_module("megatron_lite.corpus.rendering")  # before the limits
    with contextlib.suppress(OSError, ValueError):  # another system, or a lower limit
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most_bytes = pages * resource.getpagesize() + limits.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    with contextlib.suppress(EOFError, OSError):
        while True:
            function, arguments = connection.recv()
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
