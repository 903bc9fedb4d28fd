"""Options of checkpoints: when to save, what to keep, what to load."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.numbers import NonNegativeInt, PositiveInt
from megatron_lite.config.option import Area, option, optional


@dataclass
class CheckpointConfig(Area):
    """Checkpoints"""

    checkpoint_interval: PositiveInt | None = optional(
        "iterations between checkpoints", "only the last iteration", basic=True, aliases="save_interval"
    )
    checkpoint_offset: NonNegativeInt = option(
        0, "iteration from which checkpoint_interval counts", idle_unless="checkpoint_interval"
    )
    max_checkpoints: PositiveInt | None = optional(
        "keep only the newest N checkpoints", "all", basic=True, idle_unless="experiment_dir"
    )
    save_retries: NonNegativeInt = option(
        3,
        "attempts to save again after a failure of the storage, after 1, 4, 16, 60, 60 ... s",
        idle_unless="experiment_dir",
    )
    async_checkpoint: bool = option(
        False,
        "write checkpoints in the background: training waits for a copy in host memory only",
        aliases="async_save",
        idle_unless="checkpoint_interval and experiment_dir",
    )
