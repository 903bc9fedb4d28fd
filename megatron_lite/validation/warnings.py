"""What is legal but surprising in a configuration: risky combinations, and options that another one makes idle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megatron_lite.config import Config, flatten
from megatron_lite.config.option import Auto
from megatron_lite.config.structured_values import lr_scale_patterns
from megatron_lite.config.values import FLAGS, written
from megatron_lite.schedules.warnings import idle_schedule_options, schedule_cautions


def warnings(config: Config) -> list[str]:
    """The cautions for a resolved configuration, one line each."""
    values = flatten(config)
    without_effect = (f"--{name} has no effect {reason}" for name, reason in _without_effect(values))
    return [
        *_nothing_to_train(config),
        *_risks(values),
        *schedule_cautions(values),
        *_averaging(values),
        *_multi_stage(values),
        *without_effect,
    ]


def _nothing_to_train(config: Config) -> Iterator[str]:
    if config.training.train_iters > 0 or config.distributed.dry_run:
        return
    if config.training.inference:
        yield "--train_iters=0: nothing is trained, so neither gradients nor optimizer state are allocated"
    else:
        yield "--train_iters=0: nothing is trained; --export_format=distributed alone needs the optimizer state"


def number_of_stages(num_layers: int, layers_per_stage: float | Auto) -> int | None:
    """The embedding's stage, those of the blocks and the head's; None where the split is chosen later.

    As `zero.layout.split_into_stages` cuts: the n-th of those of the blocks ends at block int(n * layers_per_stage).
    """
    if layers_per_stage == "auto":
        return None
    groups = math.ceil(num_layers / layers_per_stage)  # may be one off, as products round differently
    while int(groups * layers_per_stage) < num_layers:
        groups += 1
    while int((groups - 1) * layers_per_stage) >= num_layers:
        groups -= 1
    return groups + 2


def _risks(values: dict[str, Any]) -> Iterator[str]:
    if values["train_iters"] > 0 and (values["lr"] == 0.0 or values["default_lr_scale"] == 0.0):
        yield "the learning rate is 0: the weights never change"
    if not values["full_precision_gradients"] and values["training_dtype"] != "fp32":
        yield (
            f"--full_precision_gradients=0: gradients are accumulated and reduced in {values['training_dtype']}; "
            f"small contributions are lost"
        )
    if values["training_dtype"] == "fp16" and values["loss_scale"] is not None:
        yield "--loss_scale: a constant loss scale does not follow overflows in fp16; those updates are dropped"
    for name, used, never in (
        ("skip_bad_steps_window", values["skip_bad_steps"], "no spike is ever dropped"),
        ("clip_update_norm_window", values["clip_update_norm_sigma"] is not None, "no update is ever clipped"),
    ):
        if used and 0 < values["train_iters"] <= max(2, values[name] // 2):
            yield f"--{name}={values[name]}: the run ends before half of it is known, so {never}"
    if not values["use_rotary_embeddings"] and not values["use_position_embeddings"]:
        yield "neither rotary nor learned positions: the model sees the order of tokens only through the causal mask"
    original, longest = values["rope_original_max_position_embeddings"], values["max_position_embeddings"]
    if values["rope_type"] == "yarn" and longest not in (original, original * values["rope_factor"]):
        yield (
            f"--rope_factor={values['rope_factor']:g}: max_position_embeddings {longest} is another multiple of "
            f"rope_original_max_position_embeddings {original}"
        )
    if values["sequence_length"] > values["max_position_embeddings"]:
        yield (
            f"--max_position_embeddings={values['max_position_embeddings']}: exports state a shorter context than "
            f"sequence_length {values['sequence_length']}"
        )
    if values["experiment_dir"] is None and values["train_iters"] > 0 and not values["dry_run"]:
        yield "--experiment_dir is not set: nothing is saved"


def _averaging(values: dict[str, Any]) -> Iterator[str]:
    kind, iterations = values["ema_type"], values["train_iters"]
    if kind == "ema_decay_sqrt" and 0 < iterations <= values["ema_switch_iter"]:
        yield (
            f"--ema_switch_iter={values['ema_switch_iter']} is not reached in {iterations} iterations: the average is "
            f"the plain mean of the weights after each of them"
        )
    evaluated = values["validation_iters"] or values["test_iters"]
    exported = values["export_interval"] is not None and values["export_weights"] == "average"
    if kind != "none" and iterations > 0 and not evaluated and not exported:
        yield (
            f"--ema_type={kind}: the averages are only saved; --validation_iters would evaluate them, "
            f"--export_interval with --export_weights=average export them"
        )


def _multi_stage(values: dict[str, Any]) -> Iterator[str]:
    alone = values["batch_size"] <= values["micro_batch_size"] * values["sequential_micro_batches"]
    fp32 = values["training_dtype"] == "fp32"
    for name, shared_from, is_shard in (("num_weight_buffers", 3, alone and fp32), ("num_grad_buffers", 2, alone)):
        if values[name] is not None and is_shard:
            where = "on one rank" + (" in fp32 training" if name == "num_weight_buffers" else "")
            yield f"--{name} has no effect {where}: the shards are whole and serve as buffers"
        elif values[name] is not None:
            yield from _buffer_count(values, name, shared_from)
    if values["pipeline_delay"] != 0.0:
        yield f"--pipeline_delay={written(values['pipeline_delay'])} is unused: no pipeline"
    if values["debug_tensor_parallel"]:
        yield "--debug_tensor_parallel=1: nothing to check: no tensor parallelism"


def _buffer_count(values: dict[str, Any], name: str, shared_from: int) -> Iterator[str]:
    """A count of buffers that differs from what the ZeRO stage sets, or of which not all are needed.

    shared_from: the lowest ZeRO stage in which two buffers are shared by all stages.
    """
    count, zero_stage = values[name], values["zero_stage"]
    stages = number_of_stages(values["num_layers"], values["layers_per_stage"])
    used, instead = f"--{name}={count} is used", ""
    if stages is not None and count > stages:
        used = f"--{name}={count}: no more than {stages} are allocated, one for each stage"
    if zero_stage == "auto":
        instead = ", whatever --zero_stage=auto chooses"
    elif zero_stage >= shared_from and count != 2:
        instead = f"; --zero_stage={zero_stage} alone would set 2"
    elif zero_stage < shared_from and stages is None:
        instead = f"; --zero_stage={zero_stage} alone would set one per stage"
    elif zero_stage < shared_from and count < stages - values["tie_word_embeddings"]:  # a tied one has its own
        instead = f"; --zero_stage={zero_stage} alone would set one per stage ({stages})"
    if instead or not used.endswith("is used"):
        yield used + instead


# Options that only some optimizers look at. Muon leaves to AdamW what is no matrix.
OPTIMIZERS_WITH = {
    "adam_beta1": ("adamw", "muon", "lion"),
    "adam_beta2": ("adamw", "muon", "lion"),
    "adam_eps": ("adamw", "muon"),
    "adam_nesterov": ("adamw", "muon"),
    "muon_momentum": ("muon",),
    "muon_nesterov": ("muon",),
    "muon_ns_steps": ("muon",),
    "muon_adjust_lr": ("muon",),
    "sgd_momentum": ("sgd",),
}


def _without_effect(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Options that differ from their default although another option makes them idle, with the reason."""
    for name, idle, reason in _idle_conditions(values):
        default = FLAGS[name].default
        if idle and values[name] not in (default, None):
            yield name, reason
    window, sequence_length = values["window_size"], values["sequence_length"]
    if window is not None and window >= sequence_length:
        yield "window_size", f"when it is not below sequence_length ({window} >= {sequence_length})"
    yield from idle_schedule_options(values)


