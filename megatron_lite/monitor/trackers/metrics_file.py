"""metrics.jsonl, the authoritative record of a run's metrics.

One JSON object per line, each written by one `write` in append mode, so a line is complete or
absent. Floats are in shortest round-trip form; NaN and infinities, which JSON lacks, become null. A
start repairs a last line torn by a crash, then appends: if a resumed run repeats an iteration, the
later line counts.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from megatron_lite.monitor.logging import AppendFile, get_logger
from megatron_lite.monitor.metric_lines import Record
from megatron_lite.monitor.watch import Watched

WATCH_FILE = "watch.jsonl"
_REPAIR_BYTES = 1 << 20  # far longer than any line


class MetricsFile(AppendFile):
    """metrics.jsonl, open for appending. Lines that cannot be written are lost; the first loss is
    reported.

    repairs: complete or remove a torn last line; a run that writes now may be within its line.

    Raises:
        StorageError: if the file cannot be opened.
    """

    def __init__(self, path: Path, repairs: bool = True) -> None:
        super().__init__(path)
        try:
            if repairs:
                self._repair_last_line()
        except OSError as error:
            get_logger().warning("cannot repair the last line of %s: %s", path, error.strerror)

    def _repair_last_line(self) -> None:
        """Complete a last line that only lacks its newline; remove a torn one."""
        size = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, _REPAIR_BYTES, max(size - _REPAIR_BYTES, 0))
        torn = tail[tail.rfind(b"\n") + 1 :]
        try:
            if torn:
                json.loads(torn)  # the beginning of an object is no JSON
                self.append(b"\n")
        except ValueError:
            os.ftruncate(self._fd, size - len(torn))

    def log(self, record: Record, watched: Watched | None = None) -> None:
        """Append one record, without the statistics of --watch, which would make long lines."""
        broken = {
            key: None
            for key, value in record.items()
            if isinstance(value, float) and not math.isfinite(value)
        }
        self.write_line(json.dumps({**record, **broken}, allow_nan=False))

    def close(self, exit_code: int = 0) -> None:
        """Close the file and report the number of lost lines, if any."""
        super().close()
        if self.lost_lines:
            get_logger().warning("%d lines of %s were lost", self.lost_lines, self.path)


class WatchFile(MetricsFile):
    """watch.jsonl, each parameter's statistics for --watch; see docs/monitoring.md."""

    def log(self, record: Record, watched: Watched | None = None) -> None:
        """Append a record's statistics, if any."""
        if watched is not None:
            kept = {key: record[key] for key in ("phase", "iteration", "run", "time")}
            self.write_line(json.dumps({**kept, **watched.as_json()}, allow_nan=False))
