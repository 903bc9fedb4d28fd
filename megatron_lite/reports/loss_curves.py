"""The lines of a picture of losses, of one run or of several, whatever draws them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron_lite.errors import DataError, UsageError
from megatron_lite.reports.curves import Curve
from megatron_lite.reports.series import read_run

MUTED_COLOR, GRID_COLOR, TITLE_COLOR = "#64748b", "#e2e8f0", "#0f172a"
RATE_COLOR = "#0d9488"
RUN_COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#475569")
FEW_POINTS = 3  # a line through so few points is hard to see, so they are drawn as dots
MOST_DOTS = 50  # of a curve whose points are all marked
MAX_RAW_POINTS = 150  # longer training curves are smoothed, with the raw values in pale behind
MOST_POINTS = 2000  # of a line
LONGEST_NAME = 60


class Kind(NamedTuple):
    """A loss of a run."""

    phase: str
    name: str  # in metrics.jsonl
    label: str
    color: str  # in the picture of one run; several runs differ in color, and their losses in dashes
    dashes: tuple[int, ...]
    marker: str  # of matplotlib; empty: none


KINDS = (
    Kind("training", "loss", "training", "#2563eb", (), ""),
    Kind("validation", "loss", "validation", "#ea580c", (6, 3), "o"),
    Kind("validation", "averaged_loss", "averaged weights", "#16a34a", (2, 2), "o"),
    Kind("test", "loss", "test", "#7c3aed", (), "D"),
)


@dataclass(frozen=True)
class RunCurves:
    """The curves of a run, without non-finite values; those that it does not have are left out."""

    name: str
    losses: tuple[tuple[Kind, Curve], ...]
    learning_rate: Curve
    tokens: int | None


@dataclass(frozen=True)
class Picture:
    """Runs and baselines to draw."""

    runs: tuple[RunCurves, ...]
    baselines: tuple[tuple[str, float], ...]  # (name, loss)

    @property
    def title(self) -> str:
        return self.runs[0].name if len(self.runs) == 1 else f"{len(self.runs)} runs"

    @property
    def rates(self) -> list[tuple[str, Curve]]:
        """Return the learning rates with their colors."""
        colors = RUN_COLORS if len(self.runs) > 1 else (RATE_COLOR,)
        runs = zip(colors, self.runs, strict=False)
        return [(color, run.learning_rate) for color, run in runs if len(run.learning_rate)]

    def iterations(self) -> tuple[int, int]:
        """Return the first and the last iteration."""
        ends = [curve.iterations[[0, -1]] for run in self.runs for _, curve in run.losses]
        return min(int(first) for first, _ in ends), max(int(last) for _, last in ends)


@dataclass(frozen=True)
class Line:
    """A line of the picture."""

    curve: Curve
    color: str
    label: str  # empty: not in the legend
    width: float
    opacity: float
    dashes: tuple[int, ...]
    marker: str


def read_picture(folders: Sequence[Path], baselines: Sequence[tuple[str, float]]) -> Picture:
    """Read the curves of runs.

    Raises:
        DataError: if a run has no metrics, or no loss among them.
        UsageError: if there are too many runs.
    """
    if len(folders) > len(RUN_COLORS):
        raise UsageError(f"{len(folders)} runs; a picture shows up to {len(RUN_COLORS)}, so give fewer")
    runs = tuple(_read_curves(folder, name) for folder, name in zip(folders, unique_names(folders), strict=True))
    return Picture(runs, tuple(baselines))


def unique_names(folders: Sequence[Path]) -> list[str]:
    """Return the names of folders, with that of the parent where several have the same."""
    names = [folder.absolute().name for folder in folders]
    return [
        name if names.count(name) == 1 else str(Path(*folder.absolute().parts[-2:]))
        for folder, name in zip(folders, names, strict=True)
    ]


def _read_curves(folder: Path, name: str) -> RunCurves:
    metrics = read_run(folder)
    losses = [(kind, metrics.curve(kind.phase, kind.name).finite()) for kind in KINDS]
    known = tuple((kind, curve) for kind, curve in losses if len(curve))
    if not known:
        raise DataError(f"{metrics.path} has no loss yet; wait for the first log line of the run")
    tokens = metrics.curve("training", "consumed_tokens").finite()
    return RunCurves(
        "".join(char if char.isprintable() else "?" for char in name[:LONGEST_NAME]),
        known,
        metrics.curve("training", "learning_rate").finite(),
        int(tokens.values[-1]) if len(tokens) else None,
    )


def lines(picture: Picture) -> Iterator[Line]:
    """Yield the lines of the losses, the first drawn first."""
    if len(picture.runs) == 1:
        for kind, curve in picture.runs[0].losses:
            yield from _lines(kind, curve, kind.color, (), kind.label)
        return
    for color, run in zip(RUN_COLORS, picture.runs, strict=False):
        for index, (kind, curve) in enumerate(run.losses):
            yield from _lines(kind, curve, color, kind.dashes, run.name if index == 0 else "")


def _lines(kind: Kind, curve: Curve, color: str, dashes: tuple[int, ...], label: str) -> Iterator[Line]:
    if kind.phase == "training" and len(curve) > MAX_RAW_POINTS:
        smoothed = f"{label} (smoothed)" if label == kind.label else label
        yield Line(curve.thinned(MOST_POINTS), color, "", 0.8, 0.25, (), "")
        yield Line(curve.smoothed().thinned(MOST_POINTS), color, smoothed, 1.8, 1.0, dashes, "")
        return
    marker = kind.marker if len(curve) <= MOST_DOTS else ""
    marker = marker or ("o" if len(curve) <= FEW_POINTS else "")
    width = 1.8 if kind.phase == "training" else 1.4
    yield Line(curve.thinned(MOST_POINTS), color, label, width, 1.0, dashes, marker)


def describe(picture: Picture) -> str:
    """Describe the last losses of one run, or how to read the lines of several."""
    if len(picture.runs) > 1:
        shown = {kind for run in picture.runs for kind, _ in run.losses}
        words = {"training": "solid", "validation": "dashed", "averaged weights": "dotted", "test": "diamonds"}
        return " · ".join(f"{kind.label} {words[kind.label]}" for kind in KINDS if kind in shown)
    (run,) = picture.runs
    parts = [f"{kind.label} {curve.values[-1]:.3f}" for kind, curve in run.losses]
    tokens = f" ({format_tokens(run.tokens)} tokens)" if run.tokens else ""
    return f"{' · '.join(parts)} at iteration {picture.iterations()[1]:,}{tokens}"


def format_tokens(tokens: int) -> str:
    """Format 1234567 as 1.23M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{letter}"
    return str(tokens)


def highest_rate(picture: Picture) -> float:
    """Return the top of the axis of the learning rate, in two digits because the log may skip the peak."""
    return float(f"{max(float(curve.values.max()) for _, curve in picture.rates):.2g}") or 1.0


def format_rate(value: float) -> str:
    """Format a learning rate of an axis: 0.004, 5e-5."""
    return f"{value:.4g}".replace("e-0", "e-")


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers between low and high."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    rounding = 1e-9  # 6e-4 / 2e-4 is below 3
    return [index * step for index in range(math.ceil(low / step - rounding), math.floor(high / step + rounding) + 1)]
