"""Options of the update: learning rate, optimizer, weight decay, clipping, guards, loss scale,
weight averages."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.option import (
    Area,
    LossScale,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    Rule,
    Share,
    WindowLength,
    idle_unless,
    option,
    optional,
)

DECAY_STYLES = ("constant", "linear", "cosine", "power", "inv_sqrt", "inv", "power_tokens")
OPTIMIZERS = ("adamw", "muon", "lion", "sgd")
DECAY_MASKS = ("fast_llm", "levanter", "off")
EMA_TYPES = ("none", "ema", "ema_decay_sqrt")

ADAMW = (Rule("optimizer=adamw", "only AdamW's updates can be clipped"),)

# Options that have no effect unless another one has this value.
lr_decay_option = idle_unless("lr_decay_style!=constant")
power_tokens_option = idle_unless("lr_decay_style=power_tokens")
decay_option = idle_unless("weight_decay")
beta_option = idle_unless("optimizer=adamw|muon|lion")
adam_option = idle_unless("optimizer=adamw|muon")
muon_option = idle_unless("optimizer=muon")
dynamic_scale_option = idle_unless("training_dtype=fp16 and loss_scale=none")
skip_option = idle_unless("skip_bad_steps")
crash_option = idle_unless("on_bad_step!=abort")
ema_sqrt_option = idle_unless("ema_type=ema_decay_sqrt")


@dataclass
class LearningRateConfig(Area):
    """Learning rate"""

    lr: NonNegativeFloat = option(1e-4, "peak learning rate", basic=True, aliases="learning_rate")
    min_lr: NonNegativeFloat | None = optional(
        "learning rate after the decay", "min_lr_ratio * lr, or 0", basic=True
    )
    min_lr_ratio: NonNegativeFloat | None = optional(
        "min_lr as a fraction of lr; above 1 the learning rate rises", "see min_lr"
    )
    lr_decay_style: str = option(
        "constant",
        "shape of the decay (power_tokens is Levanter's power)",
        choices=DECAY_STYLES,
        basic=True,
    )
    lr_decay_iters: PositiveInt = optional(
        "iteration at which the last decay or the cooldown ends; the learning rate is constant from then on",
        "train_iters (+ lr_schedule_offset)",
        basic=True,
    )
    lr_decay_power: PositiveFloat = option(
        1.0,
        "exponent of the elapsed fraction of a linear, power or cosine decay",
        idle_unless="lr_decay_style=linear|power|cosine",
    )
    lr_warmup: NonNegativeInt | Share = option(
        0,
        "iterations of linear warmup, or their share of the first cycle, to which they are cut; the first update uses "
        "lr / lr_warmup",
        aliases="lr_warmup_iters lr_warmup_fraction",
        basic=True,
    )
    lr_wsd_decay: NonNegativeInt | Share | None = lr_decay_option(
        None,
        "iterations of decay at the end of each cycle, or their share of it, after a stable phase at the peak "
        "(warmup-stable-decay)",
        unset="the cycle without its warmup",
        aliases="lr_wsd_decay_iters lr_wsd_decay_fraction",
    )
    lr_rewarmup: NonNegativeInt | Share = option(
        0,
        "iterations of warmup at the start of each later cycle, or their share of it, from the last decayed rate; 0: "
        "jump to the peak",
        aliases="lr_rewarmup_iters lr_rewarmup_fraction",
    )
    lr_num_cycles: PositiveInt = lr_decay_option(
        1,
        "number of equal cycles of warmup, stable phase and decay; cycle i ends at int(T / N * i), where T is the end "
        "of the last decay (as in Levanter's code; its documentation says T / (N + 1))",
    )
    lr_cycle_minima: tuple[PositiveInt, ...] = lr_decay_option(
        (),
        "iterations at which cycles end, in ascending order; one more cycle lasts until the end of the schedule. A "
        "minimum beyond the run leaves its cycle unfinished (80000 1000000000 stays at the peak after the second "
        "warmup if the decay is short)",
        aliases="haps",
    )
    lr_cycle: PositiveInt | Share | None = lr_decay_option(
        None,
        "iterations per cycle, or their share of the run without the cooldown; the last cycle also takes the remainder",
        unset="one cycle",
        aliases="lr_cycle_iters lr_cycle_fraction",
    )
    lr_cycle_lengths: tuple[PositiveInt, ...] = lr_decay_option(
        (), "iterations of each cycle; the rest of the run forms the last cycle"
    )
    lr_cosine_exponent: PositiveFloat = option(
        1.0,
        "exponent of the cosine factor, which falls from 1 to 0",
        idle_unless="lr_decay_style=cosine",
    )
    lr_inv_sqrt_timescale: PositiveFloat = option(
        10000.0,
        "inv_sqrt: learning rate lr * sqrt(this / i), at most lr; i: iterations of the cycle without its stable phase",
        idle_unless="lr_decay_style=inv_sqrt",
    )
    lr_power_a: PositiveFloat = power_tokens_option(
        4.6,
        "power_tokens: learning rate batch_size * a * tokens ** b, at most lr; tokens are counted from the start of "
        "the decay, and follow batch_size_schedule, as batch_size does",
    )
    lr_power_b: float = power_tokens_option(
        -0.51, "power_tokens: b in the formula of lr_power_a", below=0.0
    )
    lr_cooldown: NonNegativeInt | Share = option(
        0,
        "iterations of linear decay to min_lr at the end of the run, or their share of it, after all cycles; for "
        "styles that do not end at min_lr, such as constant and inv_sqrt",
        aliases="lr_cooldown_iters lr_cooldown_fraction",
    )
    lr_step_offset: int = option(
        1,
        "1: the first update uses lr / lr_warmup; 0: it uses 0, as in Levanter",
        minimum=0,
        maximum=1,
    )
    lr_schedule: str | None = optional(
        'schedule as stages "type,iters,lr[,end_lr[,power]];...", instead of the options above; types: constant, '
        "linear, power, cosine; power: exponent of the elapsed fraction of the stage; -1 iterations: a last constant "
        "stage without end",
        "see lr_decay_style",
    )
    lr_schedule_offset: NonNegativeInt = option(
        0, "start N iterations into the schedule, to continue another run"
    )
    default_lr_scale: NonNegativeFloat = option(1.0, "factor on every learning rate")


@dataclass
class OptimizerConfig(Area):
    """Optimizer"""

    optimizer: str = option(
        "adamw",
        "muon: orthogonalized momentum for the matrices of the blocks (queries, keys, values and the halves of a "
        "gated MLP separately), AdamW for the rest; lion: sign of the momentum, with betas adam_beta1 and adam_beta2 "
        "(0.9 and 0.99 in the paper); sgd: with momentum. A change resets the moments (adamw to muon: only those of "
        "the matrices)",
        choices=OPTIMIZERS,
        value_aliases={"adam": "adamw"},
    )
    weight_decay: NonNegativeFloat = option(
        0.01, "decoupled weight decay: shrinks weights by lr * this", basic=True
    )
    weight_decay_modules: tuple[str, ...] = decay_option(
        (),
        "decay only these weights (and those of weight_decay_default_mask if given): patterns as in --freeze, any "
        "other part of a name (mlp), or regex:<expression>, matched from the start of a name",
        excludes=(
            Rule(
                "weight_decay_default_mask=off",
                "without a mask all weights decay, whatever the patterns select",
                fix="leave weight_decay_default_mask out to decay only what they select, or weight_decay_modules to "
                "decay everything",
            ),
        ),
    )
    weight_decay_default_mask: str | None = decay_option(
        None,
        "weights to decay, in addition to weight_decay_modules (fast_llm: all but norms and biases; levanter: all "
        "but norms, biases and embeddings, a tied head included; off: all)",
        choices=DECAY_MASKS,
        unset="fast_llm, or only weight_decay_modules",
    )
    adamc_weight_decay: bool = decay_option(
        False, "also scale weight decay by the learning rate over its peak (AdamC)"
    )
    adam_beta1: ProperFraction = beta_option(
        0.9, "decay of the first moment", basic=True, aliases="beta1"
    )
    adam_beta2: ProperFraction = beta_option(
        0.999, "decay of the second moment", basic=True, aliases="beta2"
    )
    adam_eps: PositiveFloat = adam_option(
        1e-8, "added to the root of second moments", aliases="adam_epsilon epsilon"
    )
    adam_nesterov: bool = adam_option(False, "use Nesterov momentum (NAdam)")
    muon_momentum: ProperFraction = muon_option(
        0.95, "decay of Muon's momentum, a running mean of gradients"
    )
    muon_nesterov: bool = muon_option(True, "use Nesterov momentum in Muon")
    muon_ns_steps: int = muon_option(
        5, "Newton-Schulz iterations to orthogonalize an update", minimum=1, maximum=100
    )
    muon_adjust_lr: str = muon_option(
        "match_rms_adamw",
        "learning-rate factor of an (m, n) matrix; match_rms_adamw: 0.2 * sqrt(max(m, n)), which fits AdamW's learning"
        " rate and weight decay; original: sqrt(max(1, m / n)), for learning rates of about 0.02 (scale those of other"
        " weights with lr_scales)",
        choices=("match_rms_adamw", "original"),
    )
    sgd_momentum: ProperFraction = option(
        0.9, "decay of SGD's momentum, a running sum of gradients", idle_unless="optimizer=sgd"
    )
    clip_grad: NonNegativeFloat = option(
        1.0,
        "clip gradients to this global norm; 0: no clipping",
        basic=True,
        aliases="max_grad_norm",
    )
    clip_grad_style: str = option(
        "torch",
        "factor on gradients; torch: min(1, clip_grad / (norm + 1e-6)); levanter: min(1, clip_grad / norm)",
        choices=("torch", "levanter"),
        idle_unless="clip_grad",
    )
    update_rms_clip: PositiveFloat | None = optional(
        "clip the RMS of each parameter's update, before the learning rate",
        "off",
        aliases="update_rms_clipping",
        needs=ADAMW,
        excludes=(
            Rule("clip_update_norm_sigma", "updates are clipped by RMS or by norm, not by both"),
        ),
    )
    clip_update_norm_sigma: PositiveFloat | None = optional(
        "clip the norm of an update to the mean + N standard deviations of recent updates",
        "off",
        needs=ADAMW,
    )
    clip_update_norm_window: WindowLength = option(
        128,
        "number of recent updates for clip_update_norm_sigma",
        idle_unless="clip_update_norm_sigma",
    )
    skip_bad_steps: bool = option(
        False,
        "drop updates whose loss or gradient norm is far above recent ones. Dropped spikes enter the window. NaN and "
        "infinities are always dropped and never enter it (in Levanter they do, and block every update until they "
        "leave it)",
    )
    skip_bad_steps_window: WindowLength = skip_option(
        128,
        "number of recent iterations for skip_bad_steps; nothing is dropped until the window is half full",
    )
    skip_bad_steps_sigma: PositiveFloat = skip_option(
        6.0, "drop updates above the mean + N standard deviations"
    )
    on_bad_step: str = option(
        "skip",
        "action after dropping an update (by skip_bad_steps, or because it is not finite); skip: continue; abort: end "
        "the run after the next log line, or instead of the next validation or save. Overflows under a dynamic loss "
        "scale never end the run",
        choices=("skip", "abort"),
    )
    max_consecutive_bad_steps: PositiveInt = option(
        100,
        "end the run after dropping this many updates in a row, or more than half of the run's: at the next log line, "
        "validation, export or save. Overflows that lower a dynamic loss scale do not count",
        idle_unless="on_bad_step!=abort or training_dtype=fp16",
    )
    crash_on_nan: bool = crash_option(
        False, "with on_bad_step=skip: abort if loss or gradient was NaN"
    )
    crash_on_inf: bool = crash_option(
        False, "with on_bad_step=skip: abort if loss or gradient was infinite"
    )
    lr_scales: tuple[str, ...] = option(
        (),
        "scale learning rates by pattern:scale, as in embedding:0.1 *.bias:2; the last match wins, 0 freezes",
    )
    mlp_lr_scale: NonNegativeFloat | None = optional(
        "factor on the learning rate of MLPs and experts; lr_scales and freeze count more", "1"
    )
    router_lr_scale: NonNegativeFloat | None = optional(
        "factor on the learning rate of routers of experts; lr_scales and freeze count more",
        "1",
        idle_unless="num_experts!=1",
    )
    freeze: tuple[str, ...] = option(
        (), "freeze weights whose names match these patterns (blocks.0, *.bias)"
    )
    loss_scale: LossScale | None = optional("constant loss scale", "dynamic for fp16, 1 otherwise")
    initial_loss_scale: LossScale = dynamic_scale_option(
        2.0**16, "initial dynamic loss scale (fp16)"
    )
    min_loss_scale: LossScale = dynamic_scale_option(1.0, "smallest loss scale (fp16)")
    loss_scale_window: PositiveInt = dynamic_scale_option(
        1000, "good updates before the loss scale doubles (fp16)"
    )
    hysteresis: PositiveInt = dynamic_scale_option(
        2, "overflows before the loss scale halves (fp16)"
    )


@dataclass
class AveragingConfig(Area):
    """Average of the weights"""

    ema_type: str = option(
        "none",
        "average the weights; ema: exponentially; ema_decay_sqrt: uniformly, then, from ema_switch_iter on, weighted "
        "by 1 - sqrt(progress) (Levanter's formulas, which its own trainer cannot run)",
        choices=EMA_TYPES,
        aliases="model_averaging",
    )
    ema_beta: ProperFraction = option(0.999, "decay of the average", idle_unless="ema_type!=none")
    ema_switch_iter: NonNegativeInt = ema_sqrt_option(
        100_000, "ema_decay_sqrt: iterations of the uniform phase, from the start of averaging"
    )
    ema_decay_iters: PositiveInt = ema_sqrt_option(
        100_000, "ema_decay_sqrt: iterations of the last phase; then the average is constant"
    )

    @property
    def enabled(self) -> bool:
        return self.ema_type != "none"
