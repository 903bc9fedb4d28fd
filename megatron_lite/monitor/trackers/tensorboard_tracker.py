"""TensorBoard: event files written by the SummaryWriter of torch, in a separate thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_lite.monitor.trackers.queued_tracker import QueuedTracker, numbers_of
from megatron_lite.monitor.watch.values import Watched

CLOSE_TIMEOUT_S = 20
FLUSH_S = 10  # at most this much is missing on the page of a run under way, or after a kill


class TensorBoardTracker(QueuedTracker):
    """Event files in one folder for all starts of a run.

    Args:
        writer: the class SummaryWriter.
        iteration: iterations done. TensorBoard shows nothing that earlier starts wrote about later ones.
    """

    title = "TensorBoard"

    def __init__(self, writer: Callable[..., Any], folder: str, iteration: int, keeps_lines: bool) -> None:
        super().__init__(keeps_lines, CLOSE_TIMEOUT_S)
        # A new run replaces everything, its values at iteration 0 included.
        self._open_writer = lambda: writer(folder, purge_step=iteration + 1 if iteration else 0, flush_secs=FLUSH_S)
        self._thread.start()

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _begin(self) -> bool:
        self._writer = self._open_writer()
        return True

    def _send(self, record: Mapping[str, Any], watched: Watched | None) -> None:
        iteration, time_s = record["iteration"], record["time"]
        numbers = numbers_of(record)
        del numbers[f"{record['phase']}/time"]  # every event has its time
        for tag, value in (*numbers.items(), *(watched.numbers() if watched else ())):
            self._writer.add_scalar(tag, value, iteration, walltime=time_s)
        for tag, histogram in watched.histograms() if watched else ():
            self._writer.add_histogram_raw(tag, global_step=iteration, walltime=time_s, **histogram.summary())

    def _end(self, exit_code: int) -> None:
        self._writer.close()
