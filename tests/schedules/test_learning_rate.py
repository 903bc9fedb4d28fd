"""Learning-rate schedules: values at the points that their definitions name."""

import dataclasses
import math
from typing import Any

import pytest

from megatron_lite.config import BatchConfig, Config, LearningRateConfig
from megatron_lite.schedules.learning_rate import learning_rate, peak_learning_rate


def config(style: str, **options: Any) -> Config:
    values = {"lr": 1e-3, "min_lr": 1e-4, "lr_warmup": 10, "lr_decay_iters": 110, **options}
    return Config(learning_rate=LearningRateConfig(lr_decay_style=style, **values))  # type: ignore[arg-type]


@pytest.mark.parametrize("style", ["constant", "linear", "power", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 7, 10])
def test_plain_schedules_are_fast_llms(style: str, warmup: int) -> None:
    """One warmup and one decay, by the formulas of Fast-LLM (learning_rate.py): exactly lr and
    min_lr at the ends."""
    options = config(style, lr_warmup=warmup, lr_decay_power=1.7, lr=3e-4, min_lr=1.9e-5)
    for iteration in range(1, 130):
        over = max(0.0, min(iteration, 110) - warmup) / (110 - warmup)
        fallen = {"constant": 0.0, "cosine": 0.5 * (1.0 - math.cos(math.pi * over**1.7))}.get(
            style, over**1.7
        )
        expected = 3e-4 + fallen * (1.9e-5 - 3e-4)
        if iteration <= warmup:
            expected = 3e-4 * iteration / warmup
        assert learning_rate(options, iteration) == pytest.approx(expected, rel=1e-14)
    assert learning_rate(options, warmup or 1) == (
        3e-4 if warmup else pytest.approx(3e-4, rel=0.02)
    )
    assert (
        learning_rate(options, 110)
        == learning_rate(options, 10**6)
        == (3e-4 if style == "constant" else 1.9e-5)
    )


def tokens(**options: float) -> Config:
    """power_tokens with 512 samples of 4096 tokens, which decay from iteration 10 on."""
    return dataclasses.replace(
        config("power_tokens", lr=0.1, min_lr=0.0, lr_decay_iters=10**6, **options),
        batch=BatchConfig(batch_size=512, sequence_length=4096),
    )


def test_power_of_tokens() -> None:
    """batch_size * a * tokens ** b with the tokens since the decay began, at most lr; there is no
    minimum.

    Levanter counts tokens in 32 bits: beyond 2 ** 31, here 1024 iterations, it has negative ones.
    """
    assert learning_rate(tokens(), 10) == learning_rate(tokens(), 1) * 10 == 0.1
    for elapsed in (1, 100, 1023, 1025, 10**5, 2 * 10**6):
        expected = min(0.1, 512 * 4.6 * float(elapsed * 512 * 4096) ** -0.51)
        assert learning_rate(tokens(), 10 + elapsed) == pytest.approx(expected, rel=1e-12), elapsed
    assert learning_rate(tokens(lr_power_a=1.0, lr_power_b=-1.0), 20) == pytest.approx(
        1 / (10 * 4096), rel=1e-12
    )


def test_power_of_tokens_in_later_cycles() -> None:
    """Each cycle counts its own tokens; a rewarmup begins where the formula stood at the end of the
    cycle before."""
    cycles = tokens(lr_cycle_minima=(1000,), lr_rewarmup=50)
    end = 512 * 4.6 * float(990 * 512 * 4096) ** -0.51
    assert learning_rate(cycles, 1000) == pytest.approx(end, rel=1e-12)
    assert learning_rate(cycles, 1025) == pytest.approx((end + 0.1) / 2, rel=1e-12)
    assert learning_rate(cycles, 1050 + 600) == learning_rate(tokens(), 10 + 600) < 0.1


def test_power_of_tokens_with_a_batch_schedule() -> None:
    """The tokens are those that were trained on, whatever the sizes of their batches; the factor is
    today's size."""
    batch = BatchConfig(
        batch_size=64, batch_size_schedule=("0:32", "20:64", "300:512"), sequence_length=4096
    )
    config = dataclasses.replace(tokens(lr_power_a=1.0), batch=batch)
    for iteration, size in ((19, 32), (20, 32), (21, 64), (300, 64), (301, 512), (5000, 512)):
        trained = (
            sum(32 if past <= 20 else 64 if past <= 300 else 512 for past in range(10, iteration))
            * 4096
        )
        expected = min(0.1, size * float(trained) ** -0.51)
        assert learning_rate(config, iteration) == pytest.approx(expected, rel=1e-12), iteration
    assert learning_rate(config, 21) < 0.1


def test_peak_of_a_schedule() -> None:
    """AdamC divides by the peak: lr, or the highest rate of the stages, times the scale of all
    rates."""
    assert peak_learning_rate(config("cosine", default_lr_scale=0.5)) == 5e-4
    stages = Config(
        learning_rate=LearningRateConfig(lr_schedule="linear,5,0,2;cosine,5,2,1;linear,5,1,3")
    )
    assert peak_learning_rate(stages) == 3.0
