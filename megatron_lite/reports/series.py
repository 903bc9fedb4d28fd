"""metrics.jsonl read back: curves, starts and dropped updates of a run, which may still be running.

A start of the run that repeats iterations replaces everything that earlier starts logged from there on.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.errors import DataError
from megatron_lite.run.exit_status import METRICS_FILE

CHUNK_BYTES = 2**24
LONGEST_LINE_BYTES = 2**20  # a longer one is no record of ours
MOST_NAMES = 100_000  # of numbers; a file with more is no metrics.jsonl
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
        """Return about `most` points of a finite curve, with its ends and the extremes of every part."""
        if len(self) <= most:
            return self
        parts = max(most // 2 - 1, 1)
        borders = np.linspace(0, len(self), parts + 1).astype(np.int64)
        keep = {0, len(self) - 1}
        for start, end in zip(borders[:-1], borders[1:], strict=True):
            keep |= {int(start + self.values[start:end].argmin()), int(start + self.values[start:end].argmax())}
        chosen = np.array(sorted(keep))
        return Curve(self.iterations[chosen], self.values[chosen])

    def smoothed(self) -> Curve:
        """Return a centred moving average over about 1/50 of a finite curve, narrower at the ends so as not to lag."""
        last, widest = len(self) - 1, len(self) // 100
        index = np.arange(len(self))
        radius = np.maximum(np.minimum(widest, np.minimum(index, last - index)), widest // 3)
        low, high = np.maximum(index - radius, 0), np.minimum(index + radius, last)
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        return Curve(self.iterations, (sums[high + 1] - sums[low]) / (high + 1 - low))


def sparkline(values: NDArray[np.float64], width: int, unicode: bool = True) -> str:
    """Draw values as at most `width` blocks, each the mean of its share; a blank has no finite value."""
    blocks = UNICODE_BLOCKS if unicode else ASCII_BLOCKS
    shares = np.array_split(values, min(width, len(values))) if len(values) else []
    means = [float(share[np.isfinite(share)].mean()) if np.isfinite(share).any() else None for share in shares]
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * len(means)
    low, high = min(known), max(known)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if mean is None else blocks[round((mean - low) * scale)] for mean in means)


def printable(text: str) -> str:
    """Return the text with a question mark for each control character."""
    return "".join(char if char.isprintable() else "?" for char in text)


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
        """Yield the complete new lines. A file that was replaced or became shorter is read anew, after `replaced()`.

        Raises:
            OSError: if the file cannot be read.
        """
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            if self._identity != identity or status.st_size < self._offset:
                self._identity, self._offset, self.rest = identity, 0, b""
                replaced()
            if self._newest is not None and status.st_size - self._offset > self._newest:
                self._offset, self.rest = status.st_size - self._newest, b""
            file.seek(self._offset)
            while chunk := file.read(CHUNK_BYTES):
                self._offset += len(chunk)
                *lines, self.rest = (self.rest + chunk).split(b"\n")
                yield from lines
                self.rest = self.rest[: LONGEST_LINE_BYTES + 1]


@dataclass(frozen=True)
class RunStart:
    """One start of a run, as its first record shows it."""

    number: int  # as in runs/<number>
    iteration: int
    time_s: float | None  # since 1970


class Metrics:
    """The numbers of one run; `update` reads what has been appended since.

    Args:
        experiment_dir: folder of the run.
    """

    def __init__(self, experiment_dir: Path) -> None:
        self.path = experiment_dir / METRICS_FILE
        self._file = GrowingFile(self.path)
        self._clear()

    def _clear(self) -> None:
        self.starts: list[RunStart] = []
        self.dropped: dict[int, str] = {}  # why updates up to an iteration were dropped
        self.last: dict[str, dict[str, Any]] = {}  # newest record of each phase
        self._columns: dict[tuple[str, str], tuple[array[int], array[float]]]  # 16 bytes a number
        self._columns = defaultdict(lambda: (array("q"), array("d")))

    def update(self) -> None:
        """Read what is new.

        Raises:
            DataError: if the file cannot be read, or is no metrics.jsonl.
        """
        try:
            for line in self._file.new_lines(self._clear):
                self._add_line(line)
        except OSError as error:
            fix = "give the --experiment_dir of a run that has started training"
            raise DataError(f"cannot read {self.path}: {error.strerror}; {fix}") from None

    def take_last_line(self) -> None:
        """Take a last line that lacks only its line break."""
        self._add_line(self._file.rest)
        self._file.rest = b""

    def _add_line(self, line: bytes) -> None:
        """Take a line, unless it is not a record, such as a torn line."""
        if not line.strip() or len(line) > LONGEST_LINE_BYTES:
            return
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            return
        if isinstance(record, dict):
            self.add(record)

    def add(self, record: dict[str, Any]) -> None:
        """Take one record; leave out one without phase or iteration.

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
            raise DataError(f"{self.path} has more than {MOST_NAMES:,} names of numbers; it is no {METRICS_FILE}")

    def _begin(self, record: dict[str, Any], phase: str, iteration: int) -> None:
        """Note a new start of the run, and drop what it repeats."""
        number = record.get("run", 0)
        if type(number) is not int or (self.starts and number == self.starts[-1].number):
            return
        if self.starts:
            # A start begins with the evaluation that a stop left undone, or with the training after its checkpoint.
            first = iteration if phase == "training" else iteration + 1
            for iterations, values in self._columns.values():
                keep = np.array(iterations) < first
                iterations[:] = array("q", np.array(iterations)[keep].tobytes())
                values[:] = array("d", np.array(values)[keep].tobytes())
            self.dropped = {other: reason for other, reason in self.dropped.items() if other < first}
        self.starts.append(RunStart(number, iteration, _number(record.get("time"))))

    def names(self, phase: str) -> list[str]:
        """Return the names of the numbers of a phase, in the order of their first appearance."""
        return [name for other, name in self._columns if other == phase]

    def phases(self) -> list[str]:
        """Return the phases: training, validation, test ..."""
        return list(dict.fromkeys(phase for phase, _ in self._columns))

    def curve(self, phase: str, name: str) -> Curve:
        """Return a number of a phase; without any record, an empty curve."""
        iterations, values = self._columns.get((phase, name), (array("q"), array("d")))
        # The last record of an iteration counts: look for first ones from the end.
        unique, places = np.unique(np.array(iterations, np.int64)[::-1], return_index=True)
        return Curve(unique, np.array(values, np.float64)[::-1][places])


def read_run(experiment_dir: Path) -> Metrics:
    """Return all numbers of a run so far.

    Raises:
        DataError: if there are none.
    """
    metrics = Metrics(experiment_dir)
    metrics.update()
    metrics.take_last_line()
    if not metrics.phases():
        raise DataError(f"{metrics.path} has no record yet; wait for the first log line of the run")
    return metrics


def _number(value: Any) -> float | None:
    """Return a JSON number as a float; NaN for null, which stands for a number that was not finite."""
    if type(value) not in (float, int):
        return math.nan if value is None else None
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # an integer beyond the floats
        return math.nan
