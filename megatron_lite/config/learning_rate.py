"""Options of the learning rate as a function of the iteration."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.option import Area, option

DECAY_STYLES = ("constant", "linear", "cosine", "power", "inv_sqrt", "inv", "power_tokens")


@dataclass
class LearningRateConfig(Area):
    """Learning rate"""

    lr: float = option(1e-4, "peak learning rate", minimum=0.0, basic=True, aliases=("learning_rate",))
    min_lr: float | None = option(
        None, "learning rate at the end of the decay", minimum=0.0, unset="min_lr_ratio * lr, or 0", basic=True
    )
    min_lr_ratio: float | None = option(
        None, "the same as a fraction of lr; above 1 the rate rises", minimum=0.0, unset="see min_lr"
    )
    lr_decay_style: str = option(
        "constant",
        "shape of the decay (power is linear with lr_decay_power, power_tokens is Levanter's power)",
        choices=DECAY_STYLES,
        basic=True,
    )
    lr_decay_iters: int | None = option(
        None,
        "iteration at which the (last) decay ends, or the cooldown; later ones keep its rate",
        minimum=1,
        unset="train_iters (+ lr_schedule_offset)",
        basic=True,
    )
    lr_decay_power: float = option(
        1.0,
        "exponent on the part of a decay that is over: linear, power, cosine",
        above=0.0,
        idle_unless="lr_decay_style=linear|power|cosine",
    )
    lr_warmup_iters: int = option(
        0,
        "iterations of linear warmup, at most those of the (first) cycle; the first update uses lr / this",
        minimum=0,
        basic=True,
    )
    lr_warmup_fraction: float | None = option(
        None, "the same as a fraction of the (first) cycle", minimum=0.0, maximum=1.0, unset="lr_warmup_iters"
    )
    lr_wsd_decay_iters: int | None = option(
        None,
        "iterations of the decay at the end of each cycle, after a stable phase at the peak (warmup-stable-decay); "
        "at most what the warmup leaves",
        minimum=0,
        unset="all that the warmup leaves",
        idle_unless="lr_decay_style!=constant",
    )
    lr_wsd_decay_fraction: float | None = option(
        None,
        "the same as a fraction of the cycle",
        minimum=0.0,
        maximum=1.0,
        unset="lr_wsd_decay_iters",
        idle_unless="lr_decay_style!=constant",
    )
    lr_rewarmup_iters: int = option(
        0,
        "iterations of warmup at the beginning of each later cycle, from the rate at which the decay ended; "
        "0: a jump back to the peak",
        minimum=0,
    )
    lr_rewarmup_fraction: float | None = option(
        None, "the same as a fraction of the cycle", minimum=0.0, maximum=1.0, unset="lr_rewarmup_iters"
    )
    lr_num_cycles: int = option(
        1,
        "cycles of warmup, stable phase and decay, of equal length: the i-th ends at int(T / this * i), "
        "T the end of the last decay (Levanter's page says T / (this + 1), its code does as here)",
        minimum=1,
        idle_unless="lr_decay_style!=constant",
    )
    lr_cycle_minima: tuple[int, ...] = option(
        (),
        "cycles that end at these rising iterations, and a last one to the end; where the run ends first, the cycle "
        "goes on as if it did not (80000 1000000000: stable after the second warmup, given a short decay)",
        minimum=1,
        aliases=("haps",),
        idle_unless="lr_decay_style!=constant",
    )
    lr_cycle_iters: int | None = option(
        None,
        "iterations of a cycle; the last one takes the remainder, too, and is longer",
        minimum=1,
        unset="one cycle",
        idle_unless="lr_decay_style!=constant",
    )
    lr_cycle_fraction: float | None = option(
        None,
        "the same as a fraction of the run (without the cooldown)",
        above=0.0,
        maximum=1.0,
        unset="one cycle",
        idle_unless="lr_decay_style!=constant",
    )
    lr_cycle_lengths: tuple[int, ...] = option(
        (),
        "iterations of each cycle; what they leave of the run makes a last one",
        minimum=1,
        idle_unless="lr_decay_style!=constant",
    )
    lr_cosine_exponent: float = option(
        1.0, "exponent on the falling cosine, which goes from 1 to 0", above=0.0, idle_unless="lr_decay_style=cosine"
    )
    lr_inv_sqrt_timescale: float = option(
        10000.0,
        "inv_sqrt: the rate is lr * sqrt(this / i), at most lr, i iterations after the cycle began (a stable phase "
        "does not count)",
        above=0.0,
        idle_unless="lr_decay_style=inv_sqrt",
    )
    lr_power_a: float = option(
        4.6,
        "power_tokens: the rate is batch_size * a * tokens ** b, at most lr; batch_size that of the iteration, "
        "tokens those since the decay began, both as batch_size_schedule says",
        above=0.0,
        idle_unless="lr_decay_style=power_tokens",
    )
    lr_power_b: float = option(
        -0.51, "power_tokens: see lr_power_a", below=0.0, idle_unless="lr_decay_style=power_tokens"
    )
    lr_cooldown_iters: int = option(
        0,
        "iterations at the end of the run on a straight line to min_lr, after all cycles; for styles that have not "
        "reached it, such as constant and inv_sqrt",
        minimum=0,
    )
    lr_cooldown_fraction: float | None = option(
        None, "the same as a fraction of the run", minimum=0.0, maximum=1.0, unset="lr_cooldown_iters"
    )
    lr_step_offset: int = option(
        1, "1: the first update uses lr / lr_warmup_iters; 0: it uses 0, as in Levanter", minimum=0, maximum=1
    )
    lr_schedule: str | None = option(
        None,
        'stages "type,iters,lr[,end_lr[,power]];..." instead of all of the above: constant, linear, power or cosine, '
        "by the power of the fraction of the stage that is over; a last constant stage may have -1: for ever",
        unset="see lr_decay_style",
    )
    lr_schedule_offset: int = option(
        0, "iterations of the schedule that are over before the first update, as after another run", minimum=0
    )
    default_lr_scale: float = option(1.0, "factor on every learning rate", minimum=0.0)
