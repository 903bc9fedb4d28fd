"""The picture of losses as an SVG, for machines without matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from megatron_lite.reports.curves import Curve
from megatron_lite.reports.loss_curves import (
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

    def place(self, iteration: float, value: float) -> tuple[float, float]:
        across = (iteration - self.x_low) / ((self.x_high - self.x_low) or 1)
        up = (value - self.low) / (self.high - self.low)
        return LEFT + across * (RIGHT - LEFT), self.bottom - up * (self.bottom - self.top)

    def line(self, line: Line) -> str:
        points = zip(line.curve.iterations.tolist(), line.curve.values.tolist(), strict=True)
        places = [self.place(*point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dashes = f' stroke-dasharray="{" ".join(map(str, line.dashes))}"' if line.dashes else ""
        drawn = (
            f'<polyline points="{path}" fill="none" stroke="{line.color}" stroke-width="{line.width}" '
            f'stroke-opacity="{line.opacity}" stroke-linejoin="round"{dashes}/>'
        )
        return drawn + "".join(_mark(line.marker, x, y, line.color) for x, y in places if line.marker)

    def grid(self, num_lines: int, form: Callable[[float], str] = "{:g}".format) -> str:
        parts = []
        for value in round_ticks(self.low, self.high, num_lines):
            y = self.place(self.x_low, value)[1]
            parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID_COLOR}"/>')
            parts.append(_text(LEFT - 8, y + 4, form(value), anchor="end"))
        return "".join(parts)


def _mark(marker: str, x: float, y: float, color: str) -> str:
    if marker == "D":
        corners = f"{x:.1f},{y - 5:.1f} {x + 5:.1f},{y:.1f} {x:.1f},{y + 5:.1f} {x - 5:.1f},{y:.1f}"
        return f'<polygon points="{corners}" fill="{color}"/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>'


def _text(x: float, y: float, text: str, size: int = 12, color: str = MUTED_COLOR, anchor: str = "start") -> str:
    """Return one line of text."""
    weight = "bold" if size > 14 else "normal"
    # XML knows no control characters, not even escaped ones.
    clean = "".join(char if char.isprintable() else "?" for char in text)
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{color}" '
        f'text-anchor="{anchor}">{escape(clean)}</text>'
    )


def _legend(picture: Picture, top: float) -> tuple[str, float]:
    """Return the legend, in as many rows as it takes, and the place below it."""
    parts, x, y = [], LEFT, top
    for line in lines(picture):
        width = len(line.label) * CHARACTER + 45
        if not line.label:
            continue
        if x > LEFT and x + width > RIGHT:
            x, y = LEFT, y + LEGEND_ROW
        parts.append(f'<line x1="{x}" x2="{x + 20}" y1="{y - 4}" y2="{y - 4}" stroke="{line.color}" stroke-width="3"/>')
        parts.append(_text(x + 26, y, line.label, 13, line.color))
        x += width
    return "".join(parts), y + LEGEND_ROW / 2


def draw_svg(picture: Picture) -> str:
    """Return the picture."""
    first, last = picture.iterations()
    legend, top = _legend(picture, 76)
    losses = [*lines(picture)]
    values = [float(value) for line in losses for value in (line.curve.values.min(), line.curve.values.max())]
    panel = _Panel(top, 330, (first, last), [*values, *(value for _, value in picture.baselines)])
    parts = [_text(LEFT, 30, picture.title, 18, TITLE_COLOR), _text(LEFT, 52, describe(picture)), legend, panel.grid(6)]
    for name, value in picture.baselines:
        y = panel.place(0, value)[1]
        style = f'stroke="{MUTED_COLOR}" stroke-dasharray="6 4"'
        parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" {style}/>')
        parts.append(_text(RIGHT - 4, y - 5, f"{name}: {value:.3f}", anchor="end"))
    parts += [panel.line(line) for line in losses]
    bottom = panel.bottom
    if picture.rates:
        rate = _Panel(bottom + 30, 80, (first, last), [0.0, highest_rate(picture)])
        parts += [rate.grid(RATE_TICKS, format_rate), _text(LEFT + 4, rate.top - 4, "learning rate")]
        parts += [rate.line(_rate_line(color, curve)) for color, curve in picture.rates]
        bottom = rate.bottom
    for iteration in round_ticks(first, last, 8) if last > first else [first]:
        parts.append(_text(panel.place(iteration, 0)[0], bottom + 20, f"{iteration:,g}", anchor="middle"))
    parts.append(_text((LEFT + RIGHT) / 2, bottom + 40, "iteration", anchor="middle"))
    height = bottom + 55
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" '
        f'height="{height:.0f}" font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _rate_line(color: str, curve: Curve) -> Line:
    return Line(curve.thinned(MOST_POINTS), color, "", 1.5, 1.0, (), "")
