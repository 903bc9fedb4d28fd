"""Run untrusted programs in a separate process with limits on time, memory and output.

Such a program can hang inside one C call, which no Python exception interrupts; the kernel kills a
process.
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

LONGEST_REASON = 1000  # characters of an error, which may be untrusted text


class Limits(NamedTuple):
    """Limits on one call. program: its name in errors."""

    seconds: float = 10.0  # of CPU time, so that other programs do not count
    memory_bytes: int = 2**30  # more than the process has at its first call with these limits
    answer_bytes: int = 2**26
    program: str = "the chat template (--chat_template)"


def confined(limits: Limits, function: Callable[..., Any] | str, *arguments: Any) -> Any:
    """Return the function's result after a JSON round trip: tuples become lists. Calls share a
    process.

    function: or the name of one in `rendering`.

    Raises: DataError with the reason if the function raises an error or exceeds a limit.
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
    """End the process, even during another thread's call; the next call starts another."""
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
    """Answer calls until the other end is closed. The kernel ends this process at the time
    limit."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    # the parent ends this process by it, and waits; whoever started the parent may ignore it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # libraries warn about missing torch, and about folders on which we report
    logging.disable(logging.WARNING)
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # rendering needs none, and loading takes seconds
    gc.disable()  # imports leave no garbage, and collecting takes a tenth of their time
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
            except Exception as error:  # an untrusted program may raise anything
                reason = f"{limits.program} refuses it: {error}"
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(
                (json.dumps(["", reason[:LONGEST_REASON]]) if reason else answer).encode()
            )


def _limit_memory(more_bytes: int) -> None:
    """Limit this process's memory to this much more than it has now."""
    with contextlib.suppress(OSError, ValueError):  # another system, or a lower limit
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
        most_bytes = pages * resource.getpagesize() + more_bytes
        resource.setrlimit(
            resource.RLIMIT_AS, (most_bytes, resource.getrlimit(resource.RLIMIT_AS)[1])
        )
