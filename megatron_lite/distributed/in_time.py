"""Wait for what may wait for ever. Imports no torch."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class NoAnswerError(TimeoutError):
    """An action took longer than its limit."""


def in_time(action: Callable[[], T], limit_s: float) -> T:
    """Return an action's result; raise its error, or NoAnswerError if it takes longer than the limit
    and goes on alone."""
    result = concurrent.futures.Future[T]()

    def work() -> None:
        try:
            result.set_result(action())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit_s)
    if not result.done():
        raise NoAnswerError
    return result.result()
