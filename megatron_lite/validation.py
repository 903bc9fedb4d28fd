"""Cross-checks between options, and the values that follow from others.

`resolve` either returns a configuration in which everything that can be known beforehand is filled in, or reports all
contradictions at once, each with the flags, their values, the rule and the fix.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron_lite.cautions import number_of_stages
from megatron_lite.cautions import warnings as warnings
from megatron_lite.config import Config, flatten, unflatten
from megatron_lite.errors import UsageError
from megatron_lite.flags import FLAGS, BadValueError, check_bounds, written
from megatron_lite.items import lr_scale_patterns as lr_scale_patterns
from megatron_lite.items import weighted_paths as weighted_paths
from megatron_lite.refused import REFUSED_VALUES

PREFETCH_FACTOR = 2


class Problem(NamedTuple):
    """One contradiction: the options that take part in it, and the message."""

    names: tuple[str, ...]
    message: str


def resolve(config: Config, world_size: int) -> Config:
    """Fill in every derived value, and check each option on its own and against the others.

    Resolving a resolved configuration again for the same world size changes nothing.

    Raises:
        UsageError: with one line for every problem.
    """
    resolved, problems = examine(config, world_size)
    if problems:
        raise UsageError("\n".join(problem.message for problem in problems))
    return resolved


def planned_world_size(config: Config, launched: int) -> int:
    """The number of ranks to resolve a configuration for: those that were launched, or those of the dry run."""
    distributed = config.distributed
    return distributed.world_size if distributed.dry_run and distributed.world_size else launched


def examine(config: Config, world_size: int) -> tuple[Config, list[Problem]]:
    """As `resolve`, but returns the problems; with problems, the configuration is only partly resolved."""
    assert world_size >= 1, world_size
    values = flatten(config)
    problems = list(_check_each(values))
    if not problems:  # the rules below rely on each value being sound
        for rule in (_model, _batch, _optimizer, _performance, _multi_stage, _distributed, _data, _training, _run):
            problems += rule(values, world_size)
        _fill_the_rest(values)
    return unflatten(values), problems


def _check_each(values: dict[str, Any]) -> Iterator[Problem]:
    """Bounds and choices: the command line has been through this, a configuration made in Python has not."""
    for name, value in values.items():
        if value is None and FLAGS[name].optional:
            continue
        try:
            check_bounds(FLAGS[name], value)
        except BadValueError as error:
            reason = REFUSED_VALUES.get((name, written(value)), str(error))
            yield Problem((name,), f"{_typed(values, name)}: {reason}")


def _typed(values: dict[str, Any], *names: str) -> str:
    """`--a=1, --b=2` for messages."""
    return ", ".join(f"--{name}={written(values[name])}" for name in names)


def _fill(values: dict[str, Any], name: str, value: Any) -> None:
    if values[name] is None:
        values[name] = value


def _model(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    _fill(values, "head_groups", heads)
    if heads % values["head_groups"]:
        yield Problem(
            ("num_attention_heads", "head_groups"),
            f"{_typed(values, 'num_attention_heads', 'head_groups')}: every key/value head serves equally many query "
            f"heads; make head_groups a divisor of {heads}",
        )
    if values["kv_channels"] is None:
        if hidden % heads:
            yield Problem(
                ("hidden_size", "num_attention_heads", "kv_channels"),
                f"{_typed(values, 'hidden_size', 'num_attention_heads')}: the heads share hidden_size equally; "
                f"nearest hidden sizes: {_nearest_multiples(hidden, heads)}; or set --kv_channels",
            )
            return
        values["kv_channels"] = hidden // heads
    if values["use_rotary_embeddings"] and values["kv_channels"] % 2:
        yield Problem(
            ("kv_channels", "use_rotary_embeddings", "hidden_size", "num_attention_heads"),
            f"--use_rotary_embeddings=1: a head of {values['kv_channels']} channels (kv_channels) cannot be rotated in "
            f"pairs; write an even --kv_channels",
        )
    _fill(values, "ffn_hidden_size", 4 * hidden)
    _fill(values, "activation_type", "silu" if values["gated"] else "gelu")
    _fill(values, "use_position_embeddings", not values["use_rotary_embeddings"])
    sequence_length = values["sequence_length"]
    _fill(values, "max_position_embeddings", max(2048, sequence_length))
    if values["use_position_embeddings"] and sequence_length > values["max_position_embeddings"]:
        yield Problem(
            ("sequence_length", "max_position_embeddings", "use_position_embeddings"),
            f"{_typed(values, 'sequence_length', 'max_position_embeddings')}: positions beyond the last learned one; "
            f"write --max_position_embeddings={sequence_length}",
        )
    _fill_initialization(values)


def _fill_initialization(values: dict[str, Any]) -> None:
    _fill(values, "init_method_std", values["hidden_size"] ** -0.5)
    std, depth = values["init_method_std"], 2 * values["num_layers"]
    for name in ("embed", "qkv", "mlp_1"):
        _fill(values, f"init_method_std_{name}", std)
    for name in ("attn_proj", "mlp_2"):  # the two outputs of every block that add up in the residual stream
        _fill(values, f"init_method_std_{name}", std / math.sqrt(depth))


def _nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` around `value` in words, none of them 0."""
    below = value // unit * unit
    return " or ".join(str(multiple) for multiple in (below, below + unit) if multiple > 0)


