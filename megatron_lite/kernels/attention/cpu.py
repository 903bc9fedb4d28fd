"""Attention by torch's flash kernel for CPUs."""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Compute full causal attention of query (b, n, s, d) with key and value (b, g, s, d), all with stride 1 along d.

    Call the kernel of `scaled_dot_product_attention` without its switches, which take as long as a small problem. The
    bits are those of the last time with the same number of threads.
    """
    output: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, True, scale=scale
    )[0]
    return output  # laid out in memory as (b, s, n, d)
