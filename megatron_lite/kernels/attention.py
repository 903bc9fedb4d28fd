"""Causal attention: softmax(q k^T / sqrt(d)) v over the positions up to one's own, or only the last `window`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.kernels.dropout import dropout


@dataclass(frozen=True)
class Documents:
    """The documents that a micro-batch is packed from. None of them spans two samples."""

    starts: Tensor  # (documents + 1,) int32, on the device: first position of each in the flattened (b s,), then b s
    lengths: tuple[int, ...]  # the same as lengths, on the host


def attention(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, dropout_p: float, dropout_seed: int | None,
    documents: Documents | None = None,
) -> Tensor:
    """query (b, n, s, d), key and value (b, g, s, d) -> (b, n, s, d); head i uses key/value head i // (n / g)."""
    if documents is not None:
        rows, start, row = [], 0, 0
        pieces: list[Tensor] = []
        for length in documents.lengths:
            here = [x[row : row + 1, :, start : start + length] for x in (query, key, value)]
            pieces.append(attention(here[0], here[1], here[2], window, dropout_p, dropout_seed))
            start += length
            if start == query.shape[2]:
                rows.append(torch.cat(pieces, 2))
                pieces, start, row = [], 0, row + 1
        return torch.cat(rows)
    if dropout_p > 0.0 and dropout_seed is not None:
        return _attention_with_dropout(query, key, value, window, dropout_p, dropout_seed)
    windowed = window is not None and window < query.shape[2]
    if query.is_cuda and (windowed or query.dtype == torch.float32):
        # The memory-efficient GPU kernel, the only one that takes masks or fp32, takes no groups. Without it torch
        # would write out all probabilities.
        key, value = _repeat_groups(query, key, value)
    grouped = query.shape[1] != key.shape[1]
    if window is None or not windowed:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    return torch.cat(
        [
            functional.scaled_dot_product_attention(
                query[:, :, start:end], key[:, :, low:end], value[:, :, low:end],
                attn_mask=_window_mask(start, end, low, window, query.device), enable_gqa=grouped,
            )
            for start, end, low in query_blocks(query.shape[2], window)
        ],
        dim=2,
    )  # fmt: skip


def _repeat_groups(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(b, g, s, d) -> (b, n, s, d): a key and value head for each query head."""
    repeats = query.shape[1] // key.shape[1]
    return key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)


def query_blocks(length: int, window: int) -> list[tuple[int, int, int]]:
    """Blocks of queries [start, end) with their first key: no mask is larger than (block, block + window)."""
    block = max(min(window, 1024), 128)
    return [(start, min(start + block, length), max(0, start - window + 1)) for start in range(0, length, block)]


def _window_mask(start: int, end: int, low: int, window: int | None, device: torch.device) -> Tensor:
    """True where query start + i may look at key low + j."""
    distance = torch.arange(start, end, device=device)[:, None] - torch.arange(low, end, device=device)
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _attention_with_dropout(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, dropout_p: float, dropout_seed: int
) -> Tensor:
    """The formula itself: seeded dropout needs the probabilities. Costs (b, n, s, s) memory."""
    length = query.shape[2]
    key, value = _repeat_groups(query, key, value)
    scores = (query @ key.transpose(-1, -2)).float() / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~_window_mask(0, length, 0, window, query.device), -math.inf)
    probabilities = scores.softmax(dim=-1).to(query.dtype)
    return dropout(probabilities, dropout_p, dropout_seed) @ value
