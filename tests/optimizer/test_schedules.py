"""Learning-rate schedules: values at the points that their definitions name."""

from __future__ import annotations

import math

import pytest

from megatron_lite.config import Config, LearningRateConfig
from megatron_lite.optimizer.schedules import learning_rate


def config(style: str, **options: float) -> Config:
    values = {"lr": 1e-3, "min_lr": 1e-4, "lr_warmup_iters": 10, "lr_decay_iters": 110, **options}
    return Config(learning_rate=LearningRateConfig(lr_decay_style=style, **values))  # type: ignore[arg-type]


@pytest.mark.parametrize("style", ["constant", "linear", "power", "cosine"])
def test_warmup_is_linear_from_one_part_to_the_peak(style: str) -> None:
    """The first update has lr / lr_warmup_iters, the last of the warmup lr itself."""
    for iteration in range(1, 11):
        assert learning_rate(config(style), iteration) == pytest.approx(1e-3 * iteration / 10, rel=1e-15)


def test_shapes_of_the_decay() -> None:
    """Halfway (iteration 60 of 10..110) and beyond the absolute end."""
    middle = {
        "constant": 1e-3,
        "linear": 5.5e-4,
        "cosine": 5.5e-4,
    }
    for style, expected in middle.items():
        assert learning_rate(config(style), 60) == pytest.approx(expected, rel=1e-12)
    assert learning_rate(config("power", lr_decay_power=2.0), 60) == pytest.approx(1e-4 + 9e-4 * 0.25, rel=1e-12)
    quarter = 1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi / 4))
    assert learning_rate(config("cosine"), 35) == pytest.approx(quarter, rel=1e-12)
    for style in ("linear", "power", "cosine"):
        assert learning_rate(config(style), 110) == learning_rate(config(style), 10**6) == pytest.approx(1e-4)
        assert learning_rate(config(style), 109) > 1e-4
    assert learning_rate(config("constant"), 10**6) == 1e-3


def test_the_tutorials_schedule() -> None:
    """1000 steps of warmup, then cosine from 1e-4 to 3e-6 at iteration 500000."""
    options = LearningRateConfig(
        lr=1e-4, min_lr=3e-6, lr_warmup_iters=1000, lr_decay_iters=500000, lr_decay_style="cosine"
    )
    tutorial = Config(learning_rate=options)
    values = [learning_rate(tutorial, iteration) for iteration in (1, 1000, 250500, 500000)]
    assert values == pytest.approx([1e-7, 1e-4, (1e-4 + 3e-6) / 2, 3e-6], rel=1e-9)


def test_lr_scale_applies_to_peak_and_floor_alike() -> None:
    for iteration in (1, 10, 60, 200):
        scaled = learning_rate(config("cosine", default_lr_scale=0.5), iteration)
        assert scaled == pytest.approx(learning_rate(config("cosine"), iteration) / 2)