def _idle_conditions(values: dict[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """(option, whether another option makes it idle, why) for options whose default is not derived from others."""
    for name, plain in (("weight_decay_modules", ()), ("weight_decay_default_mask", "fast_llm")):
        yield name, values["weight_decay"] == 0.0 and values[name] != plain, "with --weight_decay=0"
    yield "adamc_weight_decay", values["weight_decay"] == 0.0, "with --weight_decay=0"
    for name, optimizers in OPTIMIZERS_WITH.items():
        yield name, values["optimizer"] not in optimizers, f"with --optimizer={values['optimizer']}"
    dynamic = values["training_dtype"] == "fp16" and values["loss_scale"] is None
    for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
        yield name, not dynamic, "without dynamic loss scaling (--training_dtype=fp16 and no --loss_scale)"
    for name in ("skip_bad_steps_window", "skip_bad_steps_sigma"):
        yield name, not values["skip_bad_steps"], "without --skip_bad_steps=1"
    for name in ("crash_on_nan", "crash_on_inf"):
        yield name, values["on_bad_step"] == "abort", "with --on_bad_step=abort, which stops after any dropped update"
    yield "clip_grad_style", values["clip_grad"] == 0.0, "with --clip_grad=0"
    yield "clip_update_norm_window", values["clip_update_norm_sigma"] is None, "without --clip_update_norm_sigma"
    random = values["dataset_source"] == "random"
    for name in ("prefetch_factor", "multiprocessing_context"):
        yield name, values["num_workers"] == 0 and not random, "with --num_workers=0"
    yield "num_workers", random and values["num_workers"] > 0, "with --dataset_source=random"
    for name in ("data_path", "split", "multiprocessing_context", "data_sample_warn_time_ms"):
        yield name, random, "with --dataset_source=random"
    unrotated = not values["use_rotary_embeddings"] and values["rotary_base"] != 10000.0
    yield "rotary_base", unrotated, "without --use_rotary_embeddings=1"
    biased = any(values[name] for name in ("add_linear_biases", "add_qkv_biases", "add_mlp_biases"))
    yield "random_bias_init", not biased, "with --add_linear_biases=0"
    for name in ("layer_norm_init_range", "zero_centered_normalization"):
        yield name, not values["use_layer_norm_weight"], "with --use_layer_norm_weight=0"
    yield from _idle_debugging(values)
    nothing_frozen = all(scale != 0.0 for _, scale in lr_scale_patterns(values["freeze"], values["lr_scales"]))
    reason = "without --freeze or a scale of 0 in --lr_scales" if nothing_frozen else "in fp32 training"
    idle = nothing_frozen or values["training_dtype"] == "fp32"
    yield "store_frozen_weights_in_optimization_precision", idle, reason
    on_cpu, free = values["device"] == "cpu", not values["throttle_cpu"]
    yield "throttle_cpu", on_cpu, "with --device=cpu"
    for name in ("throttle_cpu_rate", "throttle_cpu_delay"):
        yield name, on_cpu or free, "with --throttle_cpu=0" if free else "with --device=cpu"
    for name in ("full_precision_gradients", "full_precision_residual", "attention_softmax_in_fp32"):
        yield name, values["training_dtype"] == "fp32", "in fp32 training"
    yield "validation_interval", values["validation_iters"] == 0, "with --validation_iters=0"
    yield "validation_at_start", values["validation_iters"] == 0, "with --validation_iters=0"
    no_evaluation = values["validation_iters"] == 0 and values["test_iters"] == 0
    yield "eval_micro_batch_size", no_evaluation, "with --validation_iters=0 and --test_iters=0"
    yield "checkpoint_offset", values["checkpoint_interval"] is None, "without --checkpoint_interval"
    yield "stop_offset", values["stop_interval"] is None, "without --stop_interval"
    yield "max_checkpoints", values["experiment_dir"] is None, "without --experiment_dir"
    yield from _idle_exports(values)
    yield from _idle_sources(values)
    yield "ema_beta", values["ema_type"] == "none", "without --ema_type"
    for name in ("ema_switch_iter", "ema_decay_iters"):
        yield name, values["ema_type"] != "ema_decay_sqrt", "without --ema_type=ema_decay_sqrt"
    no_tracker = values["wandb_entity_name"] is None
    for name in ("wandb_project_name", "wandb_group_name", "wandb_status_interval", "wandb_post_alerts"):
        yield name, no_tracker and values[name] is not False, "without --wandb_entity_name"


def _idle_exports(values: dict[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """Of exports and samples."""
    no_exports, no_samples = values["export_interval"] is None, values["sample_interval"] is None
    yield "tokenizer_file", no_exports and no_samples, "without --export_interval or --sample_interval"
    for name in ("export_format", "export_weights", "export_shard_size", "export_callback_script"):
        yield name, no_exports, "without --export_interval"
    other_dtype = values["export_dtype"] != values["training_dtype"]
    yield "export_dtype", no_exports and other_dtype, "without --export_interval"
    resumable = not no_exports and values["export_format"] == "distributed"
    yield "export_shard_size", resumable, "with --export_format=distributed, which has one file for each rank"
    yield "export_callback_env", values["export_callback_script"] == "", "without --export_callback_script"
    yield "sample_tokens", no_samples, "without --sample_interval"  # the other ones are refused then


def _idle_sources(values: dict[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """Of pretrained weights."""
    for name in (
        "pretrained_checkpoint_type",
        "use_pretrained_config",
        "ignore_pretrained_config",
        "load_pretrained_weights",
        "load_pretrained_optimizer",
    ):
        yield name, values["pretrained_checkpoint_path"] is None, "without --pretrained_checkpoint_path"
    resumable = values["export_interval"] is not None and values["export_format"] == "distributed"
    untrained = values["train_iters"] == 0 and not resumable
    yield "load_pretrained_optimizer", untrained, "with --train_iters=0, which updates nothing"


DEBUG_LEVELS = (
    "debug_layer_outputs",
    "debug_param_init",
    "debug_layer_gradients",
    "debug_param_gradients",
    "debug_all_param_gradients",
    "debug_param_update",
)


def _idle_debugging(values: dict[str, Any]) -> Iterator[tuple[str, bool, str]]:
    unseen = not values["show_tensor_logs"] and not values["save_tensor_logs"]
    for name in DEBUG_LEVELS:
        yield name, unseen, "with --show_tensor_logs=0 and without --save_tensor_logs=1"
    for name in DEBUG_LEVELS[2:]:
        yield name, values["train_iters"] == 0 and not unseen, "with --train_iters=0"
    highest = max(values[name] for name in DEBUG_LEVELS)
    for name in ("save_tensor_logs", "show_tensor_logs", "debug_global_tensors"):
        yield name, highest == 0, "while all debug levels are 0"
    reason = "with --show_tensor_logs=0" if highest >= 3 else "while no debug level is 3 or more"
    yield "tensor_logs_show_elements", highest < 3 or not values["show_tensor_logs"], reason
