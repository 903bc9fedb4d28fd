"""Options of the source of a model: a preset or pretrained weights."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_lite.config.option import Area, idle_unless, optional
from megatron_lite.config.presets import PRESETS

# Options that have no effect unless another one has this value.
pretrained_option = idle_unless("pretrained_checkpoint_path")


@dataclass
class SourceConfig(Area):
    """Presets and pretrained weights"""

    model: str | None = optional(
        "set the flags of a known architecture; other flags override them", "none", choices=tuple(PRESETS), basic=True
    )
    pretrained_checkpoint_path: str | None = optional(
        "start from this folder: a Hugging Face model, a checkpoint, or a folder of checkpoints (the newest)",
        "none",
        never_empty=True,
        basic=True,
    )
    pretrained_checkpoint_type: str | None = pretrained_option(
        None, "type of the pretrained folder", choices=("huggingface", "distributed"), unset="detected"
    )
    use_pretrained_config: bool = pretrained_option(
        True, "take the architecture from the pretrained folder; 0: take it from the flags, which must agree"
    )
    ignore_pretrained_config: bool = pretrained_option(
        False, "let flags override the architecture of the pretrained folder, as long as its weights fit"
    )
    load_pretrained_weights: bool = pretrained_option(
        True, "load the pretrained weights; 0: take only the architecture and initialize new weights"
    )
    load_parts: tuple[str, ...] = pretrained_option(
        ("model",),
        "parts to take from a checkpoint: model; optimizer (moments); step (iterations done, and with them the "
        "learning rate and the place in the data)",
    )
    allow_partial_checkpoint: bool = pretrained_option(
        False,
        "start from a checkpoint that lacks parameters of the model, or has others: missing ones are initialized, and "
        "all are listed (with ignore_pretrained_config if flags of the model differ)",
    )
    load_pretrained_optimizer: bool = pretrained_option(
        False, "also load the optimizer's moments from a checkpoint; the run still starts at iteration 0"
    )
