"""Norms of every head's queries and keys (Henry et al. 2020; Dehghani et al. 2023), between projection and rotation.

    q, k, v = split(projection);   q = rotate(norm(q)),  k = rotate(norm(k))        one weight (d,) for all heads

The norms are those of `normalization.py`, over the d channels of each head. Kept for the backward: the projection, in
which v stays, one copy of q and k, which attention keeps, and the statistics. The gradients are put together as those
of a projection without norms; the norms' backward then takes place there, in memory that is there already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.kernels.normalization import (
    LARGEST_ROW,
    Kind,
    reference_backward,
    reference_forward,
    triton_backward,
    triton_forward,
)
from megatron_lite.kernels.rotary import put_together, rotate_in_place
from megatron_lite.parameter import Parameter


class _HeadNorms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        projection: Tensor,
        query_weight: Parameter | None,
        query_bias: Parameter | None,
        key_weight: Parameter | None,
        key_bias: Parameter | None,
        sizes: tuple[int, int],
        kind: Kind,
        table: tuple[Tensor, Tensor] | None,
        triton: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        projection = projection.contiguous()
        (batch, length, _), (num_heads, head_groups) = projection.shape, sizes
        heads = projection.unflatten(-1, (num_heads + 2 * head_groups, -1))  # (b, s, n + 2 g, d)
        normalized = heads.new_empty(batch, length, num_heads + head_groups, heads.shape[-1])
        ctx.parameters = ((query_weight, query_bias), (key_weight, key_bias))
        ctx.sizes, ctx.kind, ctx.table, ctx.triton = sizes, kind, table, triton
        norms_in_triton = triton and heads.shape[-1] <= LARGEST_ROW
        statistics: list[Tensor | None] = []
        pairs = zip(_parts(heads, sizes), _parts(normalized, sizes), ctx.parameters, strict=True)
        for source, target, (weight, bias) in pairs:
            if norms_in_triton:
                strides = heads[0, 0].numel(), normalized[0, 0].numel()
                statistics += triton_forward(
                    source, None, source, weight, bias, kind, target, heads=source.shape[2], strides=strides
                )
            else:
                output, mean, rstd = reference_forward(source, weight, bias, kind, source.dtype)
                target.copy_(output)
                statistics += mean, rstd
                del output
        rotate_in_place(normalized, num_heads + head_groups, table, triton)
        ctx.save_for_backward(projection, *statistics)
        query, key = normalized.split([num_heads, head_groups], dim=2)
        return query.transpose(1, 2), key.transpose(1, 2), heads[:, :, num_heads + head_groups :].transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        projection, *statistics = ctx.saved_tensors
        num_heads, head_groups = ctx.sizes
        heads = projection.unflatten(-1, (num_heads + 2 * head_groups, -1))
        grad = torch.empty_like(heads)
        put_together(grads, grad, ctx.table, ctx.triton)
        wanted = ctx.needs_input_grad[0]
        norms_in_triton = ctx.triton and heads.shape[-1] <= LARGEST_ROW
        parts = zip(_parts(heads, ctx.sizes), _parts(grad, ctx.sizes), ctx.parameters, (0, 2), strict=True)
        for source, part, (weight, bias), first in parts:
            mean, rstd = statistics[first : first + 2]
            if norms_in_triton:
                triton_backward(
                    part,
                    None,
                    source,
                    mean,
                    rstd,
                    weight,
                    bias,
                    ctx.kind,
                    part if wanted else None,
                    heads=source.shape[2],
                    stride=heads[0, 0].numel(),
                )
            else:
                result = reference_backward(part, None, source, mean, rstd, weight, bias, ctx.kind, wanted)
                if result is not None:
                    part.copy_(result)
                del result
        return grad.flatten(2) if wanted else None, *(None,) * 8


def _parts(heads: Tensor, sizes: tuple[int, int]) -> Iterator[Tensor]:
    """Of (b, s, n + g or more, d), views of queries (b, s, n, d) and keys (b, s, g, d)."""
    num_heads, head_groups = sizes
    yield heads[:, :, :num_heads]
    yield heads[:, :, num_heads : num_heads + head_groups]


def normalized_heads(
    projection: Tensor,
    num_heads: int,
    head_groups: int,
    table: tuple[Tensor, Tensor] | None,
    query: tuple[Parameter | None, Parameter | None],
    key: tuple[Parameter | None, Parameter | None],
    kind: Kind,
    triton: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(b, s, (n + 2 g) d) -> query (b, n, s, d) and key (b, g, s, d), normalized, then rotated, and value (b, g, s, d).

    `query`, `key`: weight and bias (d,) of the norms, or None. `table`: as of `rotary.split_heads`. Nothing else may
    write to the projection any more: the value is a view of it.
    """
    return _HeadNorms.apply(projection, *query, *key, (num_heads, head_groups), kind, table, triton)
