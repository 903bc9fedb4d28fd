"""Options of the update: optimizer, weight decay, clipping, guards, loss scale, averages of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.option import (
    Area,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ProperFraction,
    Rule,
    WindowLength,
    idle_unless,
    option,
    optional,
)

OPTIMIZERS = ("adamw", "muon", "lion", "sgd")
DECAY_MASKS = ("fast_llm", "levanter", "off")
EMA_TYPES = ("none", "ema", "ema_decay_sqrt")

ADAMW = Rule("optimizer=adamw", "only AdamW's updates can be clipped")

# Options that have no effect unless another one has this value.
decay_option = idle_unless("weight_decay")
adam_option = idle_unless("optimizer=adamw|muon")
muon_option = idle_unless("optimizer=muon")
dynamic_scale_option = idle_unless("training_dtype=fp16 and loss_scale=none")
skip_option = idle_unless("skip_bad_steps")
ema_sqrt_option = idle_unless("ema_type=ema_decay_sqrt")


@dataclass
class OptimizerConfig(Area):
    """Optimizer"""

    optimizer: str = option(
        "adamw",
        "muon: orthogonalized momentum for the matrices of the blocks (queries, keys, values and the halves of a "
        "gated MLP separately), AdamW for everything else; lion: sign of the momentum, with adam_beta1 and "
        "adam_beta2 as betas (0.9 and 0.99 in its paper); sgd: with momentum. Changing it resets moments to zero "
        "(from adamw to muon, only those of the matrices)",
        choices=OPTIMIZERS,
        value_aliases={"adam": "adamw"},
    )
    weight_decay: NonNegativeFloat = option(
        0.01, "decoupled weight decay, for every optimizer: shrinks weights by lr * this", basic=True
    )
    weight_decay_modules: tuple[str, ...] = decay_option(
        (),
        "decay only these weights (and those of weight_decay_default_mask if given): patterns as in --freeze, any "
        "other part of a name (mlp), or regex:<expression>, which must match from the start of a name",
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
    adamc_weight_decay: bool = decay_option(False, "also scale weight decay by the learning rate over its peak (AdamC)")
    adam_beta1: ProperFraction = option(
        0.9, "decay of the first moment", basic=True, aliases="beta1", idle_unless="optimizer=adamw|muon|lion"
    )
    adam_beta2: ProperFraction = option(
        0.999, "decay of the second moment", basic=True, aliases="beta2", idle_unless="optimizer=adamw|muon|lion"
    )
    adam_eps: PositiveFloat = adam_option(1e-8, "added to the root of second moments", aliases="adam_epsilon epsilon")
    adam_nesterov: bool = adam_option(False, "use Nesterov momentum (NAdam): look one step ahead with the first moment")
    muon_momentum: ProperFraction = muon_option(0.95, "decay of Muon's momentum, a running mean of gradients")
    muon_nesterov: bool = muon_option(True, "use Nesterov momentum in Muon")
    muon_ns_steps: int = muon_option(5, "Newton-Schulz iterations to orthogonalize an update", minimum=1, maximum=100)
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
        1.0, "clip gradients to this global norm; 0: no clipping", basic=True, aliases="max_grad_norm"
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
        needs=(ADAMW,),
        excludes=(
            Rule("clip_update_norm_sigma", "updates are clipped by each parameter's root mean square or by their norm"),
        ),
    )
    clip_update_norm_sigma: PositiveFloat | None = optional(
        "clip the norm of an update to the mean + N standard deviations of recent updates", "off", needs=(ADAMW,)
    )
    clip_update_norm_window: WindowLength = option(
        128, "number of recent updates for clip_update_norm_sigma", idle_unless="clip_update_norm_sigma"
    )
    skip_bad_steps: bool = option(
        False,
        "drop updates whose loss or gradient norm is far above recent ones. Dropped spikes enter the window. NaN and "
        "infinities are always dropped and never enter it (in Levanter they do, and block every update until they "
        "leave it)",
    )
    skip_bad_steps_window: WindowLength = skip_option(
        128, "number of recent iterations for skip_bad_steps; nothing is dropped until the window is half full"
    )
    skip_bad_steps_sigma: PositiveFloat = skip_option(6.0, "drop updates above the mean + N standard deviations")
    on_bad_step: str = option(
        "skip",
        "what to do after dropping an update (by skip_bad_steps, or because it is not finite); skip: continue; abort: "
        "end the run after the next log line, or instead of the next validation or save. Overflows under a dynamic "
        "loss scale never end the run",
        choices=("skip", "abort"),
    )
    max_consecutive_bad_steps: PositiveInt = option(
        100,
        "end the run after dropping this many updates in a row, or more than half of the run's: at the next log line, "
        "validation, export or save. Overflows that lower a dynamic loss scale do not count",
        idle_unless="on_bad_step!=abort or training_dtype=fp16",
    )
    crash_on_nan: bool = option(
        False, "with on_bad_step=skip: abort if loss or gradient was NaN", idle_unless="on_bad_step!=abort"
    )
    crash_on_inf: bool = option(
        False, "with on_bad_step=skip: abort if loss or gradient was infinite", idle_unless="on_bad_step!=abort"
    )
    lr_scales: tuple[str, ...] = option(
        (), "scale learning rates by pattern:scale, as in embedding:0.1 *.bias:2; the last match counts, 0 freezes"
    )
    freeze: tuple[str, ...] = option((), "freeze weights whose names match these patterns (blocks.0, *.bias)")
    loss_scale: float | None = optional(
        "constant loss scale", "dynamic for fp16, 1 otherwise", minimum=2.0**-100, maximum=2.0**100
    )
    initial_loss_scale: float = dynamic_scale_option(
        2.0**16, "initial dynamic loss scale (fp16)", minimum=2.0**-100, maximum=2.0**100
    )
    min_loss_scale: float = dynamic_scale_option(1.0, "smallest loss scale (fp16)", minimum=2.0**-100, maximum=2.0**100)
    loss_scale_window: PositiveInt = dynamic_scale_option(1000, "good updates before the loss scale doubles (fp16)")
    hysteresis: PositiveInt = dynamic_scale_option(2, "overflows before the loss scale halves (fp16)")


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
    ema_switch_iter: int = ema_sqrt_option(
        100_000, "ema_decay_sqrt: iterations of the uniform phase, from the start of averaging", minimum=0
    )
    ema_decay_iters: PositiveInt = ema_sqrt_option(
        100_000, "ema_decay_sqrt: iterations of the last phase; then the average is constant"
    )

    @property
    def enabled(self) -> bool:
        return self.ema_type != "none"
