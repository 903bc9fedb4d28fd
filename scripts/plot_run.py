"""Draw the loss curve of a run from its metrics.jsonl: a picture, and a sparkline in the terminal.

    python scripts/plot_run.py EXPERIMENT_DIR [--output loss.png] [--baseline NAME=VALUE ...]

The picture is loss.png in the experiment directory, unless --output names another file; its ending is the format.
Without matplotlib (`pip install matplotlib`) it is a simple SVG.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401, I001  names a missing package
import numpy as np
from megatron_lite.cli.script_parser import ScriptParser
from megatron_lite.errors import DataError, RunError, StorageError, UsageError
from megatron_lite.reports.curves import Curve, sparkline
from megatron_lite.reports.series import read_run

Points = list[tuple[int, float]]  # (iteration, value)

TRAINING_COLOR = "#2563eb"
VALIDATION_COLOR = "#ea580c"
RATE_COLOR = "#0d9488"
MUTED_COLOR = "#64748b"
GRID_COLOR = "#e2e8f0"
FEW_POINTS = 3  # a line through so few points is hard to see, so they are drawn as dots
RATE_TICKS = 5  # about, on the axis of the learning rate
MAX_RAW_POINTS = 150  # longer curves are smoothed, with the raw values in pale behind


@dataclass(frozen=True)
class Curves:
    """The data of the picture, without non-finite values."""

    title: str
    training: Points
    validation: Points
    test: Points
    learning_rate: Points
    tokens: int | None
    baselines: list[tuple[str, float]]


def read_curves(experiment_dir: Path, baselines: list[tuple[str, float]]) -> Curves:
    """Read the curves of a run.

    Raises:
        DataError: if the run has no metrics, or no loss among them.
    """
    metrics = read_run(experiment_dir)

    def points(phase: str, name: str) -> Points:
        curve = metrics.curve(phase, name).finite()
        return list(zip(curve.iterations.tolist(), curve.values.tolist(), strict=True))

    tokens = points("training", "consumed_tokens")
    curves = Curves(
        title=experiment_dir.absolute().name[:60],
        training=points("training", "loss"),
        validation=points("validation", "loss"),
        test=points("test", "loss"),
        learning_rate=points("training", "learning_rate"),
        tokens=int(tokens[-1][1]) if tokens else None,
        baselines=baselines,
    )
    if not curves.training and not curves.validation:
        raise DataError(f"{metrics.path} has no loss yet; wait for the first log line of the run")
    return curves


def smooth(points: Points) -> Points:
    """Return a centred moving average over about 1/50 of the curve."""
    curve = Curve(np.array([point[0] for point in points]), np.array([point[1] for point in points])).smoothed()
    return list(zip(curve.iterations.tolist(), curve.values.tolist(), strict=True))


def format_tokens(tokens: int) -> str:
    """Format 1234567 as 1.23M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g}{letter}"
    return str(tokens)


def describe(curves: Curves) -> str:
    """Describe the last losses."""
    named = (("training", curves.training), ("validation", curves.validation), ("test", curves.test))
    parts = [f"{name} {points[-1][1]:.3f}" for name, points in named if points]
    last = max(points[-1][0] for _, points in named if points)
    tokens = f" ({format_tokens(curves.tokens)} tokens)" if curves.tokens else ""
    return f"{' · '.join(parts)} at iteration {last:,}{tokens}"


def highest_rate(curves: Curves) -> float:
    """Return the top of the axis of the learning rate, in two digits because the log may skip the peak."""
    return float(f"{max(value for _, value in curves.learning_rate):.2g}") or 1.0


def format_rate(value: float) -> str:
    """Format a learning rate of an axis: 0.004, 5e-5."""
    return f"{value:.4g}".replace("e-0", "e-")


