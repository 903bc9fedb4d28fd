"""Causal attention, softmax(scale q k^T) v over the positions up to the query's own; scale is 1 /
sqrt(d) by default.

It may be limited to the last `window` positions or to the query's own document. Grouped queries
share keys without copies. `choice.py` lists the implementations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.kernels.attention.blocks import attention_in_blocks, capped, dtype_of_products
from megatron_lite.kernels.attention.choice import Work, choose_attention
from megatron_lite.kernels.attention.cpu import flash_attention
from megatron_lite.kernels.attention.gpu import (
    flex_attention,
    fused_attention,
    planned_attention,
    varlen_attention,
)
from megatron_lite.kernels.triton_support import tell
from megatron_lite.parameter import Parameter


@dataclass(frozen=True)
class Documents:
    """Document boundaries of a micro-batch, which attention must not cross. No document spans two
    samples."""

    starts: Tensor  # (documents + 1,) int32 on the device: first positions in the flattened (b s,), then b s
    lengths: tuple[int, ...]  # their lengths, on the host


def cached_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from one new token to all keys so far, in any order, with the dtypes of "math";
    without gradients.

    query (b, n, 1, d), key and value (b, g, k, d) -> (b, n, 1, d). The others: see `attention`.
    """
    (b, n, _, d), g = query.shape, key.shape[1]
    scale = 1 / math.sqrt(d) if scale is None else scale
    wide = torch.promote_types(query.dtype, torch.float32)
    narrow = dtype_of_products(query)
    scores = (query.to(wide) * scale).reshape(b, g, n // g, d) @ key.to(wide).transpose(2, 3)
    scores = capped(scores, soft_cap)
    if sinks is not None:
        sums = scores.logsumexp(-1, keepdim=True)
        share = (sums - sinks.to(wide).view(g, n // g, 1)).sigmoid_()
    scores = scores.softmax(dim=-1)
    scores = scores if sinks is None else scores.mul_(share)
    context = scores.to(narrow) @ value.to(narrow)
    return context.reshape(b, n, 1, d).to(query.dtype)


# -- every implementation
# --------------------------------------------------------------------------------------------


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
    soft_cap: float = 0.0,
    softmax_in_fp32: bool = False,
    sinks: Parameter | None = None,
) -> Tensor:
    """Compute attention of query (b, n, s, d) to key and value (b, g, s, d) -> (b, n, s, d).

    Head i uses key/value head i // (n / g).

    Args:
        window: number of keys that a query attends to; None: all.
        dropout_p: probability of dropping an attention weight, if there is a seed.
        backend: a name in `choice.py`. Dropout and single positions always use "math".
        scale: None: 1 / sqrt(d).
        soft_cap: bound on the scores; 0: none. Only for "math" and "flex".
        softmax_in_fp32: also keep the scores in fp32 in the backward pass; only for "math".
        sinks: a score for each head, (n,), that joins its softmax without a value.

    Raises:
        UsageError: if the backend does not support the inputs.
    """
    b, _, s, d = query.shape
    window = None if window is None or window >= s else window
    drops = dropout_p > 0.0 and dropout_seed is not None
    if backend == "auto":
        deterministic = torch.are_deterministic_algorithms_enabled()
        work = Work(
            query.dtype,
            d,
            window is not None,
            documents is not None,
            deterministic,
            drops,
            length=s,
            soft_cap=soft_cap,
            sinks=sinks is not None,
        )
        backend = choose_attention("auto", query.device, work)
    backend = "math" if drops or s == 1 else backend
    if query.is_meta:
        tell("attention", query, window or s, backend)
    if backend == "math":
        return attention_in_blocks(
            query,
            key,
            value,
            (s,) * b if documents is None else documents.lengths,
            window,
            (dropout_p, dropout_seed or 0) if drops else (0.0, 0),
            1 / math.sqrt(d) if scale is None else scale,
            softmax_in_fp32,
            soft_cap,
            sinks,
        )
    assert not softmax_in_fp32, f"{backend} attention has no option for its softmax"
    assert not soft_cap or backend == "flex", f"{backend} attention cannot cap scores"
    if query.is_meta and query.device.type != "cpu":
        return planned_attention(query, key, value)
    starts = documents.starts if documents is not None else None
    version = {"varlen": 2, "flash3": 3, "flash4": 4}.get(backend)
    if version is not None:
        longest = max(documents.lengths) if documents is not None else s
        return varlen_attention(query, key, value, window, starts, longest, scale, version, sinks)
    if backend == "flex":
        assert sinks is None, "flex attention has no sinks"
        return flex_attention(query, key, value, window, starts, scale, soft_cap)
    assert window is None and documents is None, (
        f"{backend} attention takes neither windows nor documents"
    )
    if backend == "flash" and query.device.type == "cpu":
        return flash_attention(query, key, value, scale, sinks)
    assert sinks is None, f"{backend} attention has no sinks"
    return fused_attention(query, key, value, backend, scale)
