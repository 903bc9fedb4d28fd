"""Values of our options that are refused, with what to write instead. Foreign flags are in `cli/foreign_flags.py`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_STYLES = {name: name for name in ("constant", "linear", "cosine", "inv_sqrt", "inv")} | {"power": "power_tokens"}

# `option=value`, as other programs have it or as a user may well try.
REFUSED_VALUES: Mapping[str, str] = MappingProxyType(
    {
        "dataset_source=file": "a JSON file cannot describe a blend yet; write the weights and prefixes: "
        "--data_path 0.3 first 0.7 second",
        "dataset_source=sample": "there is no sample data set; write random for random tokens",
        "mlp_recompute_level=offload": "activations are not moved to host memory; write activation or full",
        "mlp_recompute_level=nested": "write full, or --recompute_layers=<N> for whole blocks",
        "mlp_recompute_level=recompute": "write activation or full, or --recompute_layers=<N> for whole blocks",
        **{
            f"lr_schedule={theirs}": f"takes a list of stages; for Levanter's lr_schedule write --lr_decay_style={ours}"
            for theirs, ours in _STYLES.items()
        },
        "clip_grad=none": "write 0, which turns clipping off",
        "pretrained_checkpoint_type=state_dict": "pickles are never loaded; write the weights as safetensors",
        "validation_iters=none": "write all for the whole validation set, or 0 for no validation",
        "weight_decay_default_mask=true": "write levanter",
        "weight_decay_default_mask=false": "write off, or leave the flag out beside --weight_decay_modules",
        "zero_stage=0": "every rank would hold and update the full optimizer state, which is never better; write 1",
    }
)
