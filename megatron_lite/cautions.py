"""What is legal but surprising in a configuration: risky combinations, and options that another one makes idle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from megatron_lite.config import Config, flatten
from megatron_lite.flags import FLAGS
from megatron_lite.option import Auto


def warnings(config: Config) -> list[str]:
    """The cautions for a resolved configuration, one line each."""
    values = flatten(config)
    return [*_risks(values), *(f"--{name} has no effect {reason}" for name, reason in _without_effect(values))]


def number_of_stages(num_layers: int, layers_per_stage: float | Auto) -> int | None:
    """The embedding's stage, those of the blocks and the head's; None where the split is chosen later."""
    return None if layers_per_stage == "auto" else 2 + math.ceil(num_layers / layers_per_stage)


def _risks(values: dict[str, Any]) -> Iterator[str]:
    if values["train_iters"] == 0:
        yield "--train_iters=0: nothing is trained, and Adam's state is only allocated"
    elif values["lr"] == 0.0 or values["default_lr_scale"] == 0.0:
        yield "the learning rate is 0: the weights never change"
    if not values["full_precision_gradients"] and values["training_dtype"] != "fp32":
        yield (
            f"--full_precision_gradients=0: gradients are accumulated and reduced in {values['training_dtype']}; "
            f"small contributions are lost"
        )
    if values["training_dtype"] == "fp16" and values["loss_scale"] is not None:
        yield "--loss_scale: a constant loss scale does not follow overflows in fp16; those updates are dropped"
    if not values["use_rotary_embeddings"] and not values["use_position_embeddings"]:
        yield "neither rotary nor learned positions: the model sees the order of tokens only through the causal mask"
    if values["sequence_length"] > values["max_position_embeddings"]:
        yield (
            f"--max_position_embeddings={values['max_position_embeddings']}: exports state a shorter context than "
            f"sequence_length {values['sequence_length']}"
        )
    if values["experiment_dir"] is None and values["train_iters"] > 0:
        yield "--experiment_dir is not set: nothing is saved"


def _without_effect(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Options that differ from their default although another option makes them idle, with the reason."""
    for name, idle, reason in _idle_conditions(values):
        default = FLAGS[name].default
        if idle and values[name] not in (default, None):
            yield name, reason
    window, sequence_length = values["window_size"], values["sequence_length"]
    if window is not None and window >= sequence_length:
        yield "window_size", f"when it is not below sequence_length ({window} >= {sequence_length})"
    if values["lr_decay_style"] == "constant" and values["lr_decay_iters"] != max(1, values["train_iters"]):
        yield "lr_decay_iters", "with --lr_decay_style=constant"


def _idle_conditions(values: dict[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """(option, whether another option makes it idle, why) for options whose default is not derived from others."""
    constant = values["lr_decay_style"] == "constant"
    for name in ("min_lr", "lr_decay_power"):
        yield name, constant, "with --lr_decay_style=constant"
    dynamic = values["training_dtype"] == "fp16" and values["loss_scale"] is None
    for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"):
        yield name, not dynamic, "without dynamic loss scaling (--training_dtype=fp16 and no --loss_scale)"
    random = values["dataset_source"] == "random"
    for name in ("prefetch_factor", "multiprocessing_context"):
        yield name, values["num_workers"] == 0 and not random, "with --num_workers=0"
    yield "num_workers", random and values["num_workers"] > 0, "with --dataset_source=random"
    for name in ("data_path", "split", "multiprocessing_context", "data_sample_warn_time_ms"):
        yield name, random, "with --dataset_source=random"
    yield "rotary_embedding_scale", not values["use_rotary_embeddings"], "without --use_rotary_embeddings=1"
    yield "random_bias_init", not values["add_linear_biases"], "with --add_linear_biases=0"
    yield "full_precision_gradients", values["training_dtype"] == "fp32", "in fp32 training"
    yield "validation_interval", values["validation_iters"] == 0, "with --validation_iters=0"
    yield "checkpoint_offset", values["checkpoint_interval"] is None, "without --checkpoint_interval"
    yield "stop_offset", values["stop_interval"] is None, "without --stop_interval"
    yield "max_checkpoints", values["experiment_dir"] is None, "without --experiment_dir"
    no_exports = values["export_interval"] is None
    for name in ("tokenizer_file", "export_format"):
        yield name, no_exports, "without --export_interval"
    no_tracker = values["wandb_entity_name"] is None
    for name in ("wandb_project_name", "wandb_group_name", "wandb_status_interval", "wandb_post_alerts"):
        yield name, no_tracker and values[name] is not False, "without --wandb_entity_name"
