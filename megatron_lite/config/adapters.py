"""Options of adapters: low-rank updates of a frozen model (LoRA, Hu et al. 2021,
arXiv:2106.09685)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_lite.config.option import (
    Area,
    NonNegativeInt,
    PositiveFloat,
    ProperFraction,
    Rule,
    idle_unless,
    option,
    optional,
)

UNSUPPORTED = (
    Rule("mup", "its factors are for models trained from random weights"),
    Rule("overlap_tensor_reduce", "products in halves have no adapters yet"),
    Rule("resize_vocabulary", "new rows of a frozen embedding would stay as they begin"),
    Rule("allow_partial_checkpoint", "what the folder lacks would stay as it begins"),
    Rule(
        "moe_router_bias_update_rate",
        "the bias is part of the frozen model",
        fix="write --moe_router_bias_update_rate=0",
    ),
    Rule("freeze", "the model is frozen, and all adapters are trained"),
    Rule("load_parts=optimizer|step", "a frozen model has no optimizer state", fix="leave it out"),
)
# Our weights of several linear maps -> architectures whose files hold these in one tensor, which has
# one adapter there.
FUSED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "query_key_value": ("gpt2", "gpt_bigcode", "gpt_neox", "phi3"),
        "up": ("phi3", "glm4"),
    }
)
# Options that have no effect without adapters.
adapter_option = idle_unless("lora_rank")


@dataclass
class AdapterConfig(Area):
    """Adapters"""

    lora_rank: NonNegativeInt = option(
        0,
        "freeze the model and train adapters of this rank, y = W x + scale B A x (LoRA, Hu et al. 2021); 0: train the "
        "model",
        aliases="lora_r",
        excludes=UNSUPPORTED,
    )
    lora_alpha: PositiveFloat | None = optional(
        "numerator of the factor on adapters",
        "lora_rank",
        idle_unless="lora_rank",
    )
    lora_scaling: str = adapter_option(
        "rank",
        "denominator of the factor on adapters; sqrt_rank: rsLoRA (Kalajdzievski 2023)",
        choices=("rank", "sqrt_rank"),
    )
    lora_dropout: ProperFraction = adapter_option(0.0, "dropout of the inputs of adapters")
    lora_targets: tuple[str, ...] = adapter_option(
        (),
        "linear maps with adapters, by default all of the blocks: patterns as in --weight_decay_modules of names as "
        "blocks.0.attention.query (key, value, output) and blocks.0.mlp.up (gate, down), or of tensors "
        "(query_key_value)",
    )
    pretrained_adapter: str | None = optional(
        "start from the adapters in this folder, in the format of peft, whose rank, alpha, scaling and targets are "
        "taken unless typed",
        "none",
        never_empty=True,
        needs=(Rule("pretrained_checkpoint_path", "adapters belong to a model"),),
    )
    export_merged: bool = option(
        False,
        "also export the model with its adapters merged, to export/merged",
        idle_unless="lora_rank and export_interval or keep_best",
    )

    @property
    def lora_factor(self) -> float:
        """The factor on adapters."""
        root = {"rank": 1.0, "sqrt_rank": 0.5}[self.lora_scaling]
        return float((self.lora_alpha or self.lora_rank) / self.lora_rank**root)
