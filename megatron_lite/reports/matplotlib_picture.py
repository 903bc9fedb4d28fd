"""The picture of losses as matplotlib draws it."""

from __future__ import annotations

from typing import Any

from megatron_lite.reports.loss_curves import (
    FEW_POINTS,
    GRID_COLOR,
    MOST_POINTS,
    MUTED_COLOR,
    TITLE_COLOR,
    Picture,
    describe,
    format_rate,
    highest_rate,
    lines,
    round_ticks,
)

RATE_TICKS = 5  # about
MARKER_SIZES = {"": 0.0, "o": 4.0, "D": 7.0}


def draw_with_matplotlib(picture: Picture) -> Any:
    """Return a figure of the losses, with the learning rate in a small panel below."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained", facecolor="white")
    if picture.rates:
        loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [4, 1]})
        _draw_rates(rate_axes, picture)
        figure.align_ylabels()
        rate_axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_rate(value)))
    else:
        loss_axes = rate_axes = figure.subplots()
    _draw_losses(loss_axes, picture)
    columns = 4 if len(picture.runs) == 1 else 3
    figure.legend(loc="outside lower center", ncols=columns, frameon=False, labelcolor=TITLE_COLOR)
    rate_axes.set_xlabel("iteration", color=MUTED_COLOR)
    rate_axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    rate_axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10], integer=True))
    first, last = picture.iterations()
    if first == last:
        rate_axes.set_xlim(first - 1, first + 1)
    for axes in {loss_axes, rate_axes}:
        axes.grid(color=GRID_COLOR, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=MUTED_COLOR, length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.spines["bottom"].set_color(GRID_COLOR)
    return figure


def _draw_rates(axes: Any, picture: Picture) -> None:
    for color, whole in picture.rates:
        curve = whole.thinned(MOST_POINTS)
        marker = "o" if len(curve) <= FEW_POINTS else None
        axes.plot(curve.iterations, curve.values, color=color, linewidth=1.5, marker=marker, markersize=4)
        if len(picture.rates) == 1:
            axes.fill_between(curve.iterations, curve.values, color=color, alpha=0.12, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("learning rate", color=MUTED_COLOR)
    axes.set_yticks(round_ticks(0.0, highest_rate(picture), RATE_TICKS))


def _draw_losses(axes: Any, picture: Picture) -> None:
    for line in lines(picture):
        axes.plot(
            line.curve.iterations,
            line.curve.values,
            color=line.color,
            alpha=line.opacity,
            linewidth=line.width,
            linestyle=(0, line.dashes) if line.dashes else "solid",
            marker=line.marker or None,
            markersize=MARKER_SIZES[line.marker],
            markeredgecolor="white",
            label=_plain(line.label) if line.label else "_nolegend_",
        )
    for name, value in picture.baselines:
        axes.axhline(value, color=MUTED_COLOR, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{_plain(name)}: {value:.3f}",
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            color=MUTED_COLOR,
            fontsize=9,
        )
    axes.set_ylabel("loss (nats per token)", color=MUTED_COLOR)
    axes.set_title(picture.title, loc="left", fontsize=14, fontweight="bold", pad=24, parse_math=False)
    axes.annotate(
        describe(picture),
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 8),
        textcoords="offset points",
        color=MUTED_COLOR,
        fontsize=10,
    )


def _plain(text: str) -> str:
    """Return text without formulas; a label that begins with an underscore would be hidden."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")
