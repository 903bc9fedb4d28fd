"""Read a run back from its folder, even while it is running: metrics, endings, checkpoints,
warnings.

A start that repeats iterations replaces everything that earlier starts logged from there on.
Nothing here takes a lock, maps a file or waits for the kernel to report changes: see `GrowingFile`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import sys
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite.checkpoint.names import MANIFEST_NAME, find_checkpoints, no_folder, parse_json
from megatron_lite.config import JsonObject
from megatron_lite.errors import DataError
from megatron_lite.run.exit_status import EXIT_FILE, METRICS_FILE
from megatron_lite.run.experiment import LOCK_FILE, newest_run
from megatron_lite.run.progress_line import printable
from megatron_lite.run.regular_files import read_bytes

CHUNK_BYTES = 2**24
LONGEST_LINE_BYTES = 2**20  # longer lines are no records of ours
MOST_NAMES = 100_000  # of numbers; a file with more is no metrics.jsonl
RANK_0_LOG = "logs/logs_rank_000.txt"  # in a start's folder
MOST_WARNINGS = 20
LONGEST_NAME = 60
LARGEST_JSON_BYTES = LARGEST_READ_BYTES = 2**20
# The start of a line in the log file; lines of earlier versions may begin with the time.
_WARNING = re.compile(rb"(?:[0-9-]{10} [0-9:,]{8,12} )?(?:WARNING|ERROR): (.*)")
UNICODE_BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"


@dataclass(frozen=True)
class Curve:
    """A metric by iteration, sorted and unique."""

    iterations: NDArray[np.int64]  # (n,), increasing
    values: NDArray[np.float64]  # (n,); NaN where the number was not finite

    def __len__(self) -> int:
        return len(self.iterations)

    def finite(self) -> Curve:
        """Return the points with a finite value."""
        keep = np.isfinite(self.values)
        return Curve(self.iterations[keep], self.values[keep])

    def thinned(self, most: int) -> Curve:
        """Return about `most` points of a finite curve, including its ends and each part's
        extremes."""
        if len(self) <= most:
            return self
        parts = max(most // 2 - 1, 1)
        borders = np.linspace(0, len(self), parts + 1).astype(np.int64)
        keep = {0, len(self) - 1}
        for start, end in itertools.pairwise(borders):
            keep |= {
                int(start + self.values[start:end].argmin()),
                int(start + self.values[start:end].argmax()),
            }
        chosen = np.array(sorted(keep))
        return Curve(self.iterations[chosen], self.values[chosen])

    def smoothed(self) -> Curve:
        """Return a centred moving average over about 1/50 of a finite curve, narrower at the ends
        so as not to lag."""
        last, widest = len(self) - 1, len(self) // 100
        index = np.arange(len(self))
        radius = np.maximum(np.minimum(widest, np.minimum(index, last - index)), widest // 3)
        low, high = np.maximum(index - radius, 0), np.minimum(index + radius, last)
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        return Curve(self.iterations, (sums[high + 1] - sums[low]) / (high + 1 - low))


def shows_unicode() -> bool:
    """Return whether standard output can encode all characters."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"


def sparkline(values: NDArray[np.float64], width: int, unicode: bool = True) -> str:
    """Draw values as at most `width` blocks, each the mean of its share; blank without a finite
    value."""
    blocks = UNICODE_BLOCKS if unicode else ASCII_BLOCKS
    shares = np.array_split(values, min(width, len(values))) if len(values) else []
    means = [
        float(share[np.isfinite(share)].mean()) if np.isfinite(share).any() else None
        for share in shares
    ]
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * len(means)
    low, high = min(known), max(known)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if mean is None else blocks[round((mean - low) * scale)] for mean in means)


