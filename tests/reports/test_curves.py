"""Shorter curves keep their extremes, smoother ones their mean, and a line of blocks shows the shape."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_lite.reports.series import Curve, sparkline


def curve(values: list[float]) -> Curve:
    return Curve(np.arange(len(values)), np.array(values, np.float64))


def test_a_thinned_curve_keeps_ends_and_extremes() -> None:
    """One spike among 100,000 points survives; the order stays."""
    values = np.random.default_rng(0).normal(size=100_000)
    values[54_321], values[12_345] = 100.0, -100.0
    thin = curve(list(values)).thinned(2000)
    assert 1000 < len(thin) <= 2000
    assert (np.diff(thin.iterations) > 0).all() and {0, 12_345, 54_321, 99_999} <= set(thin.iterations.tolist())
    assert (thin.values == values[thin.iterations]).all()


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_short_curve_stays(length: int) -> None:
    short = curve([1.0] * length)
    assert short.thinned(10) is short and len(short.smoothed()) == length


def test_a_smoothed_curve_has_the_plain_mean_of_its_neighbours() -> None:
    """Against means computed one by one; a straight line stays as it is."""
    values = np.random.default_rng(1).normal(size=500)
    smooth = curve(list(values)).smoothed()
    for index in (250, 100, 400):
        assert smooth.values[index] == pytest.approx(values[index - 5 : index + 6].mean())
    line = curve(list(range(300))).smoothed()
    assert line.values[10:-10] == pytest.approx(np.arange(10.0, 290.0))


def test_sparklines() -> None:
    """Eight heights, the mean of each share, blanks without a finite value."""
    ramp = np.arange(8.0)
    assert sparkline(ramp, 8) == "▁▂▃▄▅▆▇█" and sparkline(ramp, 8, unicode=False) == "_.-=+*%#"
    assert sparkline(np.arange(100.0), 4) == "▁▃▆█"
    assert sparkline(np.ones(3), 60) == "▁▁▁"
    assert sparkline(np.array([0.0, math.nan, math.inf, 7.0]), 4) == "▁  █"
    assert sparkline(np.array([math.nan] * 3), 2) == "  " and sparkline(np.array([]), 5) == ""
