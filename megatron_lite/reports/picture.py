"""The picture of losses: where its lines, axes and names are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from megatron_lite.reports.drawing import Drawing, Point, Stroke, Words
from megatron_lite.reports.loss_curves import (
    FEW_POINTS,
    GRID_COLOR,
    MOST_POINTS,
    MUTED_COLOR,
    TITLE_COLOR,
    Line,
    Picture,
    describe,
    format_rate,
    highest_rate,
    lines,
    round_ticks,
)

LEFT, RIGHT, WIDTH = 70.0, 870.0, 900
LEGEND_ROW, CHARACTER = 20, 7.5  # pixels
RATE_TICKS = 5  # about


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

    def places(self, line: Line) -> list[Point]:
        points = zip(line.curve.iterations.tolist(), line.curve.values.tolist(), strict=True)
        return [self.place(*point) for point in points]

    def line(self, line: Line) -> Iterator[Stroke]:
        places = self.places(line)
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
        rate = _Panel(bottom + 30, 80, (first, last), [0.0, highest_rate(picture)])
        shapes += [*rate.grid(RATE_TICKS, format_rate), Words(LEFT + 4, rate.top - 4, "learning rate", MUTED_COLOR)]
        for color, curve in picture.rates:
            marker = "o" if len(curve) <= FEW_POINTS else ""
            shapes += rate.line(Line(curve.thinned(MOST_POINTS), color, "", 1.5, 1.0, (), marker))
        bottom = rate.bottom
    for iteration in round_ticks(first, last, 8) if last > first else [first]:
        x = panel.place(iteration, panel.low)[0]
        shapes.append(Words(x, bottom + 20, f"{iteration:,g}", MUTED_COLOR, anchor="middle"))
    shapes.append(Words((LEFT + RIGHT) / 2, bottom + 40, "iteration", MUTED_COLOR, anchor="middle"))
    shapes.append(Words(RIGHT, 30, "loss, nats per token", MUTED_COLOR, anchor="end"))
    return Drawing(WIDTH, bottom + 55, shapes)
