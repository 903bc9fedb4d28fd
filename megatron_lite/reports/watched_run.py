"""A run as its folder shows it, also while it is running: metrics, endings, checkpoints, warnings.

Nothing here takes a lock, maps a file or waits for the kernel to report changes: see `GrowingFile`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.checkpoint.names import MANIFEST_NAME, find_checkpoints, parse_json, read_bytes
from megatron_lite.errors import DataError
from megatron_lite.reports.series import GrowingFile, Metrics, printable, read_run
from megatron_lite.run.exit_status import EXIT_FILE
from megatron_lite.run.experiment import LOCK_FILE, newest_run

RANK_0_LOG = "logs/logs_rank_000.txt"  # in the folder of a start
MOST_WARNINGS = 20
LONGEST_NAME = 60
LARGEST_JSON_BYTES = LARGEST_READ_BYTES = 2**20
# The start of a line of the log file, with or without --log_timestamps.
_WARNING = re.compile(rb"(?:[0-9-]{10} [0-9:,]{8,12} )?(?:WARNING|ERROR): (.*)")


class SavedFolder(NamedTuple):
    """A checkpoint or an export."""

    iteration: int
    time_s: float  # since 1970


class WatchedRun:
    """One run; `update` looks at its experiment directory again."""

    def __init__(self, root: Path, name: str = "") -> None:
        self.root, self.name, self.metrics = root, name or root.absolute().name, Metrics(root)
        self.problem: str | None = None  # why there are no metrics
        self.start: int | None = None  # number of the newest start
        self.ending: dict[str, Any] = {}  # exit.json
        self.config: dict[str, Any] = {}
        self.heartbeat_s: float | None = None  # the last heartbeat; None: the run has left the folder
        self._heartbeat: tuple[int, float] | None = None  # start and time of the file
        self.checkpoints: list[SavedFolder] = []  # newest first
        self.exports: list[SavedFolder] = []
        self.warnings: deque[str] = deque(maxlen=MOST_WARNINGS)  # of the newest start
        self._log = GrowingFile(self._of_start(RANK_0_LOG), LARGEST_READ_BYTES)

    def update(self, now_s: float) -> None:
        """Read what is new. Never fails: what cannot be read is left as it was, or empty.

        now_s: seconds since 1970.
        """
        try:
            self.metrics.update()
            self.problem = None
        except DataError as error:
            self.problem = str(error)
        self.ending, self.config = self._json(EXIT_FILE), self._json("config.json") or self.config
        with contextlib.suppress(OSError):
            start = newest_run(self.root)
            if start != self.start:
                self.start = start
                self._log = GrowingFile(self._of_start(RANK_0_LOG), LARGEST_READ_BYTES)
                self.warnings.clear()
        self._see_heartbeat(now_s)
        self.checkpoints = _saved(self.root / "checkpoints", MANIFEST_NAME)
        self.exports = _saved(self.root / "export", "")
        with contextlib.suppress(OSError):
            matches = map(_WARNING.match, self._log.new_lines())
            self.warnings += (match[1].decode("utf-8", "replace") for match in matches if match)

    def _see_heartbeat(self, now_s: float) -> None:
        """Read the heartbeat. A new one counts from now: the file server may have another clock."""
        before, beat = self._heartbeat, None
        with contextlib.suppress(OSError), self._of_start(LOCK_FILE).open("rb") as file:
            # Opened, because a network file system may answer `stat` from a cache.
            beat = (self.start or 0, os.fstat(file.fileno()).st_mtime)
        if beat is None:
            self.heartbeat_s = None
        elif beat != before:
            self.heartbeat_s = now_s if before is not None else beat[1]
        self._heartbeat = beat

    def _of_start(self, name: str) -> Path:
        return self.root / "runs" / str(self.start) / name

    def _json(self, name: str) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            value = parse_json(read_bytes(self.root / name, LARGEST_JSON_BYTES))
            return value if isinstance(value, dict) else {}
        return {}


def _saved(root: Path, file: str) -> list[SavedFolder]:
    """Return the folders named after iterations, with the modification time of a file in them, newest first."""
    found = []
    with contextlib.suppress(OSError):
        for iteration, folder in find_checkpoints(root):
            with contextlib.suppress(OSError):
                found.append(SavedFolder(iteration, (folder / file).stat().st_mtime))
    return found


def watched(folder: Path, name: str = "") -> WatchedRun:
    """Return a run as it is now, which may still be running.

    Raises:
        DataError: if it has no numbers.
    """
    run = WatchedRun(folder, name)
    run.metrics = read_run(folder)
    run.update(0.0)
    return run


def read_runs(folders: Sequence[Path]) -> list[WatchedRun]:
    """Return the runs of experiment directories as `watched` does, with their parents' names where names are equal."""
    names = [folder.absolute().name for folder in folders]
    unique = [
        name if names.count(name) == 1 else str(Path(*folder.absolute().parts[-2:]))
        for folder, name in zip(folders, names, strict=True)
    ]
    return [watched(folder, printable(name[:LONGEST_NAME])) for folder, name in zip(folders, unique, strict=True)]


def title_of(runs: Sequence[WatchedRun]) -> str:
    """Return the title of a page or picture of these runs."""
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"


def format_tokens(tokens: int) -> str:
    """Format 1234567 as 1.23M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{letter}"
    return str(tokens)