class GrowingFile:
    """The lines that a program appends to a file.

    The file is opened by its path, read and closed each time, which works on a network file system.

    newest: the largest number of bytes to read at a time, from the end; None: all.
    """

    def __init__(self, path: Path, newest: int | None = None) -> None:
        self.path, self._newest = path, newest
        self._identity: tuple[int, int] | None = None  # device and inode
        self._offset = 0
        self.rest = b""  # a last line without its line break

    def new_lines(self, replaced: Callable[[], None] = lambda: None) -> Iterator[bytes]:
        """Yield the complete new lines. A file that was replaced or truncated is reread, after
        `replaced()`.

        Raises:
            OSError: if the file cannot be read.
        """
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if self._identity != identity or status.st_size < self._offset:
                self._identity = identity
                self._offset = 0
                self.rest = b""
                replaced()
            if self._newest is not None and status.st_size - self._offset > self._newest:
                self._offset, self.rest = status.st_size - self._newest, b""
            file.seek(self._offset)
            while chunk := file.read(CHUNK_BYTES):
                self._offset += len(chunk)
                *lines, self.rest = (self.rest + chunk).split(b"\n")
                yield from lines
                self.rest = self.rest[: LONGEST_LINE_BYTES + 1]


class RunStart(NamedTuple):
    """One start of a run, as described by its first record."""

    number: int  # as in runs/<number>
    iteration: int


class Metrics:
    """A run's numbers; `update` reads those appended since.

    Args:
        experiment_dir: the run's folder.
    """

    def __init__(self, experiment_dir: Path) -> None:
        self.path = experiment_dir / METRICS_FILE
        self._file = GrowingFile(self.path)
        self._clear()

    def _clear(self) -> None:
        self.starts: list[RunStart] = []
        self.dropped: dict[int, str] = {}  # why updates up to an iteration were dropped
        self.last: dict[str, JsonObject] = {}  # newest record of each phase
        self._columns: dict[tuple[str, str], tuple[array[int], array[float]]]  # 16 bytes per number
        self._columns = defaultdict(lambda: (array("q"), array("d")))

    def update(self, ended: bool = False) -> None:
        """Read new lines. ended: also take a last line without line break.

        Raises:
            DataError: if the file cannot be read, or is no metrics.jsonl.
        """
        try:
            for line in self._file.new_lines(self._clear):
                self._add_line(line)
            if ended:
                self._add_line(self._file.rest)
        except OSError as error:
            fix = "give the --experiment_dir of a run that has started training"
            problem = no_folder(self.path.parent) or f"cannot read {self.path}: {error.strerror}"
            raise DataError(f"{problem}; {fix}") from None

    def _add_line(self, line: bytes) -> None:
        """Add a line unless it is no record, such as a torn line."""
        if not line.strip() or len(line) > LONGEST_LINE_BYTES:
            return
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(record, dict):
            self.add(record)

    def add(self, record: JsonObject) -> None:
        """Add one record, unless it has no phase or iteration.

        Raises:
            DataError: if there are more names of numbers than any run has.
        """
        phase, iteration = record.get("phase"), record.get("iteration")
        if not isinstance(phase, str) or type(iteration) is not int or not 0 <= iteration < 2**62:
            return
        self._begin(record, phase, iteration)
        self.last[phase] = record
        if isinstance(record.get("skip_reason"), str):
            self.dropped[iteration] = record["skip_reason"]
        for name, value in record.items():
            if (number := _number(value)) is not None:
                iterations, values = self._columns[phase, name]
                iterations.append(iteration)
                values.append(number)
        if len(self._columns) > MOST_NAMES:
            raise DataError(
                f"{self.path} has more than {MOST_NAMES:,} names of numbers; it is no {METRICS_FILE}"
            )

    def _begin(self, record: JsonObject, phase: str, iteration: int) -> None:
        """Record a new start of the run, and drop the records that it repeats."""
        number = record.get("run")  # None in records of `evaluate --tasks`, which is no start
        if type(number) is not int or (self.starts and number == self.starts[-1].number):
            return
        if self.starts:
            # A start begins with the evaluation that a stop skipped, or with the training after its
            # checkpoint.
            first = iteration if phase == "training" else iteration + 1
            for iterations, values in self._columns.values():
                keep = np.array(iterations) < first
                iterations[:] = array("q", np.array(iterations)[keep].tobytes())
                values[:] = array("d", np.array(values)[keep].tobytes())
            self.dropped = {
                other: reason for other, reason in self.dropped.items() if other < first
            }
        self.starts.append(RunStart(number, iteration))

    def names(self, phase: str) -> list[str]:
        """Return the names of a phase's numbers, in the order of their first appearance."""
        return [name for other, name in self._columns if other == phase]

    def task_results(self) -> list[str]:
        """Return the names of results of `evaluate --tasks`, as hellaswag/acc."""
        return [name for name in self.names("tasks") if "/" in name]

    def phases(self) -> list[str]:
        """Return the phases: training, validation, test ..."""
        return list(dict.fromkeys(phase for phase, _ in self._columns))

    def curve(self, phase: str, name: str) -> Curve:
        """Return the curve of a phase's number; empty without records."""
        iterations, values = self._columns.get((phase, name), (array("q"), array("d")))
        # An iteration's last record counts: look for first ones from the end.
        unique, places = np.unique(np.array(iterations, np.int64)[::-1], return_index=True)
        return Curve(unique, np.array(values, np.float64)[::-1][places])


