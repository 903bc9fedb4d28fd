"""Attention by kernels of torch and cuDNN on a GPU. Each takes query (b, n, s, d) and keys (b, g, s, d) as they are,
views of one projection with d side by side in memory, and returns (b, n, s, d), (b, s, n, d) in memory. A `scale` of
None is 1 / sqrt(d).

Nothing here reads the host: borders of documents come as a tensor, and their greatest length as a number.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

FLEX_BLOCK = 128  # positions on a side of the blocks of flex_attention's masks


def fused_attention(query: Tensor, key: Tensor, value: Tensor, backend: str, scale: float | None = None) -> Tensor:
    """Full causal attention by "cudnn" or "flash"; any other kernel than that is an error."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    grouped = query.shape[1] != key.shape[1]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if backend == "cudnn" else SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    starts: Tensor | None,
    longest: int,
    scale: float | None = None,
) -> Tensor:
    """`starts` (documents + 1,) int32 in the flattened (b s,) micro-batch; None: samples are documents."""
    b, n, s, _ = query.shape
    if starts is None:
        starts = torch.arange(0, (b + 1) * s, s, dtype=torch.int32, device=query.device)
        longest = s
    varlen_attn, is_told_of_groups = _varlen()
    grouped = {"enable_gqa": n != key.shape[1]} if is_told_of_groups else {}
    rows = [heads.transpose(1, 2).flatten(0, 1) for heads in (query, key, value)]  # (b s, heads, d), views
    # Of (left, right) neighbours besides oneself; (-1, 0) is all that came before.
    reach = (-1, 0) if window is None or window >= longest else (window - 1, 0)
    output: Tensor = varlen_attn(*rows, starts, starts, longest, longest, scale=scale, window_size=reach, **grouped)
    return output.unflatten(0, (b, s)).transpose(1, 2)


@functools.cache
def _varlen() -> tuple[Callable[..., Any], bool]:
    """torch's function, and whether it wants to be told of fewer key heads: torch 2.11 takes them silently."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, "enable_gqa" in inspect.signature(varlen_attn).parameters


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, starts: Tensor | None, scale: float | None = None
) -> Tensor:
    """As `varlen_attention`, by torch's compiled flex_attention."""
    b, n, s, _ = query.shape
    lowest = lowest_keys(starts, b, s, window, query.device)

    def allowed(sample: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column <= row) & (column >= lowest[sample, row])

    from torch.nn.attention.flex_attention import BlockMask

    counts, columns, full_counts, full_columns = block_columns(lowest, FLEX_BLOCK)
    mask = BlockMask.from_kv_blocks(
        counts, columns, full_counts, full_columns, BLOCK_SIZE=FLEX_BLOCK, mask_mod=allowed, seq_lengths=(s, s)
    )
    return _compiled_flex()(query, key, value, block_mask=mask, scale=scale, enable_gqa=n != key.shape[1])


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention import flex_attention as module

    return torch.compile(module.flex_attention, dynamic=False)


def lowest_keys(starts: Tensor | None, b: int, s: int, window: int | None, device: torch.device) -> Tensor:
    """(b, s) int32: the first key of its sample that each position looks at."""
    positions = torch.arange(s, dtype=torch.int32, device=device).expand(b, s)
    lowest = torch.zeros_like(positions)
    if starts is not None:
        flat = torch.arange(b * s, dtype=torch.int32, device=device)
        own = starts[torch.searchsorted(starts, flat, right=True) - 1]  # where each position's document begins
        lowest = (own - flat).view(b, s) + positions
    return lowest if window is None else torch.maximum(lowest, positions - (window - 1))


def block_columns(lowest: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of (b, s) lowest keys, which blocks of keys each block of rows looks at: in part, and in full.

    Returns counts (b, 1, blocks) and columns (b, 1, blocks, blocks) of both kinds, int32; of the columns of a row of
    blocks the first `count` are in use. A block is full if all its rows look at all its keys.
    """
    b, s = lowest.shape
    blocks = -(-s // size)
    index = torch.arange(blocks, dtype=torch.int32, device=lowest.device)
    # What is lowest never falls from one row to the next: first and last row decide for a block.
    first = lowest[:, ::size] // size
    last = lowest[:, (index.long() * size + size - 1).clamp_(max=s - 1)]
    full_first = torch.minimum((last + size - 1) // size, index)  # the first block of keys that the last row sees whole
    columns = index.expand(b, blocks, blocks)
    # In part: from `first` to before `full_first`, and the diagonal; in full: between them.
    before = full_first - first
    partial = torch.where(columns < before[..., None], first[..., None] + columns, index[:, None])
    full = torch.minimum(full_first[..., None] + columns, index[-1:])
    parts = (before + 1, partial, index - full_first, full)
    return tuple(part.to(torch.int32).unsqueeze(1).contiguous() for part in parts)  # type: ignore[return-value]