BATCH = (
    "batch_size", "micro_batch_size", "depth_first_micro_batches", "breadth_first_micro_batches",
    "sequential_micro_batches",
)  # fmt: skip
_BATCH_RULE = (*BATCH, "dry_run", "world_size")  # all that decide about the batch arithmetic


def _batch(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    """batch_size = micro_batch_size * depth_first * breadth_first * world_size; derive what is missing."""
    batch, micro, depth, breadth, sequential = (values[name] for name in BATCH)
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    if batch is not None and micro is not None:
        if batch % (micro * world_size):
            yield Problem(
                _BATCH_RULE,
                f"{_typed(values, 'batch_size', 'micro_batch_size')} on {ranks}: batch_size must be a multiple of "
                f"{micro} * {world_size} = {micro * world_size}; "
                f"nearest: {_nearest_multiples(batch, micro * world_size)}",
            )
            return
        total = batch // (micro * world_size)
        if sequential is not None and sequential != total:
            yield Problem(
                _BATCH_RULE,
                f"{_typed(values, *_given(values))} on {ranks}: batch_size / (micro_batch_size * ranks) is {total}, "
                f"not {sequential}; leave sequential_micro_batches out or write "
                f"--batch_size={micro * sequential * world_size}",
            )
            return
        sequential = total
    elif sequential is None:
        sequential = (depth or 1) * (breadth or 1)
    if not _splits(sequential, depth, breadth):
        yield _unsplit(values, sequential, ranks, world_size)
        return
    if depth is None:
        depth = sequential // (breadth or 1)
    breadth = sequential // depth
    if batch is None:
        batch = (micro or 1) * sequential * world_size
    elif micro is None and batch % (sequential * world_size):
        yield Problem(
            _BATCH_RULE,
            f"{_typed(values, 'batch_size')} on {ranks} with {sequential} sequential micro-batch"
            f"{'es' if sequential > 1 else ''}: must be a multiple of {sequential * world_size}; "
            f"nearest: {_nearest_multiples(batch, sequential * world_size)}",
        )
        return
    micro = batch // (sequential * world_size)
    values.update(zip(BATCH, (batch, micro, depth, breadth, sequential), strict=True))
    tokens, splits = micro * values["sequence_length"], values["cross_entropy_splits"]
    if splits is not None and splits > tokens:
        yield Problem(
            ("cross_entropy_splits", "sequence_length", *_BATCH_RULE),
            f"--cross_entropy_splits={splits}: a micro-batch has only {tokens} tokens; write at most that",
        )


def _given(values: dict[str, Any]) -> list[str]:
    return [name for name in BATCH if values[name] is not None]


def _splits(sequential: int, depth: int | None, breadth: int | None) -> bool:
    """Whether depth * breadth can be `sequential`, where a missing one follows from the other."""
    if depth is not None and breadth is not None:
        return depth * breadth == sequential
    return sequential % (depth or breadth or 1) == 0


def _unsplit(values: dict[str, Any], sequential: int, ranks: str, world_size: int) -> Problem:
    """`sequential` micro-batches that are not depth_first * breadth_first: which batch sizes would work?"""
    depth, breadth = values["depth_first_micro_batches"], values["breadth_first_micro_batches"]
    unit = (depth or 1) * (breadth or 1)
    both = depth is not None and breadth is not None
    message = f"{_typed(values, *_given(values))} on {ranks}: depth_first * breadth_first micro-batches "
    message += f"are {unit}, not {sequential}" if both else f"are a multiple of {unit}, and {sequential} is not"
    batch, micro = values["batch_size"], values["micro_batch_size"]
    if batch is None or micro is None:
        return Problem(_BATCH_RULE, f"{message}; leave sequential_micro_batches out")
    per_unit = micro * unit * world_size
    fix = str(per_unit) if both else _nearest_multiples(batch, per_unit)
    return Problem(_BATCH_RULE, f"{message}; leave one of them out, or batch_size must be {fix}")


def _optimizer(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    if values["min_lr"] > values["lr"]:
        yield Problem(
            ("min_lr", "lr"), f"{_typed(values, 'min_lr', 'lr')}: the rate would grow; write a min_lr of at most lr"
        )
    iterations, warmup = values["train_iters"], values["lr_warmup_iters"]
    given = values["lr_decay_iters"] is not None
    _fill(values, "lr_decay_iters", max(1, iterations))
    decay, constant = values["lr_decay_iters"], values["lr_decay_style"] == "constant"
    if iterations and warmup > iterations:
        yield Problem(
            ("lr_warmup_iters", "train_iters"),
            f"{_typed(values, 'lr_warmup_iters', 'train_iters')}: the run would end during the warmup; "
            f"write --lr_warmup_iters of at most {iterations}",
        )
    elif iterations and not constant and decay <= warmup:
        source = "" if given else " (train_iters, as it is not set)"
        yield Problem(
            ("lr_warmup_iters", "lr_decay_iters", "train_iters", "lr_decay_style"),
            f"{_typed(values, 'lr_decay_iters')}{source}, {_typed(values, 'lr_warmup_iters', 'lr_decay_style')}: "
            f"lr_decay_iters is the absolute end of the decay and must come after the warmup; "
            f"write --lr_decay_iters={max(iterations, warmup + 1)} or a shorter warmup",
        )
    if values["training_dtype"] == "fp16" and values["loss_scale"] is None:
        if values["initial_loss_scale"] < values["min_loss_scale"]:
            yield Problem(
                ("initial_loss_scale", "min_loss_scale", "training_dtype", "loss_scale"),
                f"{_typed(values, 'initial_loss_scale', 'min_loss_scale')}: "
                f"the first loss scale is below the smallest; write --min_loss_scale of at most the first",
            )
    elif values["loss_scale"] is None:
        values["loss_scale"] = 1.0


def _performance(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    for name, limit in (("recompute_layers", "num_layers"), ("cross_entropy_block_size", "vocab_size")):
        if values[name] is not None and values[name] > values[limit]:
            yield Problem((name, limit), f"{_typed(values, name, limit)}: write at most {values[limit]}")


def _multi_stage(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
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
            f"{_typed(values, 'split_master_weights', 'training_dtype')}: the master is split into the bf16 weight and "
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
        f"{_typed(values, 'split_master_weights', name)}: the bf16 weights are half of the master, so every stage "
        f"needs a weight buffer of its own; {fix}, or leave split_master_weights out",
    )


def _distributed(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    if values["world_size"] is not None and not values["dry_run"]:
        yield Problem(
            ("world_size", "dry_run"),
            f"{_typed(values, 'world_size')}: torchrun sets it through the environment: torchrun --nproc-per-node=N "
            f"--nnodes=M; only a dry run takes it from here: --dry_run=1",
        )


def _data(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    split = values["split"]
    if not 1 <= len(split) <= 3 or not 0 < sum(split) < math.inf:
        yield Problem(
            ("split",),
            f"{_typed(values, 'split')}: takes up to three proportions (training, validation, test) "
            f"with a positive sum, as in --split=969,30,1",
        )
        return
    split = values["split"] = split + (0.0,) * (3 - len(split))
    if values["dataset_source"] != "list":
        return
    if not values["data_path"]:
        if values["dry_run"]:
            return  # and its documents are not asked for
        yield Problem(
            ("data_path", "dataset_source"),
            "--data_path is missing: write the prefix of a .bin/.idx pair (scripts/prepare_data.py makes them), "
            "or --dataset_source=random for made-up tokens",
        )
    else:
        try:
            weighted_paths(values["data_path"])
        except UsageError as error:
            yield Problem(("data_path",), str(error))
    for share, phase, count in zip(split, ("training", "validation", "test"), PHASE_ITERS, strict=True):
        if values[count] > 0 and share == 0:
            yield Problem(
                ("split", count),
                f"{_typed(values, 'split', count)}: no documents are left for {phase}; "
                f"give it a share in --split or write --{count}=0",
            )


PHASE_ITERS = ("train_iters", "validation_iters", "test_iters")


def _training(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    for name in ("checkpoint_interval", "export_interval", "stop_interval"):
        if values[name] is not None and values["experiment_dir"] is None and not values["dry_run"]:
            yield Problem(
                (name, "experiment_dir"),
                f"{_typed(values, name)}: there is nowhere to save; set --experiment_dir or leave {name} out",
            )


def _run(values: dict[str, Any], world_size: int) -> Iterator[Problem]:
    if values["save_tensor_logs"] and values["experiment_dir"] is None and not values["dry_run"]:
        yield Problem(
            ("save_tensor_logs", "experiment_dir"),
            "--save_tensor_logs=1: there is nowhere to save; set --experiment_dir or leave save_tensor_logs out",
        )
    if values["experiment_dir"] is not None and values["experiment_name"] is None:
        values["experiment_name"] = _folder_name(values["experiment_dir"])
    _fill(values, "wandb_post_alerts", values["wandb_status_interval"] is not None)


def _folder_name(path: str) -> str | None:
    """The last part of a path; where the current directory is gone, of the path as it was typed."""
    with contextlib.suppress(OSError):
        path = os.path.abspath(path)
    return os.path.basename(path) or None


def _fill_the_rest(values: dict[str, Any]) -> None:
    """Derived values without a rule of their own. Buffer counts and loss chunks depend on stages and device: later."""
    _fill(values, "zero_stage", 1)
    if values["num_workers"] > 0:
        _fill(values, "prefetch_factor", PREFETCH_FACTOR)
