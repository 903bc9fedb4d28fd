"""Draw the picture of losses (lines, axes and names in pixels), as an SVG or with matplotlib in any
of its formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lite.errors import DataError, UsageError
from megatron_lite.reports.charts import LEARNING_RATE, LOSSES, Drawn, draw_chart
from megatron_lite.reports.watched_run import Curve, WatchedRun, read_runs, title_of
from megatron_lite.run.progress_line import format_count, printable

MUTED_COLOR = "#64748b"
GRID_COLOR = "#e2e8f0"
TITLE_COLOR = "#0f172a"
RATE_COLOR = "#0d9488"
PALETTE = ("#2563eb", "#ea580c", "#16a34a", "#9333ea", "#dc2626", "#0891b2", "#ca8a04", "#475569")
LOOKS = ("solid", "dashed", "dotted", "diamonds")  # of the losses, where colors distinguish runs
FEW_POINTS = 3  # a line through so few points is hard to see, so they are drawn as dots
MOST_DOTS = 50  # on a curve whose points are all marked
Point = tuple[float, float]
DOTS_PER_INCH = 150
LEFT = 70.0
RIGHT = 870.0
WIDTH = 900
LEGEND_ROW, CHARACTER = 20, 7.5  # pixels
RATE_TICKS = 5  # about


class Stroke(NamedTuple):
    """A line through points, or the filled area that they surround."""

    points: Sequence[Point]
    color: str
    width: float = 1.0
    opacity: float = 1.0
    dashes: tuple[int, ...] = ()
    filled: bool = False


class Words(NamedTuple):
    """One line of text; `anchor` (start, middle, end) is placed at x."""

    x: float
    y: float
    text: str
    color: str
    size: int = 12
    anchor: str = "start"

    @property
    def weight(self) -> str:
        """Titles are bold."""
        return "bold" if self.size > 14 else "normal"


class Drawing(NamedTuple):
    """A picture of this size; y grows downwards, and later shapes cover earlier ones."""

    width: float
    height: float
    shapes: Sequence[Stroke | Words]


def to_svg(drawing: Drawing) -> str:
    """Return the picture as an SVG."""
    size = f"{drawing.width:.0f}", f"{drawing.height:.0f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" width="{size[0]}" '
        f'height="{size[1]}" font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(map(_element, drawing.shapes))}</svg>\n"
    )


def _element(shape: Stroke | Words) -> str:
    if isinstance(shape, Words):
        # XML has no control characters, not even escaped ones.
        return (
            f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size}" font-weight="{shape.weight}" '
            f'fill="{shape.color}" text-anchor="{shape.anchor}">{escape(printable(shape.text))}</text>'
        )
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
    if shape.filled:
        return f'<polygon points="{points}" fill="{shape.color}" fill-opacity="{shape.opacity}"/>'
    dashes = f' stroke-dasharray="{" ".join(map(str, shape.dashes))}"' if shape.dashes else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="{shape.color}" stroke-width="{shape.width}" '
        f'stroke-opacity="{shape.opacity}" stroke-linejoin="round"{dashes}/>'
    )


def to_figure(drawing: Drawing) -> Any:
    """Return the picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    figure = Figure(
        figsize=(drawing.width / 100, drawing.height / 100), dpi=DOTS_PER_INCH, facecolor="white"
    )
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.set_axis_off()
    point = 72 / 100  # points per pixel
    for shape in drawing.shapes:
        if isinstance(shape, Words):
            align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
            looks: dict[str, Any] = {
                "color": shape.color,
                "fontsize": shape.size * point,
                "fontweight": shape.weight,
            }
            axes.text(
                shape.x, shape.y, shape.text, horizontalalignment=align, parse_math=False, **looks
            )
            continue
        across, down = zip(*shape.points, strict=True)
        if shape.filled:
            axes.fill(across, down, color=shape.color, alpha=shape.opacity, linewidth=0)
        else:
            style: Any = (
                (0, tuple(dash / shape.width for dash in shape.dashes)) if shape.dashes else "solid"
            )
            looks = {"color": shape.color, "alpha": shape.opacity, "linewidth": shape.width * point}
            axes.plot(across, down, linestyle=style, solid_joinstyle="round", **looks)
    return figure


