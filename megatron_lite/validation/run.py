"""Rules for the source of a model, stages and ranks, data, and what a run writes."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

from megatron_lite.config import Draft
from megatron_lite.config.structured_values import (
    interconnect,
    keep_rules,
    lr_scale_patterns,
    size_bytes,
    weight_stages,
)
from megatron_lite.config.system import number_of_stages
from megatron_lite.config.tracking import default_trackers, is_run_id
from megatron_lite.config.values import is_number
from megatron_lite.validation.messages import Problem, default, parsing, problem

PREFETCH_FACTOR = 2


def source(draft: Draft) -> Iterator[Problem]:
    """Check what is taken from a pretrained checkpoint. Without a checkpoint, a warning is enough."""
    if draft.pretrained_checkpoint_path is None:
        return
    parts = set(draft.load_parts)
    if not {"model"} <= parts <= {"model", "optimizer", "step"}:
        rule = "takes model, and after it optimizer, step or both, as in --load_parts=model,optimizer,step"
        yield problem(draft, "load_parts", rule)
    if "optimizer" in parts:
        draft.load_pretrained_optimizer = True
    if draft.pretrained_checkpoint_type == "huggingface" and ("step" in parts or draft.allow_partial_checkpoint):
        name = "load_parts" if "step" in parts else "allow_partial_checkpoint"
        rule = f"only for checkpoints of this program; leave {name} out"
        yield problem(draft, f"{name} pretrained_checkpoint_type", rule)
    if "step" in parts and not draft.load_pretrained_weights:
        yield problem(draft, "load_parts load_pretrained_weights", "new weights begin at iteration 0; leave one out")
    if draft.load_pretrained_optimizer and draft.pretrained_checkpoint_type == "huggingface":
        rule = "a Hugging Face folder holds no optimizer state; leave load_pretrained_optimizer out"
        yield problem(draft, "load_pretrained_optimizer pretrained_checkpoint_type", rule)
    if draft.load_pretrained_optimizer and not draft.load_pretrained_weights:
        rule = "moments fit only the weights they were computed with; leave one of the two out"
        yield problem(draft, "load_pretrained_optimizer load_pretrained_weights", rule)
    if not draft.use_pretrained_config and draft.ignore_pretrained_config and not draft.load_pretrained_weights:
        names = "use_pretrained_config ignore_pretrained_config load_pretrained_weights"
        rule = "nothing of --pretrained_checkpoint_path would be used; leave it out, or one of these"
        yield problem(draft, names, rule, also="pretrained_checkpoint_path")


def loading(draft: Draft) -> Iterator[Problem]:
    """Check that the options for resuming leave exactly one meaning."""
    elsewhere, back = draft.load_checkpoint_path, draft.resume_iteration
    for name in draft.changed("load_checkpoint_path", "resume_iteration") if draft.load_policy == "never" else ():
        rule = f"a run that starts anew loads no checkpoint; leave load_policy or {name} out"
        yield problem(draft, f"load_policy {name}", rule)
    if elsewhere is not None and draft.pretrained_checkpoint_path is not None:
        rule = "a run begins from one of the two; leave one out"
        yield problem(draft, "load_checkpoint_path pretrained_checkpoint_path", rule)
    if draft.experiment_dir is None and elsewhere is None and not draft.dry_run:
        for name in ["resume_iteration"] * (back is not None) + ["load_policy"] * (draft.load_policy == "require"):
            rule = f"there is nothing to load; set --experiment_dir or --load_checkpoint_path, or leave {name} out"
            yield problem(draft, name, rule, also="experiment_dir load_checkpoint_path")


def multi_stage(draft: Draft) -> Iterator[Problem]:
    """Check stages, buffers and learning-rate scales; derive the ZeRO stage."""
    yield from parsing("freeze lr_scales", lr_scale_patterns, draft.freeze, draft.lr_scales)
    draft.zero_stage = default(draft.zero_stage, 1)
    if not draft.split_master_weights:
        return
    if draft.training_dtype != "bf16":
        rule = "only bf16 training can split masters; write --training_dtype=bf16, or leave split_master_weights out"
        yield problem(draft, "split_master_weights training_dtype", rule)
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


def ranks(draft: Draft) -> Iterator[Problem]:
    """Check where the number of ranks comes from."""
    if draft.world_size is not None and not draft.dry_run:
        rule = "only with --dry_run=1; a run takes it from torchrun (its nproc-per-node and nnodes)"
        yield problem(draft, "world_size", rule, also="dry_run")
    if draft.gpu not in (None, "cpu") and draft.device == "cpu":
        yield problem(draft, "gpu", "--device=cpu plans for a CPU; leave one of the two out", also="device")
    if draft.gpu == "cpu" and draft.device == "cuda":
        yield problem(draft, "gpu", "--device=cuda plans for a GPU; leave one of the two out", also="device")
    yield from parsing("interconnect", interconnect, draft.interconnect)


def profiles(draft: Draft, world_size: int) -> Iterator[Problem]:
    """Check that the ranks to profile exist."""
    if max(draft.profile_ranks, default=0) >= world_size:
        ranks = f"the ranks are 0 to {world_size - 1}" if world_size > 1 else "the only rank is 0"
        yield problem(draft, "profile_ranks", f"{ranks}; leave out profile_ranks to profile all")


def data(draft: Draft) -> Iterator[Problem]:
    """Check what is read, and that every phase has a share of it."""
    if draft.num_workers > 0:
        draft.prefetch_factor = default(draft.prefetch_factor, PREFETCH_FACTOR)
    if not 1 <= len(draft.split) <= 3 or not 0 < sum(draft.split) < math.inf:
        rule = "takes up to three proportions (training, validation, test) with a positive sum, as in --split=969,30,1"
        yield problem(draft, "split", rule)
        return
    draft.split += (0.0,) * (3 - len(draft.split))
    if draft.shuffle == "full" and draft.max_epochs is None:
        rule = "its order depends on the number of epochs; set --max_epochs, or write --shuffle=epoch"
        yield problem(draft, "shuffle", rule, also="max_epochs")
    if draft.dataset_source == "random":
        if draft.validation_iters == "all":
            rule = "random samples have no end; write a number of batches"
            yield problem(draft, "validation_iters dataset_source", rule)
        return
    yield from _fill_in_the_middle(draft)
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
        for name in ("data_weights_schedule", "loss_mask"):
            if getattr(draft, name):
                rule = "needs the data sets on the command line; write --dataset_source=list"
                yield problem(draft, f"{name} dataset_source", rule)
    else:
        names = "data_path data_weights_schedule"
        yield from parsing(names, weight_stages, draft.data_path, draft.data_weights_schedule)
        yield from _loss_masks(draft)
    phases = {"train_iters": "training", "validation_iters": "validation", "test_iters": "test"}
    for share, (name, phase) in zip(draft.split, phases.items(), strict=True):
        if getattr(draft, name) != 0 and share == 0:
            rule = f"no documents are left for {phase}; give it a share in --split or write --{name}=0"
            yield problem(draft, f"split {name}", rule)


def _fill_in_the_middle(draft: Draft) -> Iterator[Problem]:
    """Check that documents can be rearranged."""
    if draft.fim_rate == 0:
        return
    if draft.tokenizer_file is None:
        rule = "text is cut between characters; name the tokenizer of the data with --tokenizer_file"
        yield problem(draft, "fim_rate", rule, also="tokenizer_file")
    if not draft.truncate_documents and not draft.fim_truncate_or_pad:
        rule = "rearranged documents would be longer than their place in a sample; write --fim_truncate_or_pad=1"
        yield problem(draft, "truncate_documents fim_rate", rule, also="fim_truncate_or_pad")
    if draft.loss_mask:
        rule = "a mask does not fit documents that are rearranged; leave one of the two out"
        yield problem(draft, "fim_rate loss_mask", rule)


def _loss_masks(draft: Draft) -> Iterator[Problem]:
    """Check that there is a mask for each data set."""
    masks, words = len(draft.loss_mask), draft.data_path
    sets = sum(not is_number(word) for word in words)
    if masks and masks != sets:
        rule = f"{masks} for {sets} data sets; write one for each, in the order of --data_path, or the word none"
        yield problem(draft, "loss_mask", rule, also="data_path")


def files(draft: Draft) -> Iterator[Problem]:
    """Check what the run writes, and that there is a place for it."""
    draft.export_dtype = default(draft.export_dtype, draft.training_dtype)
    if draft.experiment_dir is None and not draft.dry_run:
        saving = draft.changed("checkpoint_interval", "checkpoint_minutes", "keep_checkpoints", "export_interval")
        saving += draft.changed("stop_interval", "max_minutes", "stop_before_end_s", "save_tensor_logs")
        for name in saving:
            rule = f"there is nowhere to save; set --experiment_dir or leave {name} out"
            yield problem(draft, name, rule, also="experiment_dir")
    yield from parsing("keep_checkpoints", keep_rules, draft.keep_checkpoints)
    yield from parsing("export_shard_size", size_bytes, draft.export_shard_size)
    if draft.export_dtype != draft.training_dtype and draft.export_format == "distributed":
        rule = "a resumable checkpoint holds the fp32 masters; leave one of the two out"
        yield problem(draft, "export_dtype export_format", rule)
    yield from _samples(draft)
    if draft.experiment_dir is not None:
        draft.experiment_name = default(draft.experiment_name, folder_name(draft.experiment_dir))


def tracking(draft: Draft) -> Iterator[Problem]:
    """Choose the trackers, and check that each has a place."""
    draft.wandb_post_alerts = default(draft.wandb_post_alerts, draft.wandb_status_interval is not None)
    if draft.wandb_id is not None and not is_run_id(draft.wandb_id):
        yield problem(draft, "wandb_id", "takes up to 128 letters, digits, - and _")
    if len(set(draft.watch)) < len(draft.watch):
        yield problem(draft, "watch", "one is given twice; leave one out")
    if not (given := draft.trackers):
        draft.trackers = default_trackers(draft)
        return
    if len(set(given)) < len(given):
        yield problem(draft, "trackers", "one is given twice; leave one out")
    for tracker, switch in (("wandb", "wandb_entity_name"), ("tensorboard", "tensorboard_dir")):
        if getattr(draft, switch) is not None and tracker not in given:
            rule = f"the second turns {tracker} on; add {tracker} to --trackers, or leave {switch} out"
            yield problem(draft, f"trackers {switch}", rule)
    if draft.experiment_dir is None and not draft.dry_run:
        places = {"jsonl": ("experiment_dir",), "tensorboard": ("tensorboard_dir", "experiment_dir")}
        for tracker, folders in places.items():
            if tracker in given and not any(getattr(draft, folder) for folder in folders):
                needs = " or ".join(f"--{folder}" for folder in folders)
                rule = f"{tracker} has nowhere to write; set {needs}, or leave {tracker} out"
                yield problem(draft, "trackers", rule, also=" ".join(folders))


def _samples(draft: Draft) -> Iterator[Problem]:
    """Check that samples have prompts, a tokenizer and room, and that their options have an effect."""
    if draft.sample_interval is None:
        for name in draft.changed("sample_prompts", "sample_top_k", "sample_temperature", "sample_top_p"):
            rule = f"no samples are written; set --sample_interval, or leave {name} out"
            yield problem(draft, name, rule, also="sample_interval")
        return
    for name, value in (("sample_prompts", draft.sample_prompts), ("tokenizer_file", draft.tokenizer_file)):
        if value is None:
            rule = f"samples need --{name}; write it, or leave sample_interval out"
            yield problem(draft, "sample_interval", rule, also=name)
    if draft.sample_tokens >= draft.sequence_length:
        rule = f"a sample and its prompt must fit into sequence_length; write at most {draft.sequence_length - 1}"
        yield problem(draft, "sample_tokens sequence_length", rule)
    if draft.sample_temperature == 0:
        for name in draft.changed("sample_top_k", "sample_top_p"):
            if getattr(draft, name) != 1:  # the one most probable token is what temperature 0 takes
                rule = f"--sample_temperature=0 draws nothing at random; set a temperature, or leave {name} out"
                yield problem(draft, name, rule, also="sample_temperature")


def folder_name(path: str) -> str | None:
    """Return the last part of a path, made absolute unless the current directory no longer exists."""
    with contextlib.suppress(OSError):
        path = os.path.abspath(path)
    return os.path.basename(path) or None
