"""Warnings about legal but surprising configurations: risky combinations, and options without
effect."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_lite.config import Config, Draft, flatten
from megatron_lite.config.structured_values import lr_scale_patterns
from megatron_lite.config.system import number_of_stages
from megatron_lite.config.values import FLAGS, typed
from megatron_lite.validation.areas import PREFETCH_FACTOR, folder_name
from megatron_lite.validation.learning_rate import idle_schedule_options, schedule_warnings
from megatron_lite.validation.rules import holds, unmet

DEBUG_LEVELS = tuple(
    name for name, flag in FLAGS.items() if name.startswith("debug_") and flag.kind == "int"
)
# Condition (see `declared`) -> warning if it holds.
RISKS = {
    "train_iters=0 and dry_run=0 and export_interval=none or export_format!=distributed": (
        "--train_iters=0: nothing is trained, so neither gradients nor optimizer state are allocated"
    ),
    "train_iters=0 and dry_run=0 and export_interval!=none and export_format=distributed": (
        "--train_iters=0: nothing is trained; only --export_format=distributed needs the optimizer state"
    ),
    "train_iters and lr=0 or default_lr_scale=0": "the learning rate is 0: the weights never change",
    "full_precision_gradients=0 and training_dtype!=fp32": (
        "--full_precision_gradients=0: sums of gradients in {training_dtype} lose small contributions"
    ),
    "training_dtype=fp16 and loss_scale!=none": (
        "--loss_scale: a constant loss scale does not adapt to fp16 overflows; updates that overflow are dropped"
    ),
    "use_rotary_embeddings=0 and use_position_embeddings=0": (
        "neither rotary nor learned positions: the model sees the order of tokens only through the causal mask"
    ),
    "ema_type!=none and train_iters and validation_iters=0 and test_iters=0 and "
    "export_interval=none or export_weights!=average": (
        "--ema_type={ema_type}: the averages are only saved; evaluate them with --validation_iters, or export them "
        "with --export_interval and --export_weights=average"
    ),
    "experiment_dir=none and train_iters and dry_run=0": "--experiment_dir is not set: nothing is saved",
}


def warnings(config: Config) -> list[str]:
    """Return the warnings for a resolved configuration, one line each."""
    options = Draft(**flatten(config))
    return [
        *(
            text.format(**vars(options))
            for condition, text in RISKS.items()
            if holds(condition, options)
        ),
        *_windows(options),
        *_positions(options),
        *schedule_warnings(options),
        *_buffers(options),
        *_profiles(options),
        *(f"--{name} has no effect {reason}" for name, reason in _without_effect(options)),
    ]


def _windows(options: Draft) -> Iterator[str]:
    """Warn if the run is too short for a window of recent updates, or for a phase of the
    average."""
    for name, used, consequence in (
        ("skip_bad_steps_window", options.skip_bad_steps, "no spike is ever dropped"),
        (
            "clip_update_norm_window",
            options.clip_update_norm_sigma is not None,
            "no update is ever clipped",
        ),
    ):
        if used and 0 < options.train_iters <= max(2, getattr(options, name) // 2):
            yield f"{typed(options, name)}: the run ends before half of the window is filled, so {consequence}"
    if options.ema_type == "ema_decay_sqrt" and 0 < options.train_iters <= options.ema_switch_iter:
        unreached = f"{typed(options, 'ema_switch_iter')} is not reached in {options.train_iters} iterations"
        yield f"{unreached}: the average is the plain mean of the weights after each iteration"


def _positions(options: Draft) -> Iterator[str]:
    original = options.rope_original_max_position_embeddings
    longest = options.max_position_embeddings
    if options.rope_type == "yarn" and original is not None and options.rope_factor is not None:
        if longest not in (original, original * options.rope_factor):
            yield (
                f"--rope_factor={options.rope_factor:g}: max_position_embeddings {longest} is neither "
                f"rope_original_max_position_embeddings {original} nor that times rope_factor"
            )
    if options.sequence_length > longest:
        yield f"{typed(options, 'max_position_embeddings', 'sequence_length')}: exports state the longer one"


def _buffers(options: Draft) -> Iterator[str]:
    """Warn about numbers of buffers that differ from the ZeRO stage's own, exceed the stages or
    have no effect."""
    one_rank = options.batch_size <= options.micro_batch_size * options.sequential_micro_batches
    zero_stage, size = options.zero_stage, options.layers_per_stage
    stages = math.inf if size == "auto" else number_of_stages(options.num_layers, size)
    # Each kind with the training dtype that it needs to be the shard on one rank, and where stages
    # share two buffers.
    for name, dtype, shared_from in (
        ("num_weight_buffers", "fp32", 3),
        ("num_grad_buffers", "", 2),
    ):
        count = getattr(options, name)
        if count is None:
            continue
        if one_rank and dtype in ("", options.training_dtype):
            training = f" in {dtype} training" if dtype else ""
            yield f"--{name} has no effect on one rank{training}: the shards are the full tensors"
            continue
        used = f"--{name}={count} is used"
        if count > stages:
            used = f"--{name}={count}: only {stages} are allocated, one per stage"
        instead = ""
        if zero_stage == "auto":
            instead = ", whatever --zero_stage=auto chooses"
        elif zero_stage >= shared_from and count != 2:
            instead = f"; --zero_stage={zero_stage} by itself would set 2"
        elif zero_stage < shared_from and count < stages - options.tie_word_embeddings:
            # a tied one has its own
            each = "" if size == "auto" else f" ({stages})"
            instead = f"; --zero_stage={zero_stage} by itself would set one per stage{each}"
        if instead or count > stages:
            yield used + instead


def _profiles(options: Draft) -> Iterator[str]:
    profiles = options.profile_cpu or options.profile_cuda or options.profile_schedule
    if profiles and options.profile_skip + 1 >= options.train_iters:
        yield f"{typed(options, 'profile_skip')}: no iteration is profiled, as the run ends after {options.train_iters}"


def _without_effect(options: Draft) -> Iterator[tuple[str, str]]:
    """Yield changed options that have no effect, with the reason."""
    # Derived or harmless values that differ from the default.
    harmless = {
        "weight_decay_default_mask": "fast_llm",
        "rotary_base": 10000.0,
        "export_dtype": options.training_dtype,
        "wandb_post_alerts": False,
        "num_workers": 0,
        "prefetch_factor": PREFETCH_FACTOR if options.num_workers else None,
        "moe_ffn_hidden_size": options.ffn_hidden_size,
        "moe_normalize_top_k": options.num_experts_per_token > 1,
        "moe_router_choice_bias": False,
        "moe_router_bias_update_rate": 0.0,
        "expert_auxiliary_loss_coefficient": 0.0,
        "experiment_name": options.experiment_dir and folder_name(options.experiment_dir),
    }
    for name in options.changed(*FLAGS):
        value, idle_unless = getattr(options, name), FLAGS[name].idle_unless
        if not idle_unless or value is None or value == harmless.get(name):
            continue
        for condition in idle_unless.split(" and "):
            if reason := unmet(condition, options):
                yield name, reason
                break
    yield from _idle_for_other_reasons(options)
    yield from idle_schedule_options(options)


def _idle_for_other_reasons(options: Draft) -> Iterator[tuple[str, str]]:
    """Yield options without effect for reasons that `idle_unless` cannot express."""
    window, length = options.window_size, options.sequence_length
    if window is not None and window >= length:
        yield "window_size", f"because it is not below sequence_length ({window} >= {length})"
    frozen = any(scale == 0.0 for _, scale in lr_scale_patterns(options.freeze, options.lr_scales))
    for name in options.changed("store_frozen_weights_in_optimization_precision"):
        if not frozen:
            yield name, "without --freeze or a scale of 0 in --lr_scales"
        elif options.training_dtype == "fp32":
            yield name, "with --training_dtype=fp32"
    if (
        "optimizer" in options.load_parts
        and options.pretrained_checkpoint_path
        and options.inference
    ):
        yield "load_parts=optimizer", "with --train_iters=0, which updates nothing"
    highest = max(getattr(options, name) for name in DEBUG_LEVELS)
    if highest == 0:
        for name in options.changed("save_tensor_logs", "show_tensor_logs", "debug_global_tensors"):
            yield name, "while all debug levels are 0"
