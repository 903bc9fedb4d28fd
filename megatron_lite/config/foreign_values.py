"""Values of our options that are refused, with what to write instead: other programs' values, and likely guesses.

Foreign flags are in `cli/foreign_flags.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

_STYLES = {name: name for name in ("constant", "linear", "cosine", "inv_sqrt", "inv")} | {"power": "power_tokens"}
_MASTERS = "master weights are fp32 in any case"
_FP8 = "8-bit training is not supported yet; write --training_dtype=bf16"
_STAGED = "the stable phase is an option of its own; write --lr_decay_style=linear --lr_wsd_decay_iters=<iterations>"
_INVERSE_ROOT = "write --lr_decay_style=inv_sqrt --lr_inv_sqrt_timescale=<warmup iterations>"
_OPTIMIZER = "not an optimizer here; write --optimizer=adamw"


def _gated(activation: str) -> str:
    return f"stands for a gated MLP; write --gated=1 --activation_type={activation}"


# `option=value`, in lower case, as other programs have it or as a user may well try.
REFUSED_VALUES: Mapping[str, str] = MappingProxyType(
    {
        "dataset_source=sample": "there is no sample data set; write --dataset_source=random for random tokens",
        "mlp_recompute_level=offload": "activations are not moved to host memory; write --mlp_recompute_level=full",
        "mlp_recompute_level=nested": "write --mlp_recompute_level=full, or --recompute_layers=<N> for whole blocks",
        "mlp_recompute_level=recompute": "write --mlp_recompute_level=full, or --recompute_layers=<N> for whole blocks",
        "mlp_recompute_level=selective": "write --mlp_recompute_level=activation",
        **{
            f"lr_schedule={theirs}": f"takes a list of stages; for Levanter's lr_schedule write --lr_decay_style={ours}"
            for theirs, ours in _STYLES.items()
        },
        "lr_decay_style=wsd": _STAGED,
        "lr_decay_style=warmup_stable_decay": _STAGED,
        "lr_decay_style=inverse-square-root": _INVERSE_ROOT,
        "lr_decay_style=inverse_sqrt": _INVERSE_ROOT,
        "lr_decay_style=polynomial": "write --lr_decay_style=power --lr_decay_power=<exponent>",
        "lr_decay_style=constant_with_warmup": "write --lr_decay_style=constant --lr_warmup_iters=<iterations>",
        "lr_decay_style=cosine_with_restarts": "write --lr_decay_style=cosine --lr_num_cycles=<cycles>",
        "lr_decay_style=cosine_with_min_lr": "write --lr_decay_style=cosine --min_lr=<rate>",
        "lr_decay_style=none": "write --lr_decay_style=constant",
        "activation_type=swiglu": _gated("silu"),
        "activation_type=geglu": _gated("gelu"),
        "activation_type=reglu": _gated("relu"),
        "activation_type=bilinear": _gated("identity"),
        "activation_type=glu": "the sigmoid gate is not supported; write --gated=1 --activation_type=silu",
        "normalization_type=ln": "write --normalization_type=layer_norm",
        "normalization_type=rms": "write --normalization_type=rms_norm",
        "optimizer=adamw_torch": "write --optimizer=adamw",
        "optimizer=adamw_torch_fused": "write --optimizer=adamw",
        "optimizer=adamw_hf": "write --optimizer=adamw",
        "optimizer=fusedadam": "write --optimizer=adamw",
        "optimizer=adafactor": _OPTIMIZER,
        "optimizer=adamw_8bit": _OPTIMIZER,
        "optimizer=adamw_bnb_8bit": _OPTIMIZER,
        "optimizer=adagrad": _OPTIMIZER,
        "optimizer=sophia": _OPTIMIZER,
        "optimizer=dist_muon": "write --optimizer=muon, with any --zero_stage",
        "attention_backend=fused": "write --attention_backend=cudnn",
        "attention_backend=unfused": "write --attention_backend=math",
        "attention_backend=local": "write --attention_backend=math",
        "attention_backend=eager": "write --attention_backend=math",
        "attention_backend=sdpa": "write --attention_backend=auto",
        "attention_backend=xformers": "write --attention_backend=auto",
        "attention_backend=flash_attention_2": "write --attention_backend=flash",
        "attention_backend=flash_attention_3": "write --attention_backend=flash3",
        "rope_type=rope": "write --rope_type=default",
        "rope_type=dynamic": "lengths are fixed while training; write --rope_type=linear or --rope_type=yarn",
        "rope_type=longrope": "not supported; write --rope_type=yarn",
        "device=gpu": "takes auto, cuda, cpu; write --device=cuda",
        "device=rocm": "torch calls AMD's GPUs cuda, too; write --device=cuda",
        "device=mps": "Apple's GPUs are not supported; write --device=cpu",
        "device=tpu": "TPUs are not supported; write --device=cuda or --device=cpu",
        "device=xla": "TPUs are not supported; write --device=cuda or --device=cpu",
        "device=none": "write --device=auto",
        "training_dtype=fp8": _FP8,
        "training_dtype=float8": _FP8,
        "training_dtype=int8": _FP8,
        "training_dtype=fp64": "write --training_dtype=fp32",
        "training_dtype=float64": "write --training_dtype=fp32",
        "training_dtype=double": "write --training_dtype=fp32",
        "training_dtype=tf32": "tf32 is no dtype of weights; write --training_dtype=fp32, or bf16 for speed",
        "training_dtype=auto": "write --training_dtype=bf16, or fp32 where the device has no bf16",
        "training_dtype=mixed": f"write --training_dtype=bf16; {_MASTERS}",
        "training_dtype=bf16-mixed": f"write --training_dtype=bf16; {_MASTERS}",
        "training_dtype=16-mixed": f"write --training_dtype=fp16; {_MASTERS}",
        "training_dtype=bf16-true": f"write --training_dtype=bf16; {_MASTERS}",
        "clip_grad=none": "write --clip_grad=0, which turns clipping off",
        "pretrained_checkpoint_type=state_dict": "pickles are never loaded; write the weights as safetensors, and "
        "--pretrained_checkpoint_type=huggingface",
        "validation_iters=none": "write --validation_iters=all for the whole validation set, or 0 for no validation",
        "validation_iters=-1": "write --validation_iters=all for the whole validation set, or 0 for no validation",
        "weight_decay_default_mask=true": "write --weight_decay_default_mask=levanter",
        "weight_decay_default_mask=false": "write --weight_decay_default_mask=off, or leave the flag out beside "
        "--weight_decay_modules",
        "zero_stage=0": "every rank would hold and update the full optimizer state, which is never better; write "
        "--zero_stage=1",
    }
)
# The same for values that vary: option, expression of the whole value, answer. `{0}` is the value.
_PATTERNS = (
    (
        "skip_bad_steps",
        re.compile("[2-9]|[1-9][0-9]{1,3}"),
        "takes 0 or 1; Levanter's number of recent iterations is another flag: write --skip_bad_steps=1 "
        "--skip_bad_steps_window={0}",
    ),
    (
        "device",
        re.compile("(cuda|gpu):[0-9]+"),
        "each rank takes the GPU of its number; write --device=cuda, and choose GPUs by CUDA_VISIBLE_DEVICES",
    ),
)


def refused_value(name: str, text: str) -> str | None:
    """Return why a value of the option `name` is refused, with what to write instead; None for all other values."""
    if reason := REFUSED_VALUES.get(f"{name}={text.lower()}"):
        return reason
    for option, expression, reason in _PATTERNS:
        if option == name and expression.fullmatch(text.lower()):
            return reason.format(text)
    return None
