"""Options of the learning rate as a function of the iteration."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.option import option

DECAY_STYLES = ("constant", "linear", "cosine", "power", "inv_sqrt", "inv", "power_tokens")


@dataclass(frozen=True)
class LearningRateConfig:
    """Learning rate"""

    lr: float = option(1e-4, "peak learning rate", minimum=0.0, basic=True, aliases=("learning_rate",))
    min_lr: float | None = option(
        None, "learning rate at the end of the decay", minimum=0.0, unset="min_lr_ratio * lr, or 0", basic=True
    )
    min_lr_ratio: float | None = option(None, "the same as a fraction of lr", minimum=0.0, unset="see min_lr")
    lr_decay_style: str = option("constant", "shape of the decay", choices=DECAY_STYLES, basic=True)
    lr_decay_iters: int | None = option(
        None, "iteration at which the (last) decay ends", minimum=1, unset="train_iters", basic=True
    )
    lr_decay_power: float = option(
        1.0, "exponent on the remaining fraction of a decay (linear, power, cosine)", above=0.0
    )
    lr_warmup_iters: int = option(
        0, "iterations of linear warmup; the first update uses lr / this", minimum=0, basic=True
    )
    lr_warmup_fraction: float | None = option(
        None, "the same as a fraction of the (first) cycle", minimum=0.0, maximum=1.0, unset="lr_warmup_iters"
    )
    lr_wsd_decay_iters: int | None = option(
        None,
        "iterations of the decay at the end of each cycle, after a stable phase at the peak (warmup-stable-decay)",
        minimum=0,
        unset="all that the warmup leaves",
    )
    lr_wsd_decay_fraction: float | None = option(
        None, "the same as a fraction of the cycle", minimum=0.0, maximum=1.0, unset="lr_wsd_decay_iters"
    )
    lr_rewarmup_iters: int = option(
        0, "iterations of warmup at the beginning of each later cycle; 0: a jump back to the peak", minimum=0
    )
    lr_rewarmup_fraction: float | None = option(
        None, "the same as a fraction of the cycle", minimum=0.0, maximum=1.0, unset="lr_rewarmup_iters"
    )
    lr_num_cycles: int = option(1, "cycles of warmup, stable phase and decay, of equal length", minimum=1)
    lr_cycle_minima: tuple[int, ...] = option(
        (), "cycles that end at these iterations, and a last one to the end", minimum=1, aliases=("haps",)
    )
    lr_cycle_iters: int | None = option(
        None, "iterations of a cycle; the last one takes the rest, too", minimum=1, unset="one cycle"
    )
    lr_cycle_fraction: float | None = option(
        None, "the same as a fraction of the run", above=0.0, maximum=1.0, unset="one cycle"
    )
    lr_cycle_lengths: tuple[int, ...] = option(
        (), "iterations of each cycle; what is left makes a last one", minimum=1
    )
    lr_cosine_exponent: float = option(1.0, "exponent on the falling cosine, which goes from 1 to 0", above=0.0)
    lr_inv_sqrt_timescale: float = option(
        10000.0, "inv_sqrt: iterations t of lr * sqrt(t / iteration), which falls from there on", above=0.0
    )
    lr_power_a: float = option(4.6, "power_tokens: a of batch_size * a * tokens ** b", above=0.0)
    lr_power_b: float = option(-0.51, "power_tokens: b of batch_size * a * tokens ** b", below=0.0)
    lr_cooldown_iters: int = option(0, "iterations at the end of the run down to min_lr, after all cycles", minimum=0)
    lr_cooldown_fraction: float | None = option(
        None, "the same as a fraction of the run", minimum=0.0, maximum=1.0, unset="lr_cooldown_iters"
    )
    lr_step_offset: int = option(
        1, "1: the first update uses lr / lr_warmup_iters; 0: it uses 0, as in Levanter", minimum=0, maximum=1
    )
    lr_schedule: str | None = option(
        None, 'stages "type,iters,lr[,end_lr[,power]];..." instead of all of the above', unset="see lr_decay_style"
    )
    lr_schedule_offset: int = option(0, "iterations of lr_schedule that are over before the first update", minimum=0)
    default_lr_scale: float = option(1.0, "factor on every learning rate", minimum=0.0)
