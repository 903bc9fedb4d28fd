"""Which implementation of each operation a run uses: chosen once, logged, and passed to whoever computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_lite.config import Config
from megatron_lite.errors import UsageError
from megatron_lite.kernels.attention.attention import works
from megatron_lite.kernels.attention.choice import PLANNED_GPU, choose_attention, describe_attention
from megatron_lite.kernels.triton_support import runs_on
from megatron_lite.parameter import DTYPES


@dataclass(frozen=True)
class Kernels:
    """The implementations."""

    triton: bool = False  # Triton kernels instead of the references
    attention: str = "auto"  # a backend of `attention_choice.py`
    cross_entropy: str = "torch"  # or "triton"
    cross_entropy_splits: int | None = None
    cross_entropy_block_size: int | None = None
    mlp_recompute_level: str = "none"
    recompute_layers: int = 0

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"kernels: {'Triton' if self.triton else 'torch'}, attention by {describe_attention(self.attention)}, "
            f"cross-entropy in {'Triton' if self.cross_entropy == 'triton' else 'torch'}"
        )


# The torch references, on any device.
REFERENCES = Kernels()


def choose_kernels(config: Config, device: torch.device, planned: bool = False) -> Kernels:
    """What a resolved configuration asks for on a device, `auto` replaced by what is there.

    `planned`: for a device that need not be there, without looking at it or at what is installed here.

    Raises:
        UsageError: if what is asked for by name is not there.
    """
    wanted = config.performance
    available = runs_on(device) or (planned and device.type == "cuda")  # a plan takes Triton for granted
    if wanted.enable_triton_kernels and not available:
        raise UsageError(_no_triton("--enable_triton_kernels=1", device))
    if wanted.cross_entropy_impl == "triton" and not available:
        raise UsageError(_no_triton("--cross_entropy_impl=triton", device))
    unset = wanted.enable_triton_kernels is None
    triton = available and device.type == "cuda" if unset else bool(wanted.enable_triton_kernels)
    automatic = "triton" if triton else "torch"
    return Kernels(
        triton=triton,
        attention=_attention(config, device, planned),
        cross_entropy=automatic if wanted.cross_entropy_impl == "auto" else wanted.cross_entropy_impl,
        cross_entropy_splits=wanted.cross_entropy_splits,
        cross_entropy_block_size=wanted.cross_entropy_block_size,
        mlp_recompute_level=wanted.mlp_recompute_level,
        recompute_layers=wanted.recompute_layers,
    )


def _attention(config: Config, device: torch.device, planned: bool) -> str:
    model, dtype = config.model, DTYPES[config.distributed.training_dtype]
    assert model.kv_channels is not None
    shorter = model.window_size is not None and model.window_size < config.batch.sequence_length
    looks = device.type == "cuda" and not planned
    wanted = "math" if model.attention_softmax_in_fp32 else config.performance.attention_backend
    return choose_attention(
        wanted,
        device,
        dtype,
        model.window_size if shorter else None,
        not config.data.cross_document_attention,
        model.kv_channels,
        config.distributed.deterministic,
        model.attention_dropout > 0,
        PLANNED_GPU if device.type == "cuda" and planned else None,
        lambda backend: not looks or works(backend, device, dtype, model.kv_channels or 0),
    )


def _no_triton(flag: str, device: torch.device) -> str:
    if device.type == "cuda":
        return f"{flag}: Triton is not installed; install it, or leave the flag out"
    return f"{flag}: Triton kernels need a GPU, and this run is on {device.type}; leave it out, or write --device=cuda"
