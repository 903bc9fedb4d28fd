"""Attention by torch's flash kernel for CPUs, in pieces.

The kernel takes 512 keys at a time and skips none, so it computes the whole square of up to 512
queries and keys, of which causal attention needs half. Pieces save a quarter to 3/8 of the square
and take 0.7 to 1.0 of the time:

    forward: ranges of queries, each with the keys up to its end, masked
    backward: ranges of keys, each with the queries from its start on

Each output row comes from one piece. The gradients of a range of keys use the output and
log-sum-exp of whole rows, so dK and dV come from one piece, and dQ is the sum over the pieces. In
bf16 there is one piece: the sums would be rounded.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_lite.kernels.attention.blocks import add_sinks, sinks_gradient
from megatron_lite.parameter import Function, Parameter

QUERIES, KEYS = 64, 128  # in a piece, forward and backward
SHORTEST = 256  # positions
# With more queries the kernel uses larger blocks and skips more by itself.
LONGEST_FORWARD, LONGEST_BACKWARD = 512, 1024
LEAST_WORK = 2**25  # scores times channels; smaller problems gain less than the calls cost

aten = torch.ops.aten


def piece_length(scores: int, length: int, channels: int, backward: bool) -> int:
    """Return the queries per piece or, in the backward pass, the keys; `length` means a single
    piece.

    Args:
        scores: number of scores over all heads and samples.
    """
    longest = LONGEST_BACKWARD if backward else LONGEST_FORWARD
    if not SHORTEST <= length <= longest or scores * channels < LEAST_WORK:
        return length
    return KEYS if backward else QUERIES


class _FlashAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        sinks: Parameter | None,
    ) -> Tensor:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        b, n, s, d = query.shape
        rows = piece_length(b * n * s * s, s, d, backward=False) if query.dtype.itemsize > 2 else s
        if rows >= s:
            # (b, n, s, d), (b, n, s)
            output, sums = kernel(query, key, value, 0.0, True, scale=scale)
        else:
            output = query.new_empty(b, s, n, d).transpose(1, 2)
            sums = query.new_empty(b, s, n).transpose(1, 2)
            last = (s - 1) // rows * rows
            # of the last queries
            mask = query.new_full((rows, last + rows), -math.inf).triu_(last + 1)
            for start in range(0, s, rows):
                end = min(start + rows, s)
                output[:, :, start:end], sums[:, :, start:end] = kernel(
                    query[:, :, start:end],
                    key[:, :, :end],
                    value[:, :, :end],
                    attn_mask=mask[: end - start, last - start : last - start + end],
                    scale=scale,
                )
        if sinks is not None:
            sums = add_sinks(output, sums, sinks.detach())
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.scale, ctx.sinks = scale, sinks
        return output

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value, output, sums = ctx.saved_tensors
        do = do if do.stride(-1) == 1 else do.contiguous()
        if ctx.sinks is not None and ctx.sinks.requires_grad:
            ctx.sinks.accumulate(sinks_gradient(do, output, sums, ctx.sinks.detach()))
        (b, n, s, d), g = query.shape, key.shape[1]
        keys = piece_length(b * n * s * s, s, d, backward=True) if query.dtype.itemsize > 2 else s
        if keys >= s:
            found = kernel(do, query, key, value, output, sums, 0.0, True, scale=ctx.scale)
            return *found, None, None
        dquery, dkey, dvalue = (
            query.new_empty(b, s, heads, d).transpose(1, 2) for heads in (n, g, g)
        )
        for start in range(0, s, keys):
            seen, by = slice(start, min(start + keys, s)), slice(start, s)
            dq, dkey[:, :, seen], dvalue[:, :, seen] = kernel(
                do[:, :, by],
                query[:, :, by],
                key[:, :, seen],
                value[:, :, seen],
                output[:, :, by],
                sums[:, :, by],
                0.0,
                True,  # causal from the upper left corner: later queries attend to all of these keys
                scale=ctx.scale,
            )
            if start == 0:
                dquery.copy_(dq)
            else:
                dquery[:, :, by].add_(dq)
            del dq
        return dquery, dkey, dvalue, None, None


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    sinks: Parameter | None = None,
) -> Tensor:
    """Compute full causal attention of query (b, n, s, d) to key and value (b, g, s, d), all with
    stride 1 along d.

    Calls the kernel of `scaled_dot_product_attention` directly, because dispatch takes as long as a
    small problem. Results repeat bit for bit with the same number of threads.
    """
    return _FlashAttention.apply(
        query, key, value, scale, sinks
    )  # laid out in memory as (b, s, n, d)
