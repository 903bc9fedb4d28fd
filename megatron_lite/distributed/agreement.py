"""Turn a failure on one rank into the same failure on all ranks, so that no rank waits for one that
is gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from megatron_lite import errors
from megatron_lite.errors import DamagedError, RotatedError, RunError, StorageError, as_run_error

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed

T = TypeVar("T")
MEETING_S = 5.0  # between agreements while ranks wait for rank 0


def together(distributed: Distributed, action: Callable[[], T]) -> T:
    """Run an action on every rank; if it fails on any rank, raise the lowest failed rank's error on
    all ranks.

    An unexpected error (a bug) is raised where it happens; the other ranks lose that peer.
    """
    result, failures = _attempt(distributed, action, _describe_expected)
    _raise_first(failures)
    return cast(T, result)


def rank_0_works(distributed: Distributed | None, action: Callable[[], T]) -> T:
    """Run a long action on rank 0 while the other ranks wait; return its JSON-able result on every
    rank.

    Agreeing every few seconds keeps the collective timeout from limiting the action, and detects a
    lost rank. distributed: None in a command, which has no ranks.
    """
    if distributed is None:
        return action()
    job = ThreadPoolExecutor(1, "rank-0-works").submit(action) if distributed.rank == 0 else None
    while True:
        if job is not None:
            wait([job], MEETING_S)
        if distributed.broadcast_object(job is not None and job.done()):
            break
    result = together(distributed, lambda: None if job is None else job.result())
    return cast(T, distributed.broadcast_object(result))


def raise_first(distributed: Distributed, failure: RunError | None) -> None:
    """Raise the lowest rank's failure on all ranks; rank 0 reports it. failure: this rank's, or
    None."""
    _raise_first(
        distributed.gather_objects(None if failure is None else _describe_expected(failure))
    )


def write_together(
    distributed: Distributed,
    what: str,
    path: Path,
    action: Callable[[], Any],
    bytes_needed: int = 0,
) -> list[Any]:
    """Run an action that writes to `path` on every rank; return the JSON-able results in rank
    order.

    Raises:
        StorageError: on every rank, if the action raised OSError on any rank; names rank, path,
            reason, bytes needed and bytes free.
        RunError: on every rank, if the action raised one on any rank.
        Exception: any other error, unchanged, on the rank where it happened.
    """
    failed: list[Exception] = []

    def describe(error: Exception) -> Any:
        if isinstance(error, RunError):
            return _describe_expected(error)
        failed.append(error)
        return _describe_write(error, path, bytes_needed)

    result, failures = _attempt(distributed, action, describe)
    if failed and not isinstance(failed[0], OSError):
        raise failed[0]
    _raise_first([None if isinstance(failure, str) else failure for failure in failures])
    problems = [
        f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure is not None
    ]
    if problems:
        raise StorageError(
            f"cannot save {what}: {'; '.join(problems)}. Earlier files are untouched: free some space or make the "
            "directory writable, then start the same command again"
        )
    return distributed.gather_objects(result)


def first_problem(distributed: Distributed, action: Callable[[], None]) -> str | None:
    """Run an action that reads on every rank; return the problem of the lowest rank with one, or
    None."""
    _, problems = _attempt(distributed, action, _describe_read)
    return next((problem for problem in problems if problem is not None), None)


def _attempt(
    distributed: Distributed, action: Callable[[], T], describe: Callable[[Exception], Any]
) -> tuple[T | None, list[Any]]:
    """Run an action on every rank; return this rank's result and every rank's described failure
    (None: success).

    An exception for which `describe` returns None is raised immediately.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = describe(error)
        if failure is None:
            raise
    return result, distributed.gather_objects(failure)


def _raise_first(failures: list[Any]) -> None:
    for rank, failure in enumerate(failures):
        if failure is not None:
            kind, message, recorded = failure
            error: RunError = getattr(errors, kind)(
                message if rank == 0 else f"rank {rank}: {message}"
            )
            error.agreed, error.recorded = True, recorded
            raise error


def _describe_expected(error: Exception) -> tuple[str, str, bool] | None:
    expected = as_run_error(error)
    return None if expected is None else (type(expected).__name__, str(expected), expected.recorded)


def _describe_write(error: Exception, path: Path, bytes_needed: int) -> str:
    if not isinstance(error, OSError):
        return f"{path}: {type(error).__name__}: {error}"
    try:
        usage = os.statvfs(next(parent for parent in (path, *path.parents) if parent.exists()))
        free = f"{usage.f_bavail * usage.f_frsize:,}"
    except (OSError, StopIteration):
        free = "unknown"
    needed = f"{bytes_needed:,} bytes needed, " if bytes_needed else ""
    return f"{path}: {error.strerror or error} ({needed}{free} bytes free)"


def _describe_read(error: Exception) -> str | None:
    if isinstance(error, DamagedError | RotatedError):
        return str(error)
    return (
        f"{error.filename or ''}: {error.strerror or error}" if isinstance(error, OSError) else None
    )
