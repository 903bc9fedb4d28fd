"""Lines and words in pixels, written as an SVG or drawn by matplotlib into any of its formats."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

Point = tuple[float, float]
DOTS_PER_INCH = 150


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
