"""The rolling statistics are those of NumPy over a plain list of the same values."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from megatron_lite.optimizer.rolling import RollingStatistics

CPU = torch.device("cpu")


def expected(history: list[list[float]], window: int, sigma: float) -> np.ndarray:
    """mean + sigma * std over the newest `window` rows, infinite before half of them are there."""
    if len(history) < max(2, window // 2):
        return np.full(2, np.inf)
    rows = np.array(history[-window:])
    return rows.mean(0) + sigma * np.maximum(rows.std(0, ddof=0), 1e-6)


@pytest.mark.parametrize("window, sigma", [(2, 1.0), (3, 6.0), (7, 0.5), (128, 6.0)])
def test_thresholds_are_those_of_a_plain_list(window: int, sigma: float) -> None:
    """Before and after the window is full; values that are kept out, NaN among them, leave no trace."""
    generator = np.random.default_rng(window)
    statistics, history = RollingStatistics(window, sigma, CPU, width=2), []
    for _ in range(3 * window):
        assert statistics.threshold().numpy() == pytest.approx(expected(history, window, sigma), rel=1e-12)
        values, kept = generator.normal([10.0, 1e-3], [0.1, 1e4]), bool(generator.random() < 0.8)
        statistics.add(torch.tensor(values if kept else [np.nan, 1.0], dtype=torch.float64), torch.tensor(kept))
        history += [values.tolist()] if kept else []
    assert statistics.state() == history[-window:]


def test_equal_values_keep_a_margin() -> None:
    """The standard deviation is at least 1e-6, and its rounding is far below that for values of any size."""
    for value in (0.0, 3.0, 1e5):
        statistics = RollingStatistics(10, 6.0, CPU)
        for _ in range(10):
            statistics.add(torch.tensor([value], dtype=torch.float64), torch.tensor(True))
        assert statistics.threshold().item() - value == pytest.approx(6e-6, rel=1e-4)


@pytest.mark.parametrize("seen", [0, 1, 4, 9])
@pytest.mark.parametrize("window", [2, 4, 6])
def test_state_goes_through_json(seen: int, window: int) -> None:
    """Bit for bit into the same window; into a larger or smaller one the newest values that fit. Then what comes
    pushes out the oldest, and nothing before the window is full.
    """
    values = np.random.default_rng(seen).normal(size=(seen, 2)).tolist()
    first, second, whole = (RollingStatistics(4, 3.0, CPU, 2), RollingStatistics(window, 3.0, CPU, 2), values[-4:])
    for row in values:
        first.add(torch.tensor(row, dtype=torch.float64), torch.tensor(True))
        second.add(torch.tensor([7.0, 7.0], dtype=torch.float64), torch.tensor(True))
    second.load_state(json.loads(json.dumps(first.state())))
    assert second.state() == whole[-window:]
    assert second.threshold().numpy() == pytest.approx(expected(whole[-window:], window, 3.0), rel=1e-12)
    for row in np.random.default_rng(10 + seen).normal(size=(7, 2)).tolist():
        if window == 4:
            assert torch.equal(first.threshold(), second.threshold())
        whole.append(row)
        for statistics in (first, second):
            statistics.add(torch.tensor(row, dtype=torch.float64), torch.tensor(True))
        assert second.state() == whole[-window:]
