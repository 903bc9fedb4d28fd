"""The implementations of the operations: chosen once per run, logged, and passed to the layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_lite.config import Config
from megatron_lite.errors import UsageError
from megatron_lite.kernels.attention.choice import PLANNED_GPU, Work, choose_attention, describe_attention
from megatron_lite.kernels.attention.probe import works
from megatron_lite.kernels.triton_support import runs_on
from megatron_lite.parameter import DTYPES


@dataclass(frozen=True)
class Kernels:
    """Implementations and tile sizes of one run."""

    triton: bool = False  # Triton kernels instead of the references
    attention: str = "auto"  # a backend of `attention/choice.py`
    cross_entropy: str = "torch"  # or "triton"
    cross_entropy_splits: int | None = None
    cross_entropy_block_size: int | None = None

    def describe(self) -> str:
        """Return one line for the log."""
        return (
            f"kernels: {'Triton' if self.triton else 'torch'}; attention: {describe_attention(self.attention)}; "
            f"cross-entropy: {'Triton' if self.cross_entropy == 'triton' else 'torch'}"
        )


# The torch references, which run on any device.
REFERENCES = Kernels()


def choose_kernels(config: Config, device: torch.device, planned: bool = False) -> Kernels:
    """Resolve the choices of a configuration for a device.

    Args:
        planned: the device need not exist; look neither at it nor at the installed libraries.

    Raises:
        UsageError: if the configuration names an implementation that is not available.
    """
    wanted = config.performance
    available = runs_on(device) or (planned and device.type == "cuda")  # a plan assumes Triton
    if wanted.enable_triton_kernels and not available:
        raise UsageError(_no_triton("--enable_triton_kernels=1", device))
    if wanted.cross_entropy_impl == "triton" and not available:
        raise UsageError(_no_triton("--cross_entropy_impl=triton", device))
    if wanted.enable_triton_kernels is None:
        triton = available and device.type == "cuda"
    else:
        triton = wanted.enable_triton_kernels
    automatic = "triton" if triton else "torch"
    return Kernels(
        triton=triton,
        attention=_attention(config, device, planned),
        cross_entropy=automatic if wanted.cross_entropy_impl == "auto" else wanted.cross_entropy_impl,
        cross_entropy_splits=wanted.cross_entropy_splits,
        cross_entropy_block_size=wanted.cross_entropy_block_size,
    )


def _attention(config: Config, device: torch.device, planned: bool) -> str:
    model, dtype, head_size = config.model, DTYPES[config.distributed.training_dtype], config.model.kv_channels
    work = Work(
        dtype,
        head_size,
        windowed=model.window_size is not None and model.window_size < config.batch.sequence_length,
        documents=not config.data.cross_document_attention,
        deterministic=config.distributed.deterministic,
        dropout=model.attention_dropout > 0,
    )
    wanted = "math" if model.attention_softmax_in_fp32 else config.performance.attention_backend
    if device.type != "cuda":
        return choose_attention(wanted, device, work)
    if planned:
        return choose_attention(wanted, device, work, PLANNED_GPU)
    return choose_attention(wanted, device, work, works=lambda backend: works(backend, device, dtype, head_size))


def _no_triton(flag: str, device: torch.device) -> str:
    if device.type == "cuda":
        return f"{flag}: Triton is not installed; install it, or leave the flag out"
    return f"{flag}: Triton kernels need a GPU, and this run is on {device.type}; leave it out, or write --device=cuda"
