"""metrics.jsonl, the authoritative record of a run's metrics.

One JSON object per line, each written by one `write` in append mode, so a line is complete or absent. Floats are in
shortest round-trip form; NaN and infinities, which JSON lacks, become null. A start repairs a last line torn by a
crash, then appends: where a resumed run repeats an iteration, the later line counts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.monitor.logging import AppendFile, get_logger
from megatron_lite.monitor.watch import Watched
from megatron_lite.run.exit_status import METRICS_FILE as METRICS_FILE

WATCH_FILE = "watch.jsonl"
_REPAIR_BYTES = 1 << 20  # far longer than any line


class MetricsFile(AppendFile):
    """metrics.jsonl, open for appending. A line that cannot be written is lost, and the first loss is reported.

    Raises:
        StorageError: if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._repair_last_line()
        except OSError as error:
            get_logger().warning("cannot repair the last line of %s: %s", path, error.strerror)

    def _repair_last_line(self) -> None:
        """Complete a last line that only lacks its newline; remove a torn one."""
        size = os.fstat(self._fd).st_size
        tail = os.pread(self._fd, _REPAIR_BYTES, max(size - _REPAIR_BYTES, 0))
        torn = tail[tail.rfind(b"\n") + 1 :]
        if torn and _parse_line(torn) is not None:
            self.append(b"\n")
        elif torn:
            os.ftruncate(self._fd, size - len(torn))

    def log(self, record: Mapping[str, Any], watched: Watched | None = None) -> None:
        """Append one record, without the statistics of --watch, which would make long lines."""
        broken = {key: None for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
        self.write_line(json.dumps({**record, **broken}, allow_nan=False))

    def close(self, exit_code: int = 0) -> None:
        """Close the file and report the number of lost lines, if any."""
        super().close()
        if self.lost_lines:
            get_logger().warning("%d lines of %s were lost", self.lost_lines, self.path)


class WatchFile(MetricsFile):
    """watch.jsonl, the statistics of each parameter that --watch asks for; see docs/monitoring.md."""

    def log(self, record: Mapping[str, Any], watched: Watched | None = None) -> None:
        """Append the statistics that a record comes with, if any."""
        if watched is not None:
            kept = {key: record[key] for key in ("phase", "iteration", "run", "time")}
            self.write_line(json.dumps({**kept, **watched.as_json()}, allow_nan=False))


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl in the order of their iterations.

    The last line of a phase and iteration counts (a resumed run repeats some). Numbers that were not finite are None.
    Lines that are not JSON objects (a torn last line, a damaged disk) are left out.

    Raises:
        OSError: if the file cannot be read.
    """
    records: dict[tuple[Any, Any], dict[str, Any]] = {}
    for line in path.read_bytes().split(b"\n"):
        record = _parse_line(line) if line.strip() else None
        if record is not None:
            records[record.get("phase"), record.get("iteration")] = record
    return sorted(records.values(), key=lambda record: record.get("iteration") or 0)
