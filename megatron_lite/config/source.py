"""Options of where a model comes from: a preset, or weights trained before."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.option import Area, option
from megatron_lite.config.presets import PRESETS


@dataclass
class SourceConfig(Area):
    """Presets and pretrained weights"""

    model: str | None = option(
        None,
        "a known model: sets the flags of its architecture, which others override",
        choices=tuple(PRESETS),
        unset="none",
        basic=True,
    )
    pretrained_checkpoint_path: str | None = option(
        None,
        "folder to start from: a Hugging Face model, a checkpoint, or checkpoints (the newest)",
        never_empty=True,
        unset="none",
        basic=True,
    )
    pretrained_checkpoint_type: str | None = option(
        None,
        "what that folder is",
        choices=("huggingface", "distributed"),
        unset="what the folder holds",
        idle_unless="pretrained_checkpoint_path",
    )
    use_pretrained_config: bool = option(
        True,
        "the architecture is that of the pretrained folder; 0: that of the flags, and compared with it",
        idle_unless="pretrained_checkpoint_path",
    )
    ignore_pretrained_config: bool = option(
        False,
        "flags that contradict the pretrained folder's architecture win, if its weights fit",
        idle_unless="pretrained_checkpoint_path",
    )
    load_pretrained_weights: bool = option(
        True, "0: only the architecture is taken, weights start anew", idle_unless="pretrained_checkpoint_path"
    )
    load_pretrained_optimizer: bool = option(
        False,
        "the optimizer's moments, too, from a checkpoint; iterations count from 0 in any case",
        idle_unless="pretrained_checkpoint_path",
    )
