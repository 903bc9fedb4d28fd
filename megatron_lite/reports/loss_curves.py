"""The lines of a picture of the losses of one run or several."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_lite.errors import DataError, UsageError
from megatron_lite.reports.series import Curve, read_run

MUTED_COLOR, GRID_COLOR, TITLE_COLOR = "#64748b", "#e2e8f0", "#0f172a"
RATE_COLOR = "#0d9488"
RUN_COLORS = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#475569")
FEW_POINTS = 3  # a line through so few points is hard to see, so they are drawn as dots
MOST_DOTS = 50  # of a curve whose points are all marked
MAX_RAW_POINTS = 150  # longer training curves are smoothed, with the raw values in pale behind
MOST_POINTS = 2000  # of a line
LONGEST_NAME = 60


class LossKind(NamedTuple):
    """A loss of a run."""

    phase: str
    name: str  # in metrics.jsonl
    label: str
    color: str  # in the picture of one run; several runs differ in color, and their losses in dashes
    dashes: tuple[int, ...]
    marker: str  # o: dots, D: diamonds; empty: none
    look: str  # in words, for several runs


KINDS = (
    LossKind("training", "loss", "training", "#2563eb", (), "", "solid"),
    LossKind("validation", "loss", "validation", "#ea580c", (6, 3), "o", "dashed"),
    LossKind("validation", "averaged_loss", "averaged weights", "#16a34a", (2, 2), "o", "dotted"),
    LossKind("test", "loss", "test", "#7c3aed", (), "D", "diamonds"),
)


class RunCurves(NamedTuple):
    """The curves that a run has, without non-finite values."""

    name: str
    losses: tuple[tuple[LossKind, Curve], ...]
    learning_rate: Curve
    tokens: int | None


class Picture(NamedTuple):
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


class Line(NamedTuple):
    """A line of the picture."""

    curve: Curve
    color: str
    width: float
    label: str = ""  # empty: not in the legend
    opacity: float = 1.0
    dashes: tuple[int, ...] = ()
    marker: str = ""


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
    """Return the names of folders, with the parent's name where names are equal."""
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
    alone = len(picture.runs) == 1
    for run_color, run in zip(RUN_COLORS, picture.runs, strict=False):
        for index, (kind, curve) in enumerate(run.losses):
            if alone:
                yield from _lines(kind, curve, kind.color, (), kind.label)
            else:
                yield from _lines(kind, curve, run_color, kind.dashes, "" if index else run.name)


def _lines(kind: LossKind, curve: Curve, color: str, dashes: tuple[int, ...], label: str) -> Iterator[Line]:
    if kind.phase == "training" and len(curve) > MAX_RAW_POINTS:
        smoothed = f"{label} (smoothed)" if label == kind.label else label
        yield Line(curve.thinned(MOST_POINTS), color, 0.8, opacity=0.25)
        yield Line(curve.smoothed().thinned(MOST_POINTS), color, 1.8, smoothed, dashes=dashes)
        return
    marker = (kind.marker if len(curve) <= MOST_DOTS else "") or dots(curve)
    width = 1.8 if kind.phase == "training" else 1.4
    yield Line(curve.thinned(MOST_POINTS), color, width, label, dashes=dashes, marker=marker)


def dots(curve: Curve) -> str:
    """Return the marker of a line that is too short to be seen without one."""
    return "o" if len(curve) <= FEW_POINTS else ""


def describe(picture: Picture) -> str:
    """Describe the last losses of one run, or how to read the lines of several."""
    if len(picture.runs) > 1:
        shown = {kind for run in picture.runs for kind, _ in run.losses}
        return " · ".join(f"{kind.label} {kind.look}" for kind in KINDS if kind in shown)
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


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers between low and high."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    rounding = 1e-9  # 6e-4 / 2e-4 is below 3
    return [index * step for index in range(math.ceil(low / step - rounding), math.floor(high / step + rounding) + 1)]
