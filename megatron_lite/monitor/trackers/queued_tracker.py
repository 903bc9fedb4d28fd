"""Send metrics from a separate thread, behind a bounded queue, so that they cannot delay training.

TensorBoard is one destination; `wandb_tracker` is the other.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from megatron_lite.errors import EXIT_PREEMPTED
from megatron_lite.monitor.logging import get_logger
from megatron_lite.monitor.metric_lines import Record
from megatron_lite.monitor.watch import Watched

STOPPED_LIMIT_S = 5.0
CLOSE_TIMEOUT_S = 20  # for TensorBoard
FLUSH_S = 10  # TensorBoard's page of a running or killed run lacks at most this much
MAX_QUEUED_RECORDS = 1000
MAX_QUEUED_WATCHED = 50  # while more records wait, they are sent without the statistics of --watch


class QueuedTracker:
    """Base class of the trackers that may be slow, unreachable, or raise.

    The methods that training calls put work into the queue and never raise; records beyond a full
    queue are dropped and counted. Subclasses override the thread's methods, which may block or
    raise; the first is `_begin`.

    keeps_lines: whether metrics.jsonl contains all records, too.
    """

    title = ""  # in messages
    _key: str | None = None  # a secret that no message shows

    def __init__(self, keeps_lines: bool, limit_s: float) -> None:
        self._keeps_lines, self._limit_s = keeps_lines, limit_s
        self._queue: queue.Queue[tuple[Callable[..., None], tuple[Any, ...]]] = queue.Queue(
            MAX_QUEUED_RECORDS
        )
        self._dropped = self._failed = 0  # records
        self._thread = threading.Thread(target=self._work, name=self.title, daemon=True)

    def log(self, record: Record, watched: Watched | None = None) -> None:
        """Queue a record and its statistics for --watch."""
        if self._queue.qsize() > MAX_QUEUED_WATCHED:
            watched = None  # a large model's statistics and histograms take megabytes
        self._put(self._send, record, watched)

    def close(self, exit_code: int) -> None:
        """Send the queued records and end the thread, or give up after a time limit.

        The limit is short for a run that was stopped, because it may be killed soon, before
        exit.json is written.
        """
        limit_s = (
            min(self._limit_s, STOPPED_LIMIT_S) if exit_code == EXIT_PREEMPTED else self._limit_s
        )
        try:
            self._queue.put((self._end, (exit_code,)), timeout=limit_s)
            self._thread.join(limit_s)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._abandon()
        if lost := self._dropped + self._failed:
            kept = "; metrics.jsonl has them all" if self._keeps_lines else ""
            get_logger().warning("%d points did not reach %s%s", lost, self.title, kept)

    def _put(self, action: Callable[..., None], *arguments: Any) -> None:
        try:
            self._queue.put_nowait((action, arguments))
        except queue.Full:
            self._dropped += action == self._send
            if self._dropped == 1:
                kept = " (metrics.jsonl keeps them)" if self._keeps_lines else ""
                get_logger().warning("%s is too slow; points are dropped%s", self.title, kept)

    def _abandon(self) -> None:
        """Abandon a hanging thread, which ends with the process."""
        get_logger().warning("%s does not answer; what is missing there is lost", self.title)

    # -- in the thread
    # ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        is_open = False
        has_failed = False
        action = None
        try:
            self._begin()
            is_open = True
        except Exception as error:
            get_logger().warning("no %s: %s", self.title, self._describe(error))
        while action != self._end:
            action, arguments = self._queue.get()
            if not is_open:
                self._failed += action == self._send
                continue
            try:
                action(*arguments)
            except Exception as error:
                self._failed += action == self._send
                if not has_failed or action == self._end:
                    get_logger().warning("%s: %s", self.title, self._describe(error))
                has_failed = True
        self._leave()

    def _begin(self) -> None:
        """Open the destination."""
        raise NotImplementedError

    def _send(self, record: Record, watched: Watched | None) -> None:
        """Send one record."""
        raise NotImplementedError

    def _end(self, exit_code: int) -> None:
        """Send the rest and close the destination."""
        raise NotImplementedError

    def _leave(self) -> None:
        """Release everything that a failed start or end has left open."""

    def _describe(self, error: Exception) -> str:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return (text.replace(self._key, "<key>") if self._key else text)[:200]


def numbers_of(record: Record) -> dict[str, float]:
    """Return a record's numbers as {"<phase>/<key>": value}, without the iteration, which is the
    axis."""
    return {
        f"{record['phase']}/{key}": value
        for key, value in record.items()
        if key not in ("iteration", "train_iters") and isinstance(value, (int, float))
    }


class TensorBoardTracker(QueuedTracker):
    """TensorBoard's event files in one folder for all starts of a run, written by its own writer.

    A record is one event with all its values: one writer call per value would keep Python busy for
    a quarter of a second at a watched step.

    Args:
        writer: the class EventFileWriter.
        iteration: iterations done. TensorBoard hides what earlier starts wrote about later
        iterations. keeps_lines: see the base class.
    """

    title = "TensorBoard"

    def __init__(
        self, writer: Callable[..., Any], folder: str, iteration: int, keeps_lines: bool
    ) -> None:
        super().__init__(keeps_lines, CLOSE_TIMEOUT_S)
        self._open_writer = lambda: writer(folder, flush_secs=FLUSH_S)
        # A new run replaces everything, including its values at iteration 0.
        self._first = iteration + 1 if iteration else 0
        self._thread.start()

    # -- in the thread
    # ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._histogram = summary_pb2.HistogramProto
        self._writer = self._open_writer()
        # Readers drop older files' events from this iteration on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._event(step=self._first, session_log=start))

    def _send(self, record: Record, watched: Watched | None) -> None:
        numbers = numbers_of(record)
        del numbers[f"{record['phase']}/time"]  # every event has its time
        if watched is not None:
            numbers |= watched.numbers()
        value = self._summary.Value
        values = [value(tag=tag, simple_value=number) for tag, number in numbers.items()]
        for tag, histogram in watched.histograms() if watched is not None else ():
            values.append(value(tag=tag, histo=self._histogram(**histogram.proto_fields())))
        event = self._event(
            step=record["iteration"], wall_time=record["time"], summary=self._summary(value=values)
        )
        self._writer.add_event(event)

    def _end(self, exit_code: int) -> None:
        self._writer.close()


class OwnTracker(QueuedTracker):
    """A user's class: created with all options by name, then `log(record)`, and `close(exit_code)`
    at the end."""

    def __init__(
        self, name: str, own: Callable[..., Any], options: dict[str, Any], keeps_lines: bool
    ) -> None:
        self.title, self._make = name, lambda: own(options)
        super().__init__(keeps_lines, CLOSE_TIMEOUT_S)
        self._thread.start()

    def _begin(self) -> None:
        self._tracker = self._make()

    def _send(self, record: Record, watched: Watched | None) -> None:
        self._tracker.log({**record, **dict(watched.numbers() if watched else ())})

    def _end(self, exit_code: int) -> None:
        self._tracker.close(exit_code)
