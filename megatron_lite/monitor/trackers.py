"""Destinations of metrics: `metrics.jsonl`, the authoritative record, and optionally Weights & Biases.

metrics.jsonl has one JSON object per line, each written by one `write` in append mode, so a line is complete or absent.
Floats are in shortest round-trip form; NaN and infinities, which JSON lacks, become null. A start repairs a last line
torn by a crash, then appends: where a resumed run repeats an iteration, the later line counts.

Weights & Biases runs in a separate thread behind a bounded queue: if it is slow, unreachable or dies, points are
dropped and counted, and training does not wait. The key comes from the environment variable WANDB_API_KEY or from the
text file at WANDB_API_KEY_PATH, and is passed to the library only.
"""

from __future__ import annotations

import importlib
import json
import math
import netrc
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_lite.config import Config
from megatron_lite.errors import UsageError
from megatron_lite.monitor.logging import AppendFile, get_logger
from megatron_lite.monitor.wandb_tracker import WandbTracker

METRICS_FILE = "metrics.jsonl"
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

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        broken = {key: None for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
        self.write_line(json.dumps({**record, **broken}, allow_nan=False))

    def close(self, exit_code: int = 0) -> None:
        """Close the file and report the number of lost lines, if any."""
        super().close()
        if self.lost_lines:
            get_logger().warning("%d lines of %s were lost", self.lost_lines, self.path)


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


def _read_wandb_key() -> str | None:
    """Return the key from WANDB_API_KEY or the file at WANDB_API_KEY_PATH; None without either.

    Raises:
        UsageError: if the file cannot be read or does not hold one word. The message never shows the content.
    """
    if key := os.environ.get("WANDB_API_KEY", "").strip():
        return key
    path = os.environ.get("WANDB_API_KEY_PATH", "")
    if not path:
        return None
    try:
        words = Path(path).expanduser().read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"WANDB_API_KEY_PATH={path} cannot be read: {reason}; give a text file with the key") from None
    if len(words) != 1:
        fact = "is empty" if not words else f"holds {len(words)} words"
        raise UsageError(f"WANDB_API_KEY_PATH={path} {fact}; it must hold the key and nothing else")
    return words[0]


def _logged_in() -> bool:
    """Whether `wandb login` has left a key in the user's netrc file; the library itself might prompt for one."""
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError, RuntimeError):
        return False


def _open_wandb(config: Config, experiment_dir: Path | None, run: int) -> WandbTracker:
    """Check that Weights & Biases can be used and start its thread.

    Raises:
        UsageError: if the package is not installed or the key file is unusable.
    """
    # The library would send error reports and wait for them when the process exits.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        wandb = importlib.import_module("wandb")
    except ImportError as error:
        raise UsageError(
            f"--wandb_entity_name={config.run.wandb_entity_name} needs the package wandb, which cannot be imported "
            f"({error}); install it with: python -m pip install wandb"
        ) from None
    key = _read_wandb_key()
    mode = os.environ.get("WANDB_MODE", "")
    offline = None
    if mode in ("offline", "dryrun"):
        offline = f"WANDB_MODE={mode}"
    elif mode in ("", "online") and key is None and not _logged_in():
        offline = "no key in WANDB_API_KEY or in the file WANDB_API_KEY_PATH"
    return WandbTracker(wandb, config, key, offline, experiment_dir, run)


class Trackers:
    """All destinations of metrics; none on ranks that do not report."""

    def __init__(self, destinations: Sequence[MetricsFile | WandbTracker] = (), run: int = 0) -> None:
        self._destinations, self._run = destinations, run

    def log(self, record: Mapping[str, Any]) -> None:
        """Record metrics, at least `phase` and `iteration`; adds `run` and `time`, in seconds since 1970.

        Values are plain numbers or text, never tensors.
        """
        record = {**record, "run": self._run, "time": round(time.time(), 3)}
        for destination in self._destinations:
            destination.log(record)

    def close(self, exit_code: int) -> None:
        """Close the files and finish the Weights & Biases run. A second call does nothing."""
        destinations, self._destinations = self._destinations, ()
        for destination in destinations:
            destination.close(exit_code)


def open_trackers(config: Config, experiment_dir: Path | None, run: int, reports: bool = True) -> Trackers:
    """Open every destination of metrics; none unless this rank `reports`.

    Args:
        config: resolved.
        experiment_dir: None writes no file.
        run: number of this start, as in runs/<run>.

    Raises:
        UsageError: if Weights & Biases is requested but not installed, or its key file is unusable.
        StorageError: if metrics.jsonl cannot be opened.
    """
    destinations: list[MetricsFile | WandbTracker] = []
    if reports and experiment_dir is not None:
        destinations.append(MetricsFile(experiment_dir / METRICS_FILE))
    if reports and config.run.wandb_entity_name:
        destinations.append(_open_wandb(config, experiment_dir, run))
    return Trackers(destinations, run)
