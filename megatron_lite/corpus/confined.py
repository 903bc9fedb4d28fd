"""Run the programs of strangers in a process of its own, with limits of time, memory and output.

Such a program can stay inside of one call of C, which no exception of Python ends; the kernel ends
a process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
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


def confined(limits: Limits, function: Callable[..., Any] | str, *arguments: Any) -> Any:
    """Return the function's result as JSON holds it: a list for a tuple. Calls share a process.

    function: or the name of one in `rendering`.

    Raises: DataError with the reason if the function raises an error or goes beyond a limit.
    """
    connection, process = _process()
    try:
        connection.send((limits, function, arguments))
        result, reason = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        end_process()
        ended = (
            f"takes more than {limits.seconds:g} s"
            if process.exitcode == -signal.SIGPROF
            else "ended its process"
        )
        raise DataError(f"{limits.program} {ended}") from None
    if reason:
        raise DataError(reason)
    return result


def end_process() -> None:
    """End the process, also during a call of another thread; the next call starts another."""
    if _process.cache_info().currsize:
        process = _process()[1]
        process.kill()
        process.join()
        _process.cache_clear()


@functools.cache
def _process() -> tuple[Connection, Any]:
    context = multiprocessing.get_context("spawn")
    connection, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return connection, process


def _serve(connection: Connection) -> None:
    """Answer calls until the other end is closed. The kernel ends this process at the limit of
    time."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's
    # libraries tell of no torch, and of folders what our errors say
    logging.disable(logging.WARNING)
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # rendering needs none, and loading takes seconds
    gc.disable()  # imports leave no garbage, and looking for some takes a tenth of their time
    rendering, last = importlib.import_module("megatron_lite.corpus.rendering"), None
    gc.enable()
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
            connection.send_bytes(
                (json.dumps(["", reason[:LONGEST_REASON]]) if reason else answer).encode()
            )


def _limit_memory(more_bytes: int) -> None:
    """Limit what this process has to so much more than it has now."""
    with contextlib.suppress(OSError, ValueError):  # another system, or a lower limit
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most_bytes = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(
            resource.RLIMIT_AS, (most_bytes, resource.getrlimit(resource.RLIMIT_AS)[1])
        )