class _Panel:
    """A rectangle with data coordinates and grid lines."""

    def __init__(
        self, top: float, height: float, x_range: tuple[float, float], values: Sequence[float]
    ) -> None:
        self.top, self.bottom = top, top + height
        self.x_low, self.x_high = x_range
        low, high = min(values), max(values)
        margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        self.low, self.high = low - margin, high + margin

    def place(self, iteration: float, value: float) -> Point:
        across = (iteration - self.x_low) / ((self.x_high - self.x_low) or 1)
        up = (value - self.low) / (self.high - self.low)
        return LEFT + across * (RIGHT - LEFT), self.bottom - up * (self.bottom - self.top)

    def metric(self, drawn: Drawn, color: str, width: float) -> Iterator[Stroke]:
        """Draw a metric's lines, a raw one in pale; mark the points of a line too short to be
        seen."""
        for curve in drawn.lines[:-1]:
            yield Stroke(self._places(curve), color, 0.8, opacity=0.25)
        places = self._places(drawn.lines[-1])
        yield Stroke(places, color, width * drawn.widen, dashes=drawn.dashes)
        marker = drawn.metric.marker if len(places) <= MOST_DOTS else ""
        if len(places) <= FEW_POINTS:
            marker = marker or "o"
        yield from (_mark(marker, place, color) for place in places if marker)

    def _places(self, curve: Curve) -> list[Point]:
        return [
            self.place(*point)
            for point in zip(curve.iterations.tolist(), curve.values.tolist(), strict=True)
        ]

    def level(self, value: float, color: str, dashes: tuple[int, ...] = ()) -> Stroke:
        y = self.place(self.x_low, value)[1]
        return Stroke([(LEFT, y), (RIGHT, y)], color, dashes=dashes)

    def grid(
        self, num_lines: int, form: Callable[[float], str] = "{:g}".format
    ) -> Iterator[Stroke | Words]:
        for value in round_ticks(self.low, self.high, num_lines):
            yield self.level(value, GRID_COLOR)
            yield Words(
                LEFT - 8,
                self.place(self.x_low, value)[1] + 4,
                form(value),
                MUTED_COLOR,
                anchor="end",
            )


def round_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers between low and high."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    rounding = 1e-9  # 6e-4 / 2e-4 is below 3
    return [
        index * step
        for index in range(math.ceil(low / step - rounding), math.floor(high / step + rounding) + 1)
    ]


def _mark(marker: str, place: Point, color: str) -> Stroke:
    """Return a diamond for "D", or a dot."""
    corners, radius = (4, 5.0) if marker == "D" else (16, 3.0)
    angles = [2 * math.pi * corner / corners for corner in range(corners)]
    points = [
        (place[0] + radius * math.cos(angle), place[1] + radius * math.sin(angle))
        for angle in angles
    ]
    return Stroke(points, color, filled=True)


def read_losses(folders: Sequence[Path]) -> list[WatchedRun]:
    """Read the runs for a picture.

    Raises:
        DataError: if a run has no metrics, or no loss among them.
        UsageError: if there are too many runs.
    """
    if len(folders) > len(PALETTE):
        raise UsageError(
            f"{len(folders)} runs; a picture shows up to {len(PALETTE)}, so give fewer"
        )
    runs = read_runs(folders)
    for run in runs:
        if not any(draw_chart(LOSSES, [run])):
            raise DataError(
                f"{run.metrics.path} has no loss yet; wait for the first log line of the run"
            )
    return runs


def _legend(labels: Mapping[str, str], top: float) -> tuple[list[Stroke | Words], float]:
    """Return the legend, in as many rows as needed, and the y below it. labels: by color."""
    shapes: list[Stroke | Words] = []
    x, y = LEFT, top
    for color, label in labels.items():
        width = len(label) * CHARACTER + 45
        if x > LEFT and x + width > RIGHT:
            x, y = LEFT, y + LEGEND_ROW
        shapes += [
            Stroke([(x, y - 4), (x + 20, y - 4)], color, 3),
            Words(x + 26, y, label, color, 13),
        ]
        x += width
    return shapes, y + LEGEND_ROW / 2


