"""The picture of losses: lines, axes and names in pixels, as an SVG or drawn by matplotlib in any of its formats."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

from megatron_lite.reports.loss_curves import (
    GRID_COLOR,
    MOST_POINTS,
    MUTED_COLOR,
    TITLE_COLOR,
    Line,
    Picture,
    describe,
    dots,
    lines,
    round_ticks,
)

Point = tuple[float, float]
DOTS_PER_INCH = 150
LEFT, RIGHT, WIDTH = 70.0, 870.0, 900
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
    """One line of text, whose `anchor` (start, middle, end) stands at x."""

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
        # XML knows no control characters, not even escaped ones.
        clean = "".join(char if char.isprintable() else "?" for char in shape.text)
        return (
            f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size}" font-weight="{shape.weight}" '
            f'fill="{shape.color}" text-anchor="{shape.anchor}">{escape(clean)}</text>'
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
    """Return the picture as a figure of matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(drawing.width / 100, drawing.height / 100), dpi=DOTS_PER_INCH, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, drawing.width), ylim=(drawing.height, 0))
    axes.set_axis_off()
    point = 72 / 100  # points of a pixel
    for shape in drawing.shapes:
        if isinstance(shape, Words):
            align = {"start": "left", "middle": "center", "end": "right"}[shape.anchor]
            looks: dict[str, Any] = {"color": shape.color, "fontsize": shape.size * point, "fontweight": shape.weight}
            axes.text(shape.x, shape.y, shape.text, horizontalalignment=align, parse_math=False, **looks)
            continue
        across, down = zip(*shape.points, strict=True)
        if shape.filled:
            axes.fill(across, down, color=shape.color, alpha=shape.opacity, linewidth=0)
        else:
            style: Any = (0, tuple(dash / shape.width for dash in shape.dashes)) if shape.dashes else "solid"
            looks = {"color": shape.color, "alpha": shape.opacity, "linewidth": shape.width * point}
            axes.plot(across, down, linestyle=style, solid_joinstyle="round", **looks)
    return figure


class _Panel:
    """A rectangle with data coordinates and grid lines."""

    def __init__(self, top: float, height: float, x_range: tuple[float, float], values: Sequence[float]) -> None:
        self.top, self.bottom = top, top + height
        self.x_low, self.x_high = x_range
        low, high = min(values), max(values)
        margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        self.low, self.high = low - margin, high + margin

    def place(self, iteration: float, value: float) -> Point:
        across = (iteration - self.x_low) / ((self.x_high - self.x_low) or 1)
        up = (value - self.low) / (self.high - self.low)
        return LEFT + across * (RIGHT - LEFT), self.bottom - up * (self.bottom - self.top)

    def line(self, line: Line) -> Iterator[Stroke]:
        points = zip(line.curve.iterations.tolist(), line.curve.values.tolist(), strict=True)
        places = [self.place(*point) for point in points]
        yield Stroke(places, line.color, line.width, line.opacity, line.dashes)
        yield from (_mark(line.marker, place, line.color) for place in places if line.marker)

    def level(self, value: float, color: str, dashes: tuple[int, ...] = ()) -> Stroke:
        y = self.place(self.x_low, value)[1]
        return Stroke([(LEFT, y), (RIGHT, y)], color, dashes=dashes)

    def grid(self, num_lines: int, form: Callable[[float], str] = "{:g}".format) -> Iterator[Stroke | Words]:
        for value in round_ticks(self.low, self.high, num_lines):
            yield self.level(value, GRID_COLOR)
            yield Words(LEFT - 8, self.place(self.x_low, value)[1] + 4, form(value), MUTED_COLOR, anchor="end")


def _mark(marker: str, place: Point, color: str) -> Stroke:
    """Return a diamond for "D", or a dot."""
    corners, radius = (4, 5.0) if marker == "D" else (16, 3.0)
    angles = [2 * math.pi * corner / corners for corner in range(corners)]
    points = [(place[0] + radius * math.cos(angle), place[1] + radius * math.sin(angle)) for angle in angles]
    return Stroke(points, color, filled=True)


def _legend(picture: Picture, top: float) -> tuple[list[Stroke | Words], float]:
    """Return the legend, in as many rows as it takes, and the place below it."""
    shapes: list[Stroke | Words] = []
    x, y = LEFT, top
    for line in lines(picture):
        width = len(line.label) * CHARACTER + 45
        if not line.label:
            continue
        if x > LEFT and x + width > RIGHT:
            x, y = LEFT, y + LEGEND_ROW
        shapes.append(Stroke([(x, y - 4), (x + 20, y - 4)], line.color, 3))
        shapes.append(Words(x + 26, y, line.label, line.color, 13))
        x += width
    return shapes, y + LEGEND_ROW / 2


def draw(picture: Picture) -> Drawing:
    """Return the losses, with the learning rate in a small panel below."""
    first, last = picture.iterations()
    legend, top = _legend(picture, 76)
    losses = [*lines(picture)]
    values = [float(value) for line in losses for value in (line.curve.values.min(), line.curve.values.max())]
    panel = _Panel(top, 330, (first, last), [*values, *(value for _, value in picture.baselines)])
    title = Words(LEFT, 30, picture.title, TITLE_COLOR, 18), Words(LEFT, 52, describe(picture), MUTED_COLOR)
    shapes = [*title, *legend, *panel.grid(6)]
    for name, value in picture.baselines:
        shapes.append(panel.level(value, MUTED_COLOR, (6, 4)))
        y = panel.place(first, value)[1] - 5
        shapes.append(Words(RIGHT - 4, y, f"{name}: {value:.3f}", MUTED_COLOR, anchor="end"))
    shapes += [shape for line in losses for shape in panel.line(line)]
    bottom = panel.bottom
    if picture.rates:
        highest = max(float(curve.values.max()) for _, curve in picture.rates)
        top = float(f"{highest:.2g}") or 1.0  # two digits, as the log may skip the peak
        rate = _Panel(bottom + 30, 80, (first, last), [0.0, top])
        shapes += rate.grid(RATE_TICKS, lambda value: f"{value:.4g}".replace("e-0", "e-"))  # 0.004, 5e-5
        shapes.append(Words(LEFT + 4, rate.top - 4, "learning rate", MUTED_COLOR))
        for color, curve in picture.rates:
            shapes += rate.line(Line(curve.thinned(MOST_POINTS), color, 1.5, marker=dots(curve)))
        bottom = rate.bottom
    for iteration in round_ticks(first, last, 8) if last > first else [first]:
        x = panel.place(iteration, panel.low)[0]
        shapes.append(Words(x, bottom + 20, f"{iteration:,g}", MUTED_COLOR, anchor="middle"))
    shapes.append(Words((LEFT + RIGHT) / 2, bottom + 40, "iteration", MUTED_COLOR, anchor="middle"))
    shapes.append(Words(RIGHT, 30, "loss, nats per token", MUTED_COLOR, anchor="end"))
    return Drawing(WIDTH, bottom + 55, shapes)
