"""Options of the learning rate as a function of the iteration."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.option import (
    Area,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    idle_unless,
    option,
    optional,
)

DECAY_STYLES = ("constant", "linear", "cosine", "power", "inv_sqrt", "inv", "power_tokens")

# Options that have no effect unless another one has this value.
decay_option = idle_unless("lr_decay_style!=constant")
power_tokens_option = idle_unless("lr_decay_style=power_tokens")


@dataclass
class LearningRateConfig(Area):
    """Learning rate"""

    lr: NonNegativeFloat = option(1e-4, "peak learning rate", basic=True, aliases="learning_rate")
    min_lr: NonNegativeFloat | None = optional("learning rate after the decay", "min_lr_ratio * lr, or 0", basic=True)
    min_lr_ratio: NonNegativeFloat | None = optional(
        "min_lr as a fraction of lr; above 1 the learning rate rises", "see min_lr"
    )
    lr_decay_style: str = option(
        "constant", "shape of the decay (power_tokens is what Levanter calls power)", choices=DECAY_STYLES, basic=True
    )
    lr_decay_iters: PositiveInt | None = optional(
        "iteration at which the last decay or the cooldown ends; afterwards the learning rate stays constant",
        "train_iters (+ lr_schedule_offset)",
        basic=True,
    )
    lr_decay_power: PositiveFloat = option(
        1.0,
        "exponent of the elapsed fraction of a linear, power or cosine decay",
        idle_unless="lr_decay_style=linear|power|cosine",
    )
    lr_warmup_iters: NonNegativeInt = option(
        0, "linear warmup iterations, at most the first cycle; the first update uses lr / lr_warmup_iters", basic=True
    )
    lr_warmup_fraction: Fraction | None = optional("warmup as a fraction of the first cycle", "lr_warmup_iters")
    lr_wsd_decay_iters: NonNegativeInt | None = decay_option(
        None,
        "iterations of decay at the end of each cycle, after a stable phase at the peak (warmup-stable-decay); at most"
        " the cycle without its warmup",
        unset="the cycle without its warmup",
    )
    lr_wsd_decay_fraction: Fraction | None = decay_option(
        None, "lr_wsd_decay_iters as a fraction of the cycle", unset="lr_wsd_decay_iters"
    )
    lr_rewarmup_iters: NonNegativeInt = option(
        0,
        "iterations of warmup at the start of each later cycle, from the learning rate at which the decay ended; 0: "
        "jump back to the peak",
    )
    lr_rewarmup_fraction: Fraction | None = optional("rewarmup as a fraction of the cycle", "lr_rewarmup_iters")
    lr_num_cycles: PositiveInt = decay_option(
        1,
        "number of equal cycles of warmup, stable phase and decay; cycle i ends at int(T / N * i), where T is the end "
        "of the last decay (as in Levanter's code; its documentation says T / (N + 1))",
    )
    lr_cycle_minima: tuple[PositiveInt, ...] = decay_option(
        (),
        "iterations, in rising order, at which cycles end; one more cycle lasts to the end of the schedule. A run that"
        " ends inside a cycle cuts it off (80000 1000000000: stay at the peak after the second warmup if the decay is "
        "short)",
        aliases="haps",
    )
    lr_cycle_iters: PositiveInt | None = decay_option(
        None, "iterations per cycle; the last cycle also takes the remainder", unset="one cycle"
    )
    lr_cycle_fraction: float | None = decay_option(
        None, "lr_cycle_iters as a fraction of the run without the cooldown", above=0.0, maximum=1.0, unset="one cycle"
    )
    lr_cycle_lengths: tuple[PositiveInt, ...] = decay_option(
        (), "iterations of each cycle; the rest of the run forms the last cycle"
    )
    lr_cosine_exponent: PositiveFloat = option(
        1.0, "exponent of the cosine factor, which falls from 1 to 0", idle_unless="lr_decay_style=cosine"
    )
    lr_inv_sqrt_timescale: PositiveFloat = option(
        10000.0,
        "inv_sqrt: learning rate lr * sqrt(this / i), at most lr; i: iterations of the cycle without its stable phase",
        idle_unless="lr_decay_style=inv_sqrt",
    )
    lr_power_a: PositiveFloat = power_tokens_option(
        4.6,
        "power_tokens: the learning rate is batch_size * a * tokens ** b, at most lr; tokens counts from the start of "
        "the decay, and both it and batch_size follow batch_size_schedule",
    )
    lr_power_b: float = power_tokens_option(-0.51, "power_tokens: b in the formula of lr_power_a", below=0.0)
    lr_cooldown_iters: NonNegativeInt = option(
        0,
        "iterations of linear decay to min_lr at the end of the run, after all cycles; for styles that do not end at "
        "min_lr, such as constant and inv_sqrt",
    )
    lr_cooldown_fraction: Fraction | None = optional("lr_cooldown_iters as a fraction of the run", "lr_cooldown_iters")
    lr_step_offset: int = option(
        1, "1: the first update uses lr / lr_warmup_iters; 0: it uses 0, as in Levanter", minimum=0, maximum=1
    )
    lr_schedule: str | None = optional(
        'use these stages "type,iters,lr[,end_lr[,power]];..." instead of all of the above; types: constant, linear, '
        "power, cosine; power: exponent of the elapsed fraction of the stage; a last constant stage with -1 "
        "iterations lasts forever",
        "see lr_decay_style",
    )
    lr_schedule_offset: NonNegativeInt = option(0, "start N iterations into the schedule, to continue another run")
    default_lr_scale: NonNegativeFloat = option(1.0, "factor on every learning rate")
