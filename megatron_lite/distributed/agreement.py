"""What fails on one rank fails on all, with one message: no rank waits for one that is gone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megatron_lite import errors
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import as_run_error

T = TypeVar("T")


def together(distributed: Distributed, action: Callable[[], T]) -> T:
    """Run an action on every rank; if it fails on any, all raise the error of the first that failed.

    A defect of the program (an error that is not expected) is raised where it happens; the others lose that peer.
    """
    failure: errors.RunError | None = None
    result: list[T] = []
    try:
        result.append(action())
    except Exception as error:
        failure = as_run_error(error)
        if failure is None:
            raise
    raise_first(distributed, failure)
    return result[0]


def raise_first(distributed: Distributed, failure: errors.RunError | None) -> None:
    """Every rank brings its failure or None; all raise the first one, of which rank 0 will then speak."""
    own = None if failure is None else [type(failure).__name__, str(failure), failure.recorded]
    for rank, failed in enumerate(distributed.gather_objects(own)):
        if failed is not None:
            kind, message, recorded = failed
            shared: errors.RunError = getattr(errors, kind)(message if rank == 0 else f"rank {rank}: {message}")
            shared.agreed, shared.recorded = True, recorded
            raise shared
