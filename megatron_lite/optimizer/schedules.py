"""Learning rate as a pure function of the iteration."""

from __future__ import annotations

import math

from megatron_lite.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, iteration: int) -> float:
    """The learning rate of an iteration, counted from 1.

    Linear warmup from lr / lr_warmup_iters to lr, then the decay style down to min_lr at iteration `lr_decay_iters`
    (an absolute end, not a length), min_lr afterwards.
    """
    peak = config.lr * config.default_lr_scale
    floor = config.min_lr * config.default_lr_scale
    if iteration <= config.lr_warmup_iters:
        return peak * iteration / config.lr_warmup_iters
    if config.lr_decay_style == "constant":
        return peak
    assert config.lr_decay_iters is not None
    span = config.lr_decay_iters - config.lr_warmup_iters
    remaining = max(config.lr_decay_iters - iteration, 0) / span if span > 0 else 0.0
    if config.lr_decay_style == "cosine":
        factor = 0.5 * (1.0 - math.cos(math.pi * remaining**config.lr_decay_power))
    else:  # linear is power with exponent 1 unless another is given
        factor = remaining**config.lr_decay_power
    return floor + (peak - floor) * factor
