"""Split the fused projection into query, key and value, with optional per-head norms and rotary
positions.

    q, k, v = split(projection);   q = rotate(norm(q)),  k = rotate(norm(k))

The norms of queries and keys (Henry et al. 2020; Dehghani et al. 2023; see `normalization.py`) act
on each head's d channels, with one weight (d,) for all heads; or on the n d channels of all heads
together (OLMo 2), which tensor-parallel ranks share.

Without norms nothing is saved, and the projection is rotated in place. With norms, the backward
pass needs the projection, which contains v, and the statistics; attention saves the new q and k
anyway. The backward pass first joins the three gradients, rotated back, then computes the norms'
gradients in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_lite.distributed.rank_group import Group
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
from megatron_lite.kernels.tensor_collectives import SUM
from megatron_lite.parameter import Function, Parameter


@dataclass(frozen=True)
class HeadKind(Kind):
    """Which norm of queries and keys to compute: of each head, or of all heads of a group's ranks.

    Ranks that share keys have equal ones, which count as often in the sum as in its size.
    """

    group: Group | None = None  # None: of each head

    @property
    def is_split(self) -> bool:
        """Whether several ranks compute one norm."""
        return self.group is not None and self.group.world_size > 1

    def mean(self, sums: Tensor, size: int) -> Tensor:
        """See `Kind.mean`."""
        if self.group is None:
            return super().mean(sums, size)
        self.group.all_reduce(sums, SUM).wait()
        return super().mean(sums, size * self.group.world_size)

    def rows(self, heads: Tensor) -> Tensor:
        """Return a view of (b, s, heads, d) whose rows are normalized."""
        return heads if self.group is None else heads.view(*heads.shape[:2], 1, -1)


class _SplitHeads(Function):
    @staticmethod
    def forward(
        ctx: Any,
        projection: Tensor,
        num_heads: int,
        head_groups: int,
        table: Table | None,
        triton: bool,
        kind: HeadKind | None,
        *parameters: Parameter | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sizes = (num_heads, head_groups, head_groups)
        ctx.sizes = sizes
        ctx.table = table
        ctx.triton = triton
        ctx.kind = kind
        # (b, s, n + 2 g, d)
        heads = projection.contiguous().view(*projection.shape[:-1], sum(sizes), -1)
        query, key, value = heads.split_with_sizes(sizes, 2)
        rotated = heads
        if kind is not None:
            rotated = heads.new_empty(*heads.shape[:2], num_heads + head_groups, heads.shape[-1])
            ctx.weights = (Weights(*parameters[:2]), Weights(*parameters[2:]))
            ctx.norms_in_triton = (
                triton and not kind.is_split and kind.rows(query).shape[-1] <= LARGEST_ROW
            )
            saved: list[Tensor | None] = []
            targets = rotated.split(sizes[:2], dim=2)
            for x, target, weights in zip((query, key), targets, ctx.weights, strict=True):
                x, target = kind.rows(x), kind.rows(target)
                if ctx.norms_in_triton:
                    saved += triton_forward(x, None, x, weights, kind, target)
                else:
                    y, statistics = reference_forward(x, weights, kind, x.dtype)
                    target.copy_(y)
                    saved += statistics
                    del y
            ctx.save_for_backward(heads, *saved)
            query, key = targets
        if table is not None:
            rotate_in_place(rotated, num_heads + head_groups, table, triton)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        batch, _, length, channels = grads[0].shape
        grad = grads[0].new_empty(batch, length, sum(ctx.sizes), channels)
        join_gradients(grads, grad, ctx.table, ctx.triton)
        needs_dx = ctx.needs_input_grad[0]
        if ctx.kind is not None:
            heads, *saved = ctx.saved_tensors
            pairs = zip(heads.split(ctx.sizes, dim=2), grad.split(ctx.sizes, dim=2), strict=True)
            # without the value
            for i, (weights, (x, dy)) in enumerate(zip(ctx.weights, pairs, strict=False)):
                x, dy = ctx.kind.rows(x), ctx.kind.rows(dy)
                statistics = Statistics(*saved[2 * i : 2 * i + 2])
                if ctx.norms_in_triton:
                    triton_backward(
                        dy, None, x, statistics, weights, ctx.kind, dy if needs_dx else None
                    )
                else:
                    dx = reference_backward(dy, None, x, statistics, weights, ctx.kind, needs_dx)
                    if dx is not None:
                        dy.copy_(dx)
                    del dx
        return grad.flatten(2) if needs_dx else None, *(None,) * (len(ctx.needs_input_grad) - 1)


def split_heads(
    projection: Tensor,
    num_heads: int,
    head_groups: int,
    table: Table | None,
    triton: bool = False,
    norms: tuple[Weights, Weights] | None = None,
    kind: HeadKind | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split (b, s, (n + 2 g) d) into query (b, n, s, d), key (b, g, s, d), value (b, g, s, d).

    The value, and without norms also query and key, are views of the projection, which is rotated
    in place to avoid saving a rotated copy. Nothing else may read or write the projection
    afterwards.

    Args:
        table: angles of queries and keys; None: no rotation.
        norms: weight and bias of the norms of queries and of keys, of one `kind`, (d,), or of
        this rank's channels; None: no norms.
    """
    parameters = () if norms is None else (*norms[0], *norms[1])
    return _SplitHeads.apply(projection, num_heads, head_groups, table, triton, kind, *parameters)
