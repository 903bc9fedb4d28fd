"""TensorBoard: event files written by its own writer, in a separate thread.

A record is one event with all its values: one call of the writer for each value would keep Python busy for a quarter of
a second at a step that is watched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_lite.monitor.trackers.queued_tracker import QueuedTracker, numbers_of
from megatron_lite.monitor.watch import Watched

CLOSE_TIMEOUT_S = 20
FLUSH_S = 10  # at most this much is missing on the page of a run under way, or after a kill


class TensorBoardTracker(QueuedTracker):
    """Event files in one folder for all starts of a run.

    Args:
        writer: the class EventFileWriter.
        iteration: iterations done. TensorBoard hides what earlier starts wrote about later iterations.
        keeps_lines: see `QueuedTracker`.
    """

    title = "TensorBoard"

    def __init__(self, writer: Callable[..., Any], folder: str, iteration: int, keeps_lines: bool) -> None:
        super().__init__(keeps_lines, CLOSE_TIMEOUT_S)
        self._open_writer = lambda: writer(folder, flush_secs=FLUSH_S)
        # A new run replaces everything, its values at iteration 0 included.
        self._first = iteration + 1 if iteration else 0
        self._thread.start()

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._histogram = summary_pb2.HistogramProto
        self._writer = self._open_writer()
        # Readers drop what older files have from this iteration on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(self._event(step=self._first, session_log=start))

    def _send(self, record: Mapping[str, Any], watched: Watched | None) -> None:
        numbers = numbers_of(record)
        del numbers[f"{record['phase']}/time"]  # every event has its time
        value = self._summary.Value
        values = [value(tag=tag, simple_value=number) for tag, number in numbers.items()]
        if watched is not None:
            values += [value(tag=tag, simple_value=number) for tag, number in watched.numbers()]
            for tag, histogram in watched.histograms():
                values.append(value(tag=tag, histo=self._histogram(**histogram.proto_fields())))
        event = self._event(step=record["iteration"], wall_time=record["time"], summary=self._summary(value=values))
        self._writer.add_event(event)

    def _end(self, exit_code: int) -> None:
        self._writer.close()
