"""Causal attention: softmax(scale q k^T) v over the positions up to one's own; the scale is 1 / sqrt(d) unless given.

Or over the last `window` of them, or over those of one's own document only. Grouped queries share keys without copies
of them. Which implementation computes it, and what each can do, is in `attention_choice.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.kernels.attention.blocks import block_attention
from megatron_lite.kernels.attention.choice import choose_attention
from megatron_lite.kernels.attention.gpu import flex_attention, fused_attention, varlen_attention


@dataclass(frozen=True)
class Documents:
    """Where the documents of a micro-batch begin, if none may look at another. No document spans two samples."""

    starts: Tensor  # (documents + 1,) int32 on the device: first position in the flattened (b s,), at the end b s
    lengths: tuple[int, ...]  # the same as lengths, on the host


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    dropout_p: float,
    dropout_seed: int | None,
    *,
    backend: str = "auto",
    documents: Documents | None = None,
    scale: float | None = None,
    softmax_in_fp32: bool = False,
) -> Tensor:
    """query (b, n, s, d), key and value (b, g, s, d) -> (b, n, s, d); head i uses key/value head i // (n / g).

    `backend`: a name of `attention_choice.py`. With dropout, and for a single position, it is "math" in any case.
    `scale` stands for 1 / sqrt(d). `softmax_in_fp32` is for "math" alone, whose scores then are in fp32 backward, too.

    Raises:
        UsageError: if the backend cannot do it.
    """
    length = query.shape[2]
    window = None if window is None or window >= length else window
    drops = dropout_p > 0.0 and dropout_seed is not None
    if backend == "auto":
        backend = choose_attention(
            "auto",
            query.device,
            query.dtype,
            window,
            documents is not None,
            query.shape[3],
            torch.are_deterministic_algorithms_enabled(),
            drops,
        )
    if backend == "math" or drops or length == 1:
        lengths = documents.lengths if documents is not None else None
        return block_attention(query, key, value, window, lengths, dropout_p, dropout_seed, scale, softmax_in_fp32)
    assert not softmax_in_fp32, f"{backend} attention has no softmax of its own"
    starts = documents.starts if documents is not None else None
    if backend == "varlen":
        longest = max(documents.lengths) if documents is not None else length
        return varlen_attention(query, key, value, window, starts, longest, scale)
    if backend == "flex":
        return flex_attention(query, key, value, window, starts, scale)
    assert window is None and documents is None, f"{backend} attention takes neither windows nor documents"
    return fused_attention(query, key, value, backend, scale)


@functools.cache
def works(backend: str, device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """Whether a backend computes a small problem as "math" does, forward and backward: a library may have reasons of
    its own not to. Waits for the device.
    """
    try:
        found, expected = (_small_problem(name, device, dtype, head_size) for name in (backend, "math"))
    except Exception:  # whatever it is, another backend may do
        return False
    return all(bool(((a - b).abs() <= 0.05 * b.abs().max()).all()) for a, b in zip(found, expected, strict=True))


def _small_problem(backend: str, device: torch.device, dtype: torch.dtype, head_size: int) -> tuple[Tensor, Tensor]:
    """Output and gradient in fp32, of 200 tokens and two heads that share their keys."""
    generator = torch.Generator(device).manual_seed(0)
    numbers = torch.randn(1, 200, 4, head_size, dtype=torch.float32, device=device, generator=generator)
    projection = numbers.to(dtype).requires_grad_()
    query, key, value = (heads.transpose(1, 2) for heads in projection.split([2, 1, 1], dim=2))
    output = attention(query, key, value, None, 0.0, None, backend=backend)
    output.backward(torch.ones_like(output))
    assert projection.grad is not None
    return output.detach().float(), projection.grad.float()
