"""Rules for the model source, the update, stages, data, and output files."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

from megatron_lite.config import Draft
from megatron_lite.config.monitoring import default_trackers, is_run_id
from megatron_lite.config.structured_values import (
    decay_expression,
    interconnect,
    keep_rules,
    lr_scale_patterns,
    size_bytes,
    weight_stages,
)
from megatron_lite.config.system import number_of_stages
from megatron_lite.config.values import is_number
from megatron_lite.validation.rules import Problem, fill, parsing, problem

PREFETCH_FACTOR = 2


def source(draft: Draft) -> Iterator[Problem]:
    """Check what to load from a pretrained checkpoint. Without a checkpoint, a warning is enough."""
    if draft.pretrained_checkpoint_path is None:
        return
    parts = set(draft.load_parts)
    if not {"model"} <= parts <= {"model", "optimizer", "step"}:
        rule = "takes model, and after it optimizer, step or both, as in --load_parts=model,optimizer,step"
        yield problem(draft, "load_parts", rule)
    if "optimizer" in parts:
        draft.load_pretrained_optimizer = True
    if not draft.use_pretrained_config and draft.ignore_pretrained_config and not draft.load_pretrained_weights:
        names = "use_pretrained_config ignore_pretrained_config load_pretrained_weights"
        rule = "nothing of --pretrained_checkpoint_path would be used; leave it out, or one of these"
        yield problem(draft, names, rule, also="pretrained_checkpoint_path")


def update(draft: Draft) -> Iterator[Problem]:
    """Check and derive the loss scale and the weight-decay patterns and mask."""
    dynamic = draft.training_dtype == "fp16" and draft.loss_scale is None
    if dynamic and draft.initial_loss_scale < draft.min_loss_scale:
        rule = "the first loss scale is below the smallest; write --min_loss_scale of at most the first"
        yield problem(draft, "initial_loss_scale min_loss_scale", rule, also="training_dtype loss_scale")
    elif not dynamic:
        fill(draft, loss_scale=1.0)
    for pattern in draft.weight_decay_modules:
        yield from parsing("weight_decay_modules", decay_expression, pattern)
    if not draft.weight_decay_modules:
        fill(draft, weight_decay_default_mask="fast_llm")


def multi_stage(draft: Draft) -> Iterator[Problem]:
    """Check stages, buffers, learning-rate scales and the planned link; derive the ZeRO stage."""
    yield from parsing("interconnect", interconnect, draft.interconnect)
    yield from parsing("freeze lr_scales", lr_scale_patterns, draft.freeze, draft.lr_scales)
    fill(draft, zero_stage=1)
    if not draft.split_master_weights:
        return
    buffers, size = draft.num_weight_buffers, draft.layers_per_stage
    stages = None if size == "auto" else number_of_stages(draft.num_layers, size)
    if buffers is None and draft.zero_stage == 3:
        name, fix = "zero_stage", "write --zero_stage=1 or 2"
    elif buffers is not None and (stages is None or buffers < stages - draft.tie_word_embeddings):
        name, fix = "num_weight_buffers", "leave num_weight_buffers out"
    else:
        return
    rule = (
        "the bf16 weights are half of the master, so every stage needs its own weight buffer; "
        f"{fix}, or leave split_master_weights out"
    )
    yield problem(draft, f"split_master_weights {name}", rule, also="num_layers layers_per_stage tie_word_embeddings")


def profiles(draft: Draft, world_size: int) -> Iterator[Problem]:
    """Check that the ranks to profile exist."""
    if max(draft.profile_ranks, default=0) >= world_size:
        ranks = f"the ranks are 0 to {world_size - 1}" if world_size > 1 else "the only rank is 0"
        yield problem(draft, "profile_ranks", f"{ranks}; leave out profile_ranks to profile all")


def data(draft: Draft) -> Iterator[Problem]:
    """Check the data, and that every phase has a share of the split."""
    if draft.num_workers > 0:
        fill(draft, prefetch_factor=PREFETCH_FACTOR)
    if not 1 <= len(draft.split) <= 3 or not 0 < sum(draft.split) < math.inf:
        rule = "takes up to three proportions (training, validation, test) with a positive sum, as in --split=969,30,1"
        yield problem(draft, "split", rule)
        return
    draft.split += (0.0,) * (3 - len(draft.split))
    if draft.dataset_source == "random":
        return
    if not draft.data_path:
        if draft.dry_run:  # a dry run reads no data
            return
        yield Problem(
            ("data_path", "dataset_source"),
            "--data_path is missing: write the prefix of a .bin/.idx pair (scripts/prepare_data.py makes them), "
            "or --dataset_source=random for random tokens",
        )
    elif draft.dataset_source == "file":
        if len(draft.data_path) != 1:
            yield problem(draft, "dataset_source data_path", "name one JSON file, which holds the prefixes")
    else:
        names = "data_path data_weights_schedule"
        yield from parsing(names, weight_stages, draft.data_path, draft.data_weights_schedule)
        masks, sets = len(draft.loss_mask), sum(not is_number(word) for word in draft.data_path)
        if masks and masks != sets:
            rule = f"{masks} for {sets} data sets; write one for each, in the order of --data_path, or the word none"
            yield problem(draft, "loss_mask", rule, also="data_path")
    phases = {"train_iters": "training", "validation_iters": "validation", "test_iters": "test"}
    for share, (name, phase) in zip(draft.split, phases.items(), strict=True):
        if getattr(draft, name) != 0 and share == 0:
            rule = f"no documents are left for {phase}; give it a share in --split or write --{name}=0"
            yield problem(draft, f"split {name}", rule)


def files(draft: Draft) -> Iterator[Problem]:
    """Check checkpoints, exports and samples."""
    fill(draft, export_dtype=draft.training_dtype)
    yield from parsing("keep_checkpoints", keep_rules, draft.keep_checkpoints)
    yield from parsing("export_shard_size", size_bytes, draft.export_shard_size)
    if draft.export_dtype != draft.training_dtype and draft.export_format == "distributed":
        rule = "a resumable checkpoint holds the fp32 masters; leave one of the two out"
        yield problem(draft, "export_dtype export_format", rule)
    if draft.sample_interval is not None and draft.sample_tokens >= draft.sequence_length:
        rule = f"a sample and its prompt must fit into sequence_length; write at most {draft.sequence_length - 1}"
        yield problem(draft, "sample_tokens sequence_length", rule)
    if draft.experiment_dir is not None:
        fill(draft, experiment_name=folder_name(draft.experiment_dir))


def tracking(draft: Draft) -> Iterator[Problem]:
    """Choose the trackers and alerts."""
    fill(draft, wandb_post_alerts=draft.wandb_status_interval is not None)
    if draft.wandb_id is not None and not is_run_id(draft.wandb_id):
        yield problem(draft, "wandb_id", "takes up to 128 letters, digits, - and _")
    draft.trackers = draft.trackers or default_trackers(draft)


def folder_name(path: str) -> str | None:
    """Return the last component of a path, which is made absolute unless the current directory is gone."""
    with contextlib.suppress(OSError):
        path = os.path.abspath(path)
    return os.path.basename(path) or None