def draw_with_matplotlib(curves: Curves) -> Any:
    """Return a figure of the loss, with the learning rate in a small panel below."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained", facecolor="white")
    if curves.learning_rate:
        loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1]})
        marker = "o" if len(curves.learning_rate) <= FEW_POINTS else None
        rate_axes.plot(
            *zip(*curves.learning_rate, strict=True), color=RATE_COLOR, linewidth=1.5, marker=marker, markersize=4
        )
        rate_axes.fill_between(*zip(*curves.learning_rate, strict=True), color=RATE_COLOR, alpha=0.12, linewidth=0)
        rate_axes.set_ylim(bottom=0)
        rate_axes.set_ylabel("learning rate", color=MUTED_COLOR)
        rate_axes.set_yticks(round_ticks(0.0, highest_rate(curves), RATE_TICKS))
        figure.align_ylabels()
        rate_axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_rate(value)))
    else:
        loss_axes = rate_axes = figure.subplots()
    _draw_losses(loss_axes, curves)
    rate_axes.set_xlabel("iteration", color=MUTED_COLOR)
    rate_axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    rate_axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10], integer=True))
    iterations = [iteration for points in (curves.training, curves.validation) for iteration, _ in points]
    if min(iterations) == max(iterations):
        rate_axes.set_xlim(iterations[0] - 1, iterations[0] + 1)
    for axes in {loss_axes, rate_axes}:
        axes.grid(color=GRID_COLOR, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=MUTED_COLOR, length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(GRID_COLOR)
    return figure


def _draw_losses(axes: Any, curves: Curves) -> None:
    raw = curves.training
    if len(raw) > MAX_RAW_POINTS:
        axes.plot(*zip(*raw, strict=True), color=TRAINING_COLOR, alpha=0.25, linewidth=0.8)
        axes.plot(*zip(*smooth(raw), strict=True), color=TRAINING_COLOR, linewidth=1.8, label="training (smoothed)")
    elif raw:
        marker = "o" if len(raw) <= FEW_POINTS else None
        axes.plot(
            *zip(*raw, strict=True), color=TRAINING_COLOR, linewidth=1.8, marker=marker, markersize=4, label="training"
        )
    if curves.validation:
        axes.plot(
            *zip(*curves.validation, strict=True),
            color=VALIDATION_COLOR,
            linewidth=1.4,
            marker="o",
            markersize=5 if len(curves.validation) <= 50 else 2,
            markeredgecolor="white",
            label="validation",
        )
    if curves.test:
        axes.plot(*zip(*curves.test, strict=True), "D", color="#7c3aed", markersize=7, label="test")
    for name, value in curves.baselines:
        axes.axhline(value, color=MUTED_COLOR, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{name}: {value:.3f}",
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            color=MUTED_COLOR,
            fontsize=9,
        )
    axes.set_ylabel("loss (nats per token)", color=MUTED_COLOR)
    axes.set_title(curves.title, loc="left", fontsize=14, fontweight="bold", pad=24, parse_math=False)
    axes.annotate(
        describe(curves),
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 8),
        textcoords="offset points",
        color=MUTED_COLOR,
        fontsize=10,
    )
    axes.legend(
        frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, borderaxespad=0.1, labelcolor="#0f172a"
    )


class _Panel:
    """A rectangle of an SVG with data coordinates and grid lines."""

    def __init__(self, top: float, height: float, x_range: tuple[float, float], values: Sequence[float]) -> None:
        self.left, self.right, self.top, self.bottom = 70.0, 870.0, top, top + height
        self.x_low, self.x_high = x_range
        low, high = min(values), max(values)
        margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        self.low, self.high = low - margin, high + margin

    def place(self, iteration: float, value: float) -> tuple[float, float]:
        across = (iteration - self.x_low) / ((self.x_high - self.x_low) or 1)
        up = (value - self.low) / (self.high - self.low)
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)

    def line(self, points: Points, color: str, width: float, opacity: float = 1.0) -> str:
        path = " ".join("{:.1f},{:.1f}".format(*self.place(*point)) for point in points)
        return (
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" '
            f'stroke-opacity="{opacity}" stroke-linejoin="round"/>'
        )

    def dots(self, points: Points, color: str) -> str:
        places = (self.place(*point) for point in points)
        return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>' for x, y in places)

    def grid(self, num_lines: int, form: Callable[[float], str] = "{:g}".format) -> str:
        parts = []
        for value in round_ticks(self.low, self.high, num_lines):
            y = self.place(self.x_low, value)[1]
            parts.append(f'<line x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID_COLOR}"/>')
            parts.append(svg_text(self.left - 8, y + 4, form(value), anchor="end"))
        return "".join(parts)


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers between low and high."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    rounding = 1e-9  # 6e-4 / 2e-4 is below 3
    return [index * step for index in range(math.ceil(low / step - rounding), math.floor(high / step + rounding) + 1)]


def svg_text(x: float, y: float, text: str, size: int = 12, color: str = MUTED_COLOR, anchor: str = "start") -> str:
    """Return one line of text."""
    weight = "bold" if size > 14 else "normal"
    return (
        f'<text x="{x}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{color}" '
        f'text-anchor="{anchor}">{escape(text)}</text>'
    )


def draw_svg(curves: Curves) -> str:
    """Return the picture as an SVG, without matplotlib."""
    losses = [curves.training, curves.validation, curves.test]
    iterations = [iteration for points in losses for iteration, _ in points]
    x_range = (min(iterations), max(iterations))
    values = [value for points in losses for _, value in points] + [value for _, value in curves.baselines]
    panel = _Panel(70, 330, x_range, values)
    parts = [svg_text(70, 30, curves.title, 18, "#0f172a"), svg_text(70, 52, describe(curves)), panel.grid(6)]
    for name, value in curves.baselines:
        y = panel.place(0, value)[1]
        style = f'stroke="{MUTED_COLOR}" stroke-dasharray="6 4"'
        parts.append(f'<line x1="{panel.left}" x2="{panel.right}" y1="{y:.1f}" y2="{y:.1f}" {style}/>')
        parts.append(svg_text(866, y - 5, f"{name}: {value:.3f}", anchor="end"))
    smoothed = len(curves.training) > MAX_RAW_POINTS
    if smoothed:
        parts.append(panel.line(curves.training, TRAINING_COLOR, 0.8, 0.3))
    parts.append(panel.line(smooth(curves.training) if smoothed else curves.training, TRAINING_COLOR, 2))
    if len(curves.training) <= FEW_POINTS:
        parts.append(panel.dots(curves.training, TRAINING_COLOR))
    parts.append(panel.line(curves.validation, VALIDATION_COLOR, 1.5) + panel.dots(curves.validation, VALIDATION_COLOR))
    parts.append(panel.dots(curves.test, "#7c3aed"))
    legend = [("training" + " (smoothed)" * smoothed, TRAINING_COLOR), ("validation", VALIDATION_COLOR)]
    for row, (name, color) in enumerate(legend[: 2 if curves.validation else 1]):
        parts.append(svg_text(870, 34 + 18 * row, f"— {name}", 13, color, "end"))
    bottom = panel.bottom
    if curves.learning_rate:
        rate = _Panel(430, 80, x_range, [0.0, highest_rate(curves)])
        parts += [
            rate.grid(RATE_TICKS, format_rate),
            rate.line(curves.learning_rate, RATE_COLOR, 1.5),
            svg_text(74, 426, "learning rate"),
        ]
        bottom = rate.bottom
    for iteration in round_ticks(*x_range, 8) if x_range[1] > x_range[0] else [x_range[0]]:
        parts.append(svg_text(panel.place(iteration, 0)[0], bottom + 20, f"{iteration:,g}", anchor="middle"))
    parts.append(svg_text(470, bottom + 40, "iteration", anchor="middle"))
    height = bottom + 55
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height:.0f}" width="900" height="{height:.0f}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def write_picture(curves: Curves, output: Path) -> Path:
    """Draw into `output`, or into an .svg of that name without matplotlib; return the file written.

    Raises:
        UsageError: if the ending is not a known format.
        StorageError: if the file cannot be written.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if importlib.util.find_spec("matplotlib") is None:
            if output.suffix != ".svg":
                print("matplotlib is not installed (pip install matplotlib); drawing a simple SVG instead")
            output = output.with_suffix(".svg")
            output.write_text(draw_svg(curves), encoding="utf-8")
        else:
            draw_with_matplotlib(curves).savefig(output)
    except OSError as error:
        raise StorageError(f"cannot write {output}: {error.strerror}; choose another --output") from None
    except ValueError as error:  # from matplotlib; it names the known formats
        raise UsageError(f"--output={output}: {error}") from None
    return output


def parse_baseline(text: str) -> tuple[str, float]:
    """Parse NAME=VALUE with a finite number."""
    name, _, value = text.rpartition("=")
    number = float(value)
    if not name or not math.isfinite(number):
        raise ValueError(text)
    return name, number


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw; return the exit code."""
    parser = ScriptParser(description="Draw the loss curve of a run.")
    parser.add_argument("experiment_dir", type=Path, help="the --experiment_dir of the run")
    parser.add_argument("--output", type=Path, help="picture to write (default: loss.png in the experiment directory)")
    parser.add_argument(
        "--baseline",
        type=parse_baseline,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="add a horizontal line, such as 'unigram entropy=5.1'; may be repeated",
    )
    options = parser.parse_args(arguments)
    try:
        curves = read_curves(options.experiment_dir, options.baseline)
        output = write_picture(curves, options.output or options.experiment_dir / "loss.png")
    except RunError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        return error.exit_code
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    for name, points in (("training", curves.training), ("validation", curves.validation)):
        if points:
            values = np.array([value for _, value in points])
            print(f"{name:10} loss {values[0]:.3f} {sparkline(values, 60, unicode)} {values[-1]:.3f}")
    print(f"loss curve: {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
