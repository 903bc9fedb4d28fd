"""Attention of the newest tokens to the keys and values of all tokens so far, for generation: no gradients.

The formula of `attention_blocks.py` in the same dtypes, a block of queries after the other, the whole batch at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_lite.kernels.attention_blocks import rows_of_a_block


def cached_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int | None = None, first: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """query (b, n, s, d), key and value (b, g, k, d), k >= s -> (b, n, s, d).

    Query i is at position k - s + i and looks at the keys up to there: at `window` of them at most, and at none before
    position first[sample] (`first` (b,) int64: what is left of it is padding). A query that is padding itself looks at
    itself alone, so that its output is finite. `scale` None: 1 / sqrt(d).
    """
    (b, n, s, d), (g, k) = query.shape, key.shape[1:3]
    assert s <= k and n % g == 0, f"{s} queries, {k} keys; {n} heads, {g} groups"
    scale = 1 / math.sqrt(d) if scale is None else scale
    wide = torch.promote_types(query.dtype, torch.float32)
    narrow = wide if query.dtype == torch.float16 and not query.is_cuda else query.dtype
    output = query.new_empty(b, s, n, d).transpose(1, 2)
    for start in range(0, s, rows_of_a_block(query.is_cuda)):
        rows = query[:, :, start : start + rows_of_a_block(query.is_cuda)]
        count, begin = rows.shape[2], k - s + start
        keys = slice(max(0, begin - window + 1) if window is not None else 0, begin + count)
        scores = (rows.to(wide) * scale).reshape(b, g, -1, d) @ key[:, :, keys].to(wide).transpose(2, 3)
        seen = _allowed(begin, count, keys, window, first, key.device)
        scores.view(b, g, n // g, count, -1).masked_fill_(~seen[:, None, None], -math.inf)
        weights = scores.softmax(dim=-1).to(narrow)
        output[:, :, start : start + count] = (weights @ value[:, :, keys].to(narrow)).view(b, n, count, d)
    return output


def _allowed(
    begin: int, count: int, keys: slice, window: int | None, first: Tensor | None, device: torch.device
) -> Tensor:
    """(b or 1, queries, keys): which of the queries from position `begin` on looks at which of the keys."""
    position = torch.arange(begin, begin + count, device=device)[:, None]
    column = torch.arange(keys.start, keys.stop, device=device)
    allowed = column <= position
    if window is not None:
        allowed &= column > position - window
    if first is None:
        return allowed[None]
    return (allowed & (column >= first[:, None, None])) | (column == position)
