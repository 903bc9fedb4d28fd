"""Learning rate as a pure function of the iteration."""

from __future__ import annotations

import math

from megatron_lite.config import Config


def learning_rate(config: Config, iteration: int) -> float:
    """The learning rate of an iteration, counted from 1; `config` is resolved.

    Linear warmup from lr / lr_warmup_iters to lr, then the decay style down to min_lr at iteration `lr_decay_iters`
    (an absolute end, not a length), min_lr afterwards.
    """
    options = config.learning_rate
    assert options.min_lr is not None and options.lr_decay_iters is not None, "resolved before"
    peak = options.lr * options.default_lr_scale
    floor = options.min_lr * options.default_lr_scale
    if iteration <= options.lr_warmup_iters:
        return peak * iteration / options.lr_warmup_iters
    if options.lr_decay_style == "constant":
        return peak
    span = options.lr_decay_iters - options.lr_warmup_iters
    remaining = max(options.lr_decay_iters - iteration, 0) / span if span > 0 else 0.0
    if options.lr_decay_style == "cosine":
        factor = 0.5 * (1.0 - math.cos(math.pi * remaining**options.lr_decay_power))
    else:  # linear is power with exponent 1 unless another is given
        factor = remaining**options.lr_decay_power
    return floor + (peak - floor) * factor
