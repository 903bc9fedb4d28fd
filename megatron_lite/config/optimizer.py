"""Options of the update: optimizer, weight decay, clipping, guards, loss scale, averages of the weights."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.option import Area, option

OPTIMIZERS = ("adamw", "muon", "lion", "sgd")
DECAY_MASKS = ("fast_llm", "levanter", "off")
EMA_TYPES = ("none", "ema", "ema_decay_sqrt")


@dataclass
class OptimizerConfig(Area):
    """Optimizer"""

    optimizer: str = option(
        "adamw",
        "muon: orthogonalized momentum for the matrices of the blocks (queries, keys, values and the halves of a gated "
        "MLP each by itself), AdamW for everything else; lion: sign of the momentum, betas are adam_beta1 and "
        "adam_beta2 (0.9 and 0.99 in its paper); sgd: with momentum. A change of it starts moments at zero (from adamw "
        "to muon those of the matrices)",
        choices=OPTIMIZERS,
        value_aliases={"adam": "adamw"},
    )
    weight_decay: float = option(
        0.01, "decoupled weight decay: weights shrink by lr * this, with every optimizer", minimum=0.0, basic=True
    )
    weight_decay_modules: tuple[str, ...] = option(
        (),
        "weights that decay, and no others unless weight_decay_default_mask is given: patterns as of --freeze, any "
        "other part of a name (mlp), or regex:<expression>, which must match from the beginning of a name",
        idle_unless="weight_decay",
    )
    weight_decay_default_mask: str | None = option(
        None,
        "weights that decay (beside weight_decay_modules: as well): fast_llm: all but norms and biases; levanter: all "
        "but norms, biases and embeddings, of which a tied head is one; off: all",
        choices=DECAY_MASKS,
        unset="fast_llm, or just weight_decay_modules",
        idle_unless="weight_decay",
    )
    adamc_weight_decay: bool = option(
        False,
        "weight decay in proportion to the learning rate over its peak (AdamC), besides lr itself",
        idle_unless="weight_decay",
    )
    adam_beta1: float = option(
        0.9, "decay of the first moment", minimum=0.0, below=1.0, basic=True, idle_unless="optimizer=adamw|muon|lion"
    )
    adam_beta2: float = option(
        0.999, "decay of the second moment", minimum=0.0, below=1.0, basic=True, idle_unless="optimizer=adamw|muon|lion"
    )
    adam_eps: float = option(
        1e-8, "added to the root of the second moment", above=0.0, idle_unless="optimizer=adamw|muon"
    )
    adam_nesterov: bool = option(
        False, "look one step ahead with the first moment (NAdam)", idle_unless="optimizer=adamw|muon"
    )
    muon_momentum: float = option(
        0.95,
        "decay of Muon's momentum, a running mean of gradients",
        minimum=0.0,
        below=1.0,
        idle_unless="optimizer=muon",
    )
    muon_nesterov: bool = option(True, "look one step ahead with it", idle_unless="optimizer=muon")
    muon_ns_steps: int = option(
        5, "Newton-Schulz iterations that orthogonalise an update", minimum=1, maximum=100, idle_unless="optimizer=muon"
    )
    muon_adjust_lr: str = option(
        "match_rms_adamw",
        "factor on the learning rate of a matrix (m, n): 0.2 * sqrt(max(m, n)), with which learning rate and weight "
        "decay of AdamW fit; or (original, with rates about 0.02; see lr_scales for the rest) sqrt(max(1, m / n))",
        choices=("match_rms_adamw", "original"),
        idle_unless="optimizer=muon",
    )
    sgd_momentum: float = option(
        0.9, "decay of SGD's momentum, a running sum of gradients", minimum=0.0, below=1.0, idle_unless="optimizer=sgd"
    )
    clip_grad: float = option(1.0, "largest global gradient norm; 0 turns clipping off", minimum=0.0, basic=True)
    clip_grad_style: str = option(
        "torch",
        "factor on gradients: min(1, clip_grad / (norm + 1e-6)), or (levanter) min(1, clip_grad / norm)",
        choices=("torch", "levanter"),
        idle_unless="clip_grad",
    )
    update_rms_clip: float | None = option(
        None, "largest root mean square of a parameter's update before the learning rate", above=0.0, unset="off"
    )
    clip_update_norm_sigma: float | None = option(
        None, "clip the update's norm at mean + this many standard deviations of the latest", above=0.0, unset="off"
    )
    clip_update_norm_window: int = option(
        128, "latest updates that count for that", minimum=2, maximum=10_000, idle_unless="clip_update_norm_sigma"
    )
    skip_bad_steps: bool = option(
        False,
        "drop updates whose loss or gradient norm is far above the latest ones; spikes count among these, NaN and "
        "infinities (always dropped) do not (in Levanter they do, and nothing passes until they leave the window)",
    )
    skip_bad_steps_window: int = option(
        128,
        "latest iterations that count for that; none is dropped before half of them are known",
        minimum=2,
        maximum=10_000,
        idle_unless="skip_bad_steps",
    )
    skip_bad_steps_sigma: float = option(
        6.0, "far above: mean + this many standard deviations", above=0.0, idle_unless="skip_bad_steps"
    )
    on_bad_step: str = option(
        "skip",
        "once an update was dropped, by skip_bad_steps or being not finite: go on, or (abort) end the run after the "
        "next log line, or in place of the next validation or save; overflows under a dynamic loss scale never end it",
        choices=("skip", "abort"),
    )
    crash_on_nan: bool = option(
        False, "with on_bad_step=skip: end like that once loss or gradient was NaN", idle_unless="on_bad_step!=abort"
    )
    crash_on_inf: bool = option(
        False,
        "with on_bad_step=skip: end like that once loss or gradient was infinite",
        idle_unless="on_bad_step!=abort",
    )
    lr_scales: tuple[str, ...] = option(
        (), "pattern:scale of a learning rate, as in embedding:0.1 *.bias:2; the last that fits counts, 0 freezes"
    )
    freeze: tuple[str, ...] = option((), "weights that stay as they are: patterns (blocks.0, *.bias) on their names")
    loss_scale: float | None = option(
        None, "constant loss scale", minimum=2.0**-100, maximum=2.0**100, unset="dynamic for fp16, 1 otherwise"
    )
    initial_loss_scale: float = option(
        2.0**16,
        "first dynamic loss scale (fp16)",
        minimum=2.0**-100,
        maximum=2.0**100,
        idle_unless="training_dtype=fp16 and loss_scale=none",
    )
    min_loss_scale: float = option(
        1.0,
        "smallest dynamic loss scale (fp16)",
        minimum=2.0**-100,
        maximum=2.0**100,
        idle_unless="training_dtype=fp16 and loss_scale=none",
    )
    loss_scale_window: int = option(
        1000,
        "good updates before the loss scale doubles (fp16)",
        minimum=1,
        idle_unless="training_dtype=fp16 and loss_scale=none",
    )
    hysteresis: int = option(
        2,
        "overflows before the loss scale halves (fp16)",
        minimum=1,
        idle_unless="training_dtype=fp16 and loss_scale=none",
    )

    @property
    def moments(self) -> tuple[str, ...]:
        """What the optimizer remembers of each element, by name."""
        return ("exp_avg",) if self.optimizer in ("lion", "sgd") else ("exp_avg", "exp_avg_sq")

    @property
    def whole_matrices(self) -> bool:
        """Whether the optimizer needs the matrices between hidden layers whole, and no second moment of them."""
        return self.optimizer == "muon"


@dataclass
class AveragingConfig(Area):
    """Average of the weights"""

    ema_type: str = option(
        "none",
        "ema: exponential; ema_decay_sqrt: uniform, then from ema_switch_iter on with weights 1 - sqrt(progress) "
        "(Levanter's formulas; its own trainer cannot run them)",
        choices=EMA_TYPES,
        aliases=("model_averaging",),
    )
    ema_beta: float = option(0.999, "decay of the average", minimum=0.0, below=1.0, idle_unless="ema_type!=none")
    ema_switch_iter: int = option(
        100_000,
        "ema_decay_sqrt: iterations of the uniform phase, from the start of averaging",
        minimum=0,
        idle_unless="ema_type=ema_decay_sqrt",
    )
    ema_decay_iters: int = option(
        100_000,
        "ema_decay_sqrt: iterations of the last phase; then the average stands still",
        minimum=1,
        idle_unless="ema_type=ema_decay_sqrt",
    )

    @property
    def enabled(self) -> bool:
        return self.ema_type != "none"