def _number(value: Any) -> float | None:
    """Return a JSON number as a float; NaN for null, which represents non-finite numbers."""
    if type(value) not in (float, int):
        return math.nan if value is None else None
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # an integer too large for a float
        return math.nan


class SavedFolder(NamedTuple):
    """A checkpoint or an export."""

    name: str  # its iteration, or best
    path: Path
    time_s: float  # since 1970


class WatchedRun:
    """One run; `update` rereads its experiment directory."""

    def __init__(self, root: Path, name: str = "") -> None:
        self.root = root
        self.name = name or root.absolute().name
        self.metrics = Metrics(root)
        self.problem: str | None = None  # why there are no metrics
        self.start: int | None = None  # number of the newest start
        self.ending: JsonObject = {}  # exit.json
        self.config: JsonObject = {}
        self.heartbeat_s: float | None = (
            None  # the last heartbeat; None: the run has removed its lock file
        )
        self._heartbeat: tuple[int, float] | None = None  # start and time of the file
        self.checkpoints: list[SavedFolder] = []  # as listed by `_saved`
        self.exports: list[SavedFolder] = []
        self.warnings: deque[str] = deque(maxlen=MOST_WARNINGS)  # of the newest start
        self._log = GrowingFile(self._of_start(RANK_0_LOG), LARGEST_READ_BYTES)

    def update(self, now_s: float) -> None:
        """Read what has been appended. Never raises; unreadable parts keep their value, or are empty.

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
        """Read the heartbeat. A new one counts from now: the file server's clock may differ."""
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

    def _json(self, name: str) -> JsonObject:
        with contextlib.suppress(OSError, ValueError):
            value = parse_json(read_bytes(self.root / name, LARGEST_JSON_BYTES))
            return value if isinstance(value, dict) else {}
        return {}


def _saved(root: Path, file: str) -> list[SavedFolder]:
    """Return the best folder and those named after iterations, newest first, each with a file's
    modification time."""
    found, best = [], root / "best"
    with contextlib.suppress(OSError):
        # The best export is the folder itself, or a checkpoint in it.
        for iteration, folder in (
            *(find_checkpoints(best) or [(0, best)]),
            *find_checkpoints(root),
        ):
            name = "best" if best in (folder, folder.parent) else f"{iteration:,}"
            with contextlib.suppress(OSError):
                found.append(SavedFolder(name, folder, (folder / file).stat().st_mtime))
    return found


def watched(folder: Path, name: str = "") -> WatchedRun:
    """Return a run as it is now, possibly still running.

    Raises:
        DataError: if it has no numbers.
    """
    run = WatchedRun(folder, name)
    run.metrics.update(ended=True)
    if not run.metrics.phases():
        raise DataError(
            f"{run.metrics.path} has no record yet; wait for the first log line of the run"
        )
    run.update(0.0)
    return run


def read_runs(folders: Sequence[Path]) -> list[WatchedRun]:
    """Return the experiment directories' runs like `watched`, adding parents' names to equal
    names."""
    names = [folder.absolute().name for folder in folders]
    unique = [
        name if names.count(name) == 1 else str(Path(*folder.absolute().parts[-2:]))
        for folder, name in zip(folders, names, strict=True)
    ]
    return [
        watched(folder, printable(name[:LONGEST_NAME]))
        for folder, name in zip(folders, unique, strict=True)
    ]


def title_of(runs: Sequence[WatchedRun]) -> str:
    """Return the title for a page or picture of these runs."""
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
