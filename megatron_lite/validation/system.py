"""Rules about partitioning, ranks, and what a run leaves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from megatron_lite.config.structured_values import lr_scale_patterns
from megatron_lite.errors import UsageError
from megatron_lite.validation.messages import Problem, fill, typed
from megatron_lite.validation.warnings import number_of_stages


def multi_stage(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """Stages, buffers, what is frozen."""
    try:
        lr_scale_patterns(values["freeze"], values["lr_scales"])
    except UsageError as error:
        yield Problem(("freeze", "lr_scales"), str(error))
    if values["split_master_weights"]:
        yield from _split_master(values)


def _split_master(values: dict[str, Any]) -> Iterator[Problem]:
    """The master's upper half is the bf16 weight itself: it must be bf16, and stay in its buffer."""
    if values["training_dtype"] != "bf16":
        yield Problem(
            ("split_master_weights", "training_dtype"),
            f"{typed(values, 'split_master_weights', 'training_dtype')}: the master is split into the bf16 weight and "
            f"the rest; write --training_dtype=bf16, or leave split_master_weights out",
        )
    buffers, stages = values["num_weight_buffers"], number_of_stages(values["num_layers"], values["layers_per_stage"])
    if buffers is None and values["zero_stage"] == 3:
        name, fix = "zero_stage", "write --zero_stage=1 or 2"
    elif buffers is not None and (stages is None or buffers < stages - values["tie_word_embeddings"]):
        name, fix = "num_weight_buffers", "leave num_weight_buffers out"
    else:
        return
    yield Problem(
        ("split_master_weights", name, "num_layers", "layers_per_stage", "tie_word_embeddings"),
        f"{typed(values, 'split_master_weights', name)}: the bf16 weights are half of the master, so every stage "
        f"needs a weight buffer of its own; {fix}, or leave split_master_weights out",
    )


def distributed(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """Ranks."""
    if values["world_size"] is not None and not values["dry_run"]:
        yield Problem(
            ("world_size", "dry_run"),
            f"{typed(values, 'world_size')}: torchrun sets it through the environment: torchrun --nproc-per-node=N "
            f"--nnodes=M; only a dry run takes it from here: --dry_run=1",
        )


def run(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """What a run tells and leaves."""
    if values["save_tensor_logs"] and values["experiment_dir"] is None and not values["dry_run"]:
        yield Problem(
            ("save_tensor_logs", "experiment_dir"),
            "--save_tensor_logs=1: there is nowhere to save; set --experiment_dir or leave save_tensor_logs out",
        )
    if values["experiment_dir"] is not None and values["experiment_name"] is None:
        values["experiment_name"] = _folder_name(values["experiment_dir"])
    fill(values, "wandb_post_alerts", values["wandb_status_interval"] is not None)


def _folder_name(path: str) -> str | None:
    """The last part of a path; where the current directory is gone, of the path as it was typed."""
    with contextlib.suppress(OSError):
        path = os.path.abspath(path)
    return os.path.basename(path) or None
