"""A destination of metrics in a separate thread, behind a bounded queue, so that it cannot delay training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from megatron_lite.errors import EXIT_PREEMPTED
from megatron_lite.monitor.logging import get_logger
from megatron_lite.monitor.watch import Watched

STOPPED_LIMIT_S = 5.0
MAX_QUEUED_RECORDS = 1000
MAX_QUEUED_WATCHED = 50  # while more records wait, they are sent without the statistics of --watch


class QueuedTracker:
    """Base class of the trackers that may be slow, unreachable, or raise.

    The methods that training calls put work into the queue and never raise; records beyond a full queue are dropped and
    counted. Subclasses override the methods of the thread, which may block or raise; it starts with `_begin`.

    keeps_lines: whether metrics.jsonl has all records, too.
    """

    title = ""  # in messages

    def __init__(self, keeps_lines: bool, limit_s: float) -> None:
        self._keeps_lines, self._limit_s = keeps_lines, limit_s
        self._queue: queue.Queue[tuple[bool, Callable[..., None], tuple[Any, ...]]] = queue.Queue(MAX_QUEUED_RECORDS)
        self._dropped = self._failed = 0  # records
        self._thread = threading.Thread(target=self._work, name=self.title, daemon=True)

    def log(self, record: Mapping[str, Any], watched: Watched | None = None) -> None:
        """Queue a record, and the statistics of --watch that it comes with, for the thread."""
        if self._queue.qsize() > MAX_QUEUED_WATCHED:
            watched = None  # statistics and histograms of a large model take megabytes
        self._put(True, self._send, record, watched)

    def close(self, exit_code: int) -> None:
        """Send the queued records and end the thread, or give up after a time limit.

        The limit is short for a run that was stopped: whoever stopped it may kill it soon, before exit.json is written.
        """
        limit_s = min(self._limit_s, STOPPED_LIMIT_S) if exit_code == EXIT_PREEMPTED else self._limit_s
        try:
            self._queue.put((False, self._end, (exit_code,)), timeout=limit_s)
            self._thread.join(limit_s)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._abandon()
        if lost := self._dropped + self._failed:
            kept = "; metrics.jsonl has them all" if self._keeps_lines else ""
            get_logger().warning("%d points did not reach %s%s", lost, self.title, kept)

    def _put(self, is_record: bool, action: Callable[..., None], *arguments: Any) -> None:
        try:
            self._queue.put_nowait((is_record, action, arguments))
        except queue.Full:
            self._dropped += is_record
            if self._dropped == 1:
                kept = " (metrics.jsonl keeps them)" if self._keeps_lines else ""
                get_logger().warning("%s is too slow; points are dropped%s", self.title, kept)

    def _abandon(self) -> None:
        """Leave a hanging thread to the end of the process."""
        get_logger().warning("%s does not answer; what is missing there is lost", self.title)

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        is_open, has_failed, action = False, False, None
        try:
            self._begin()
            is_open = True
        except Exception as error:
            get_logger().warning("no %s: %s", self.title, self._describe(error))
        while action != self._end:
            is_record, action, arguments = self._queue.get()
            if not is_open:
                self._failed += is_record
                continue
            try:
                action(*arguments)
            except Exception as error:
                self._failed += is_record
                if not has_failed or action == self._end:
                    get_logger().warning("%s: %s", self.title, self._describe(error))
                has_failed = True
        self._leave()

    def _begin(self) -> None:
        """Open the destination."""
        raise NotImplementedError

    def _send(self, record: Mapping[str, Any], watched: Watched | None) -> None:
        """Send one record."""
        raise NotImplementedError

    def _end(self, exit_code: int) -> None:
        """Send what is left and close the destination."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Release what a failed start or end has left."""

    def _describe(self, error: Exception) -> str:
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record as {"<phase>/<key>": value}, without the iteration, which is the axis."""
    return {
        f"{record['phase']}/{key}": value
        for key, value in record.items()
        if key not in ("iteration", "train_iters") and isinstance(value, (int, float))
    }
