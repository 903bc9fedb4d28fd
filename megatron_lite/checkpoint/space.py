"""Disk space for checkpoints: the size of one, and early warnings if they will not fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lite.checkpoint import manifest
from megatron_lite.checkpoint.files import safetensors_header
from megatron_lite.checkpoint.names import find_checkpoints, new_nonce
from megatron_lite.checkpoint.retention import num_permanent
from megatron_lite.checkpoint.writing import tensors_of
from megatron_lite.config import Config
from megatron_lite.config.structured_values import keep_rules

if TYPE_CHECKING:
    from megatron_lite.zero.multi_stage import MultiStage


def shard_bytes(model: MultiStage) -> int:
    """Return the bytes that each rank writes for a checkpoint, 0 for inference; headers and manifest add little."""
    return sum(tensor.num_bytes for tensor in tensors_of(model)) if model.training else 0


def checkpoint_bytes(model: MultiStage, world_size: int) -> int:
    """Return the bytes of a checkpoint, over all ranks."""
    return shard_bytes(model) * world_size


def files_bytes(model: MultiStage, world_size: int, iteration: int) -> int:
    """Return the bytes of all ranks' files in a checkpoint, including headers."""
    tensors = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors_of(model)}
    headers, rank = 0, 0
    while rank < world_size:  # ranks with as many digits have headers of the same length
        last = min(world_size, 10 ** len(str(rank)))
        metadata = manifest.file_metadata(new_nonce(), iteration, rank)
        headers += (last - rank) * len(safetensors_header(tensors, metadata))
        rank = last
    return checkpoint_bytes(model, world_size) + headers


def host_copy_bytes(config: Config, model: MultiStage) -> int:
    """Return the host memory in bytes that a rank needs for --async_checkpoint; 0 without it."""
    saves = config.checkpoint.async_checkpoint and config.run.experiment_dir is not None
    return shard_bytes(model) if saves else 0


def free_bytes(path: Path) -> int | None:
    """Return the free bytes for this user at a path, or at its nearest existing parent; None if unknown."""
    try:
        usage = os.statvfs(next(parent for parent in (path, *path.parents) if parent.exists()))
    except (OSError, StopIteration):
        return None
    return usage.f_bavail * usage.f_frsize


def lack_at_start(root: Path | None, num_bytes: int, config: Config, done: int) -> str | None:
    """Describe the space missing for all future checkpoints; None if there is enough.

    num_bytes: size of one checkpoint. done: iterations done. Saves by time are not counted.
    """
    free = None if root is None else free_bytes(root)
    if root is None or free is None:
        return None
    options, train_iters = config.checkpoint, config.training.train_iters
    left, there = max(0, train_iters - done), len(find_checkpoints(root))
    permanent = num_permanent(done, train_iters, keep_rules(options.keep_checkpoints))
    saves = min(left, 1) if options.checkpoint_interval is None else -(-left // options.checkpoint_interval)
    if options.max_checkpoints is None:
        more = max(saves, permanent)
    else:
        more = additional(there, saves, options.max_checkpoints) + permanent
    if more * num_bytes <= free:
        return None
    return (
        f"{root}: {free / 1e9:,.1f} GB free, but the checkpoints to come take {more} x {num_bytes / 1e9:,.1f} GB; make "
        "room, or keep fewer (--max_checkpoints)"
    )


def additional(there: int, saves: int, keep: int | None) -> int:
    """Return how many more checkpoints will exist at once. One is written before an old one is deleted."""
    if keep is None or there + saves <= keep:
        return saves
    return max(0, keep - there) + 1


def lack_now(root: Path, num_bytes: int) -> str | None:
    """Describe the space missing for the next checkpoint; None if there is enough."""
    free = free_bytes(root)
    if free is None or num_bytes <= free:
        return None
    return f"{root}: the next checkpoint takes {num_bytes / 1e9:,.1f} GB, but only {free / 1e9:,.1f} GB are free"
