"""The learning rate as a pure function of the iteration, so that a run can resume anywhere. Imports
no torch."""

from __future__ import annotations

import math

from megatron_lite.config import Config, LearningRateConfig
from megatron_lite.schedules.batch_size import BatchSchedule, batch_schedule
from megatron_lite.schedules.cycles import Cycle, cooldown_steps, cycle, cycle_at
from megatron_lite.schedules.stages import parse_stages, stage_rate


def learning_rate(config: Config, iteration: int, batches: BatchSchedule | None = None) -> float:
    """Return the learning rate of an iteration, counted from 1. config: resolved. batches: over all
    starts.

    The rate follows the stages of `lr_schedule`, or cycles of warmup, stable phase and decay (see
    `cycles`). The default is one cycle: a linear warmup from lr / lr_warmup to lr, then a decay to
    min_lr at iteration `lr_decay_iters` (an absolute end, not a length), and min_lr from there on.
    """
    assert iteration >= 1, iteration
    options = config.learning_rate
    step = iteration - _first_iteration(config)
    if is_constant(options):
        return options.lr * options.default_lr_scale
    if options.lr_schedule is not None:
        return stage_rate(parse_stages(options.lr_schedule), step) * options.default_lr_scale
    current, cooldown = cycle_at(options, step), cooldown_steps(options)
    beyond = step - current.start - current.length
    if cooldown and beyond >= 0:
        rate = _between(
            _at_end(config, current), _minimum(config), min(beyond, cooldown) / cooldown
        )
    else:
        rate = _in_cycle(config, current, step, batches)
    return rate * options.default_lr_scale


def peak_learning_rate(config: Config) -> float:
    """Return the peak rate of a resolved configuration's schedule."""
    options = config.learning_rate
    peak = options.lr
    if options.lr_schedule is not None:
        peak = max(max(stage.rate, stage.end_rate) for stage in parse_stages(options.lr_schedule))
    return peak * options.default_lr_scale


def is_constant(options: LearningRateConfig) -> bool:
    """Return whether every step has the peak rate."""
    moves = options.lr_schedule or options.lr_warmup or options.lr_cooldown
    return options.lr_decay_style == "constant" and not moves


def _first_iteration(config: Config) -> int:
    """Return the iteration of step 0: 0 by default (iterations count from 1), because the first
    update uses lr / warmup."""
    return 1 - config.learning_rate.lr_step_offset - config.learning_rate.lr_schedule_offset


def _minimum(config: Config) -> float:
    assert config.learning_rate.min_lr is not None, "resolved before"
    return config.learning_rate.min_lr


def _between(first: float, last: float, fraction: float) -> float:
    """Interpolate linearly from `first` to `last`, exact at both ends."""
    return last if fraction == 1.0 else first + (last - first) * fraction


def _in_cycle(config: Config, current: Cycle, step: int, batches: BatchSchedule | None) -> float:
    options = config.learning_rate
    if step < current.start + current.warmup:
        before = _at_end(config, cycle(options, current.number - 1)) if current.number else 0.0
        return before + (options.lr - before) * (step - current.start) / current.warmup
    return (
        options.lr
        if step < current.decay_start
        else _decayed(config, current, step - current.decay_start, batches)
    )


def _at_end(config: Config, finished: Cycle) -> float:
    """Return the rate one step after the decay, where a rewarmup starts."""
    return _decayed(config, finished, finished.decay)


def _decayed(
    config: Config, current: Cycle, elapsed: int, batches: BatchSchedule | None = None
) -> float:
    """Return the rate `elapsed` steps after a cycle's decay begins, also beyond its end."""
    options, peak = config.learning_rate, config.learning_rate.lr
    style, floor = options.lr_decay_style, _minimum(config)
    if style == "constant" or current.decay == 0:
        return peak
    if style == "inv_sqrt":
        factor = math.sqrt(options.lr_inv_sqrt_timescale / max(elapsed + current.warmup, 1))
        return max(floor, peak * min(1.0, factor))
    if style == "inv":  # 0 steps count as 1, so the decay's first step is already lower
        return max(floor, peak / ((peak / floor - 1.0) * max(elapsed, 1) / current.decay + 1.0))
    if style == "power_tokens":
        batches = batch_schedule(config.batch) if batches is None or batches.since else batches
        return min(peak, _power_of_tokens(config, current.decay_start, elapsed, batches))
    over = (min(elapsed, current.decay) / current.decay) ** options.lr_decay_power
    if style == "cosine":
        falling = 0.5 * (1.0 + math.cos(math.pi * over))
        return _between(floor, peak, falling**options.lr_cosine_exponent)
    # linear is power with exponent 1 unless another is given
    assert style in ("linear", "power"), style
    return _between(peak, floor, over)


def _power_of_tokens(
    config: Config, decay_start: int, elapsed: int, batches: BatchSchedule
) -> float:
    """Return batch_size * a * tokens ** b with this iteration's batch size and the tokens since the
    decay began.

    Source: Shen et al. 2024, Power Scheduler (arXiv 2408.13359).
    """
    iteration = decay_start + elapsed + _first_iteration(config)
    tokens = _tokens_before(batches, iteration) - _tokens_before(batches, iteration - elapsed)
    if tokens == 0:
        return math.inf
    batch_size = batches.batch_size(max(iteration, 1))
    return (
        batch_size
        * config.learning_rate.lr_power_a
        * float(tokens) ** config.learning_rate.lr_power_b
    )


def _tokens_before(batches: BatchSchedule, iteration: int) -> int:
    """Return the tokens before an iteration; negative before the first one, with the first batch
    size."""
    if iteration < 1:
        return (iteration - 1) * batches.consumed_tokens(1)
    return batches.consumed_tokens(iteration - 1)