def describe(losses: Sequence[Drawn], last: int) -> str:
    """Describe one run's losses at its last iteration, or how to read several runs' lines."""
    run = losses[0].run
    if run is not losses[-1].run:
        shown = {drawn.metric for drawn in losses}
        looks = zip(LOSSES.metrics, LOOKS, strict=True)
        return " · ".join(f"{metric.short} {look}" for metric, look in looks if metric in shown)
    parts = " · ".join(f"{drawn.metric.short} {drawn.curve.values[-1]:.3f}" for drawn in losses)
    consumed = run.metrics.curve("training", "consumed_tokens").finite().values
    tokens = f" ({format_count(int(consumed[-1]))} tokens)" if len(consumed) else ""
    return f"{parts} at iteration {last:,}{tokens}"


def draw(runs: Sequence[WatchedRun], baselines: Sequence[tuple[str, float]]) -> Drawing:
    """Return a drawing of the losses, with the learning rate in a small panel below. baselines:
    names and losses."""
    losses, rates = [*draw_chart(LOSSES, runs)], [*draw_chart(LEARNING_RATE, runs)]
    several = len(runs) > 1
    first = min(int(drawn.curve.iterations[0]) for drawn in losses)
    last = max(int(drawn.curve.iterations[-1]) for drawn in losses)
    labels = {
        PALETTE[drawn.color]: drawn.run.name
        if several
        else drawn.metric.short + " (smoothed)" * (len(drawn.lines) - 1)
        for drawn in losses
    }
    legend, top = _legend(labels, 76)
    shown = [line.values for drawn in losses for line in drawn.lines]
    values = [float(value) for line in shown for value in (line.min(), line.max())]
    panel = _Panel(top, 330, (first, last), [*values, *(value for _, value in baselines)])
    title = (
        Words(LEFT, 30, title_of(runs), TITLE_COLOR, 18),
        Words(LEFT, 52, describe(losses, last), MUTED_COLOR),
    )
    shapes = [*title, *legend, *panel.grid(6)]
    for name, value in baselines:
        shapes.append(panel.level(value, MUTED_COLOR, (6, 4)))
        y = panel.place(first, value)[1] - 5
        shapes.append(Words(RIGHT - 4, y, f"{name}: {value:.3f}", MUTED_COLOR, anchor="end"))
    for drawn in losses:
        shapes += panel.metric(
            drawn, PALETTE[drawn.color], 1.8 if drawn.metric.phase == "training" else 1.4
        )
    bottom = panel.bottom
    if rates:
        highest = max(float(drawn.curve.values.max()) for drawn in rates)
        top = float(f"{highest:.2g}") or 1.0  # two digits, as the log may skip the peak
        rate = _Panel(bottom + 30, 80, (first, last), [0.0, top])
        # 0.004, 5e-5
        shapes += rate.grid(RATE_TICKS, lambda value: f"{value:.4g}".replace("e-0", "e-"))
        shapes.append(Words(LEFT + 4, rate.top - 4, "learning rate", MUTED_COLOR))
        for drawn in rates:
            shapes += rate.metric(drawn, PALETTE[drawn.color] if several else RATE_COLOR, 1.5)
        bottom = rate.bottom
    for iteration in round_ticks(first, last, 8) if last > first else [first]:
        x = panel.place(iteration, panel.low)[0]
        shapes.append(Words(x, bottom + 20, f"{iteration:,g}", MUTED_COLOR, anchor="middle"))
    shapes.append(Words((LEFT + RIGHT) / 2, bottom + 40, "iteration", MUTED_COLOR, anchor="middle"))
    shapes.append(Words(RIGHT, 52, "loss, nats per token", MUTED_COLOR, anchor="end"))
    return Drawing(WIDTH, bottom + 55, shapes)
