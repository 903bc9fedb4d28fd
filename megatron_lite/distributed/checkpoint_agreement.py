"""Doing something on every rank and agreeing on whether it worked, so that no rank waits for one that has failed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lite.errors import DamagedError, StorageError

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed


def together(
    distributed: Distributed, what: str, path: Path, bytes_needed: int, action: Callable[[], Any]
) -> list[Any]:
    """Run an action that writes to `path` on every rank; its results (JSON) in rank order.

    Raises:
        StorageError: on every rank, if the action raised OSError on any: which rank and path, why, the bytes that this
            rank's action needed and those free. Another exception is raised as it is on the rank that it happened on.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        failure = error
    message = None if failure is None else _describe(failure, path, bytes_needed)
    outcomes = distributed.gather_objects({"result": result, "failure": message})
    if failure is not None and not isinstance(failure, OSError):
        raise failure
    problems = [f"rank {rank}: {outcome['failure']}" for rank, outcome in enumerate(outcomes) if outcome["failure"]]
    if problems:
        raise StorageError(
            f"cannot save {what}: {'; '.join(problems)}. What was saved before is untouched: free some space or make "
            "the directory writable, then start the same command again"
        )
    return [outcome["result"] for outcome in outcomes]


def _describe(error: Exception, path: Path, bytes_needed: int) -> str:
    """One line for a failed write."""
    if not isinstance(error, OSError):
        return f"{path}: {type(error).__name__}: {error}"
    try:
        usage = os.statvfs(next(parent for parent in (path, *path.parents) if parent.exists()))
        free = f"{usage.f_bavail * usage.f_frsize:,}"
    except (OSError, StopIteration):
        free = "unknown"
    needed = f"{bytes_needed:,} bytes needed, " if bytes_needed else ""
    return f"{path}: {error.strerror or error} ({needed}{free} bytes free)"


def first_problem(distributed: Distributed, action: Callable[[], None]) -> str | None:
    """Run an action that reads on every rank; the reason of the first rank on which it failed, None if it worked."""
    problem = None
    try:
        action()
    except DamagedError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or ''}: {error.strerror or error}"
    return next((found for found in distributed.gather_objects(problem) if found is not None), None)
