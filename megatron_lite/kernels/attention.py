"""Causal attention: softmax(q k^T / sqrt(d)) v over the positions up to one's own.

Or over the last `window` of them, or over those of one's own document only. Grouped queries share keys without copies
of them. Which implementation computes it, and what each can do, is in `attention_choice.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.kernels.attention_blocks import block_attention
from megatron_lite.kernels.attention_choice import choose_attention
from megatron_lite.kernels.attention_gpu import flex_attention, fused_attention, varlen_attention


@dataclass(frozen=True)
class Documents:
    """Where the documents of a micro-batch begin, if none may look at another. No document spans two samples."""

    starts: Tensor  # (documents + 1,) int32 on the device: first position in the flattened (b s,), at the end b s
    lengths: tuple[int, ...]  # the same as lengths, on the host


def attention(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, dropout_p: float, dropout_seed: int | None,
    *, backend: str = "auto", documents: Documents | None = None,
) -> Tensor:  # fmt: skip
    """query (b, n, s, d), key and value (b, g, s, d) -> (b, n, s, d); head i uses key/value head i // (n / g).

    `backend`: a name of `attention_choice.py`. With dropout, and for a single position, it is "math" in any case.

    Raises:
        UsageError: if the backend cannot do it.
    """
    length = query.shape[2]
    window = None if window is None or window >= length else window
    drops = dropout_p > 0.0 and dropout_seed is not None
    if backend == "auto":
        backend = choose_attention(
            "auto", query.device, query.dtype, window, documents is not None, query.shape[3],
            torch.are_deterministic_algorithms_enabled(), drops,
        )  # fmt: skip
    if backend == "math" or drops or length == 1:
        lengths = documents.lengths if documents is not None else None
        return block_attention(query, key, value, window, lengths, dropout_p, dropout_seed)
    starts = documents.starts if documents is not None else None
    if backend == "varlen":
        longest = max(documents.lengths) if documents is not None else length
        return varlen_attention(query, key, value, window, starts, longest)
    if backend == "flex":
        return flex_attention(query, key, value, window, starts)
    assert window is None and documents is None, f"{backend} attention takes neither windows nor documents"
    return fused_attention(query, key, value, backend)


@functools.cache
def works(backend: str, device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether a backend computes a small problem, forward and backward: a library may have reasons of its own not to.

    Waits for the device.
    """
    window = 16 if backend in ("varlen", "flex") else None
    projection = torch.zeros(1, 128, 4, head_size, dtype=dtype, device=device, requires_grad=True)
    query, key, value = (heads.transpose(1, 2) for heads in projection.split([2, 1, 1], dim=2))
    try:
        attention(query, key, value, window, 0.0, None, backend=backend).sum().backward()
        return projection.grad is not None and bool(projection.grad.isfinite().all())
    except RuntimeError:
        return False
