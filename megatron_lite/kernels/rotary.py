"""From the fused projection to query, key and value, with rotary positions (Su et al. 2021, half-split layout).

For a head x = [a, b] at position p with angles p * base^(-2 j / d):   y = [a cos - b sin, b cos + a sin].
The backward is the rotation by the opposite angle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotary_table(length: int, kv_channels: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, (length, d / 2) in fp32."""
    exponents = torch.arange(0, kv_channels, 2, dtype=torch.float32, device=device) / kv_channels
    # Times the inverse, not divided by: the last bit of an angle counts at distant positions, and others have it so.
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * (1.0 / base**exponents)
    return angles.cos(), angles.sin()


def _rotate(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor) -> None:
    """target (b, s, n, d), which may be the source itself, = source rotated; cos and sin (s, d / 2)."""
    cos, sin = cos[:, None], sin[:, None]  # (s, 1, d / 2)
    a, b = source.chunk(2, dim=-1)
    target_a, target_b = target.chunk(2, dim=-1)
    turned = (a * cos).sub_(b * sin)
    torch.add(b * cos, a * sin, out=target_b)
    target_a.copy_(turned)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projection: Tensor, num_heads: int, head_groups: int, table: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.sizes, ctx.table = [num_heads, head_groups, head_groups], table
        heads = projection.unflatten(-1, (num_heads + 2 * head_groups, -1))  # (b, s, n + 2 g, d)
        if table is not None:
            length, rotated = projection.shape[1], heads[:, :, : num_heads + head_groups]
            _rotate(rotated, rotated, table[0][:length], table[1][:length])
        query, key, value = heads.split(ctx.sizes, dim=2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor) -> tuple[Tensor, None, None, None]:
        b, n, s, d = grad_query.shape
        grad = grad_query.new_empty(b, s, sum(ctx.sizes), d)
        parts = zip(grad.split(ctx.sizes, dim=2), (grad_query, grad_key, grad_value), strict=True)
        for index, (target, source) in enumerate(parts):
            source = source.transpose(1, 2)  # (b, s, heads, d)
            if ctx.table is None or index == 2:
                target.copy_(source)
            else:
                _rotate(source, target, ctx.table[0][:s], -ctx.table[1][:s])
        return grad.flatten(2), None, None, None


def split_heads(
    projection: Tensor, num_heads: int, head_groups: int, table: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(b, s, (n + 2 g) d) -> query (b, n, s, d), key (b, g, s, d), value (b, g, s, d).

    `table` (from `rotary_table`) rotates queries and keys; None leaves them. All three are views of the projection,
    which nothing else may read any more: a rotated copy would be kept for the backward beside it.
    """
    return _SplitHeads.apply(projection, num_heads, head_groups, table)
