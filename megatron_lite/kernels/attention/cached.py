"""Attention of one new token to the keys and values of a text so far, for generation: no gradients."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def cached_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """query (b, n, 1, d), key and value (b, g, k, d) -> (b, n, 1, d): it looks at all the keys, whatever their order.

    The formula of `attention_blocks.py`, in the same dtypes. `scale` None: 1 / sqrt(d).
    """
    (b, n, _, d), g = query.shape, key.shape[1]
    scale = 1 / math.sqrt(d) if scale is None else scale
    wide = torch.promote_types(query.dtype, torch.float32)
    narrow = wide if query.dtype == torch.float16 and not query.is_cuda else query.dtype
    scores = (query.to(wide) * scale).reshape(b, g, n // g, d) @ key.to(wide).transpose(2, 3)
    context = scores.softmax(dim=-1).to(narrow) @ value.to(narrow)
    return context.reshape(b, n, 1, d).to(query.dtype)
