"""Per-head norms of queries and keys (Henry et al. 2020; Dehghani et al. 2023), between projection and rotation.

    q, k, v = split(projection);   q = rotate(norm(q)),  k = rotate(norm(k))        one weight (d,) for all heads

The norms are those of `normalization.py`, over the d channels of each head. Saved for the backward pass: the
projection, which contains v; one copy of q and k, which attention saves anyway; and the statistics. The backward pass
first joins the three gradients as for a projection without norms, then computes the norms' gradients in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.kernels.normalization import (
    LARGEST_ROW,
    Kind,
    Statistics,
    Weights,
    reference_backward,
    reference_forward,
    triton_backward,
    triton_forward,
)
from megatron_lite.kernels.rotary import Table, join_gradients, rotate_in_place
from megatron_lite.parameter import Parameter


class _Options(NamedTuple):
    """Arguments of `normalized_heads` that autograd does not track."""

    num_heads: int
    head_groups: int
    kind: Kind
    table: Table | None
    triton: bool

    def queries_and_keys(self, heads: Tensor) -> Iterator[Tensor]:
        """Yield queries (b, s, n, d) and keys (b, s, g, d) of heads (b, s, n + g or more, d), as views."""
        yield heads[:, :, : self.num_heads]
        yield heads[:, :, self.num_heads : self.num_heads + self.head_groups]


class _HeadNorms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        projection: Tensor,
        query_weight: Parameter | None,
        query_bias: Parameter | None,
        key_weight: Parameter | None,
        key_bias: Parameter | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        n, g, kind, table, triton = options
        projection = projection.contiguous()
        heads = projection.unflatten(-1, (n + 2 * g, -1))  # (b, s, n + 2 g, d)
        normalized = heads.new_empty(*heads.shape[:2], n + g, heads.shape[-1])
        ctx.weights, ctx.options = (Weights(query_weight, query_bias), Weights(key_weight, key_bias)), options
        ctx.norms_in_triton = triton and heads.shape[-1] <= LARGEST_ROW
        saved: list[Tensor | None] = []
        parts = zip(options.queries_and_keys(heads), options.queries_and_keys(normalized), ctx.weights, strict=True)
        for x, target, weights in parts:
            if ctx.norms_in_triton:
                saved += triton_forward(x, None, x, weights, kind, target)
            else:
                y, statistics = reference_forward(x, weights, kind, x.dtype)
                target.copy_(y)
                saved += statistics
                del y
        rotate_in_place(normalized, n + g, table, triton)
        ctx.save_for_backward(projection, *saved)
        query, key = normalized.split([n, g], dim=2)
        return query.transpose(1, 2), key.transpose(1, 2), heads[:, :, n + g :].transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        projection, *saved = ctx.saved_tensors
        n, g, kind, table, triton = ctx.options
        heads = projection.unflatten(-1, (n + 2 * g, -1))
        grad = torch.empty_like(heads)
        join_gradients(grads, grad, table, triton)
        needs_dx = ctx.needs_input_grad[0]
        pairs = zip(ctx.options.queries_and_keys(heads), ctx.options.queries_and_keys(grad), strict=True)
        for i, (x, dy) in enumerate(pairs):
            statistics, weights = Statistics(*saved[2 * i : 2 * i + 2]), ctx.weights[i]
            if ctx.norms_in_triton:
                triton_backward(dy, None, x, statistics, weights, kind, dy if needs_dx else None)
            else:
                dx = reference_backward(dy, None, x, statistics, weights, kind, needs_dx)
                if dx is not None:
                    dy.copy_(dx)
                del dx
        return grad.flatten(2) if needs_dx else None, *(None,) * 5


def normalized_heads(
    projection: Tensor,
    num_heads: int,
    head_groups: int,
    table: Table | None,
    query: tuple[Parameter | None, Parameter | None],
    key: tuple[Parameter | None, Parameter | None],
    kind: Kind,
    triton: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(b, s, (n + 2 g) d) -> query (b, n, s, d) and key (b, g, s, d), normalized, then rotated, and value (b, g, s, d).

    `query`, `key`: weight and bias (d,) of the norms, or None. `table`: see `rotary.split_heads`. The value is a view
    of the projection, so nothing else may write to the projection afterwards.
    """
    return _HeadNorms.apply(projection, *query, *key, _Options(num_heads, head_groups, kind, table, triton))
