"""From the fused projection to query, key and value, with rotary positions (Su et al. 2021, half-split layout).

For a head x = [a, b] at position p with angles p * base^(-2 j / d):   y = [a cos - b sin, b cos + a sin].
The backward is the rotation by the opposite angle.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.kernels.jit import cdiv, jit, next_power_of_2, tl


def rotary_table(length: int, kv_channels: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every angle, (length, d / 2) in fp32."""
    exponents = torch.arange(0, kv_channels, 2, dtype=torch.float32, device=device) / kv_channels
    # Times the inverse, not divided by: the last bit of an angle counts at distant positions, and others have it so.
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * (1.0 / base**exponents)
    return angles.cos(), angles.sin()


def _rotate(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor) -> None:
    """target (b, s, n, d), which may be the source itself, = source rotated in fp32; cos and sin (s, 1, d / 2)."""
    if source.dtype != torch.float32:
        single = source.float()
        _rotate(single, single, cos, sin)
        target.copy_(single)
        return
    a, b = source.chunk(2, dim=-1)
    target_a, target_b = target.chunk(2, dim=-1)
    rest = a * sin
    torch.mul(a, cos, out=target_a).addcmul_(b, sin, value=-1)
    torch.addcmul(rest, b, cos, out=target_b)


def _put_together(grads: tuple[Tensor, ...], target: Tensor, table: tuple[Tensor, Tensor] | None) -> None:
    """Gradients of query, key and value, (b, n or g, s, d), side by side in target (b, s, n + 2 g, d), rotated back."""
    parts = zip(target.split([grad.shape[1] for grad in grads], dim=2), grads, (True, True, False), strict=True)
    for part, grad, rotated in parts:
        source = grad.transpose(1, 2)  # (b, s, heads, d)
        if rotated and table is not None:
            cos, sin = (angles[: target.shape[1], None] for angles in table)
            _rotate(source, part, cos, -sin)
        else:
            part.copy_(source)


@jit
def _rotate_kernel(
    heads, cos, sin, length, rotated, stride,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """In place, HEADS of the first `rotated` heads of one token in a program; `stride` from token to token."""
    token, half = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    angle = tl.program_id(0) % length * (CHANNELS // 2) + half
    turn = half < CHANNELS // 2
    c, s = tl.load(cos + angle, mask=turn, other=0.0)[None, :], tl.load(sin + angle, mask=turn, other=0.0)[None, :]
    inside = (head < rotated)[:, None] & turn[None, :]
    pointers = heads + token * stride + head[:, None] * CHANNELS + half[None, :]
    a = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(pointers + CHANNELS // 2, mask=inside, other=0.0).to(tl.float32)
    tl.store(pointers, (a * c - b * s).to(heads.dtype.element_ty), mask=inside)
    tl.store(pointers + CHANNELS // 2, (b * c + a * s).to(heads.dtype.element_ty), mask=inside)


@jit
def _load_heads(pointer, sample, position, head, count, half, stride_b, stride_n, stride_s, stride_d,
                CHANNELS: tl.constexpr):  # fmt: skip
    """Both halves of those of `head` that are in (b, count, s, d), whatever its strides; zero for the others."""
    inside = ((head >= 0) & (head < count))[:, None] & (half < CHANNELS // 2)[None, :]
    pointers = pointer + sample * stride_b + position * stride_s + head[:, None] * stride_n + half[None, :] * stride_d
    a = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    return a, tl.load(pointers + CHANNELS // 2 * stride_d, mask=inside, other=0.0).to(tl.float32)


@jit
def _put_together_kernel(
    query, key, value, target, cos, sin, length, num_heads, head_groups,
    query_b, query_n, query_s, query_d, key_b, key_n, key_s, key_d, value_b, value_n, value_s, value_d,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """HEADS of the n + 2 g heads of one token in a program; of the three sources each gives those that it has."""
    token, half = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    sample, position = token // length, token % length
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    a, b = _load_heads(query, sample, position, head, num_heads, half, query_b, query_n, query_s, query_d, CHANNELS)
    head_of_key = head - num_heads
    more, others = _load_heads(
        key, sample, position, head_of_key, head_groups, half, key_b, key_n, key_s, key_d, CHANNELS
    )  # fmt: skip
    a, b = a + more, b + others
    angle, turn = position * (CHANNELS // 2) + half, half < CHANNELS // 2
    c, s = tl.load(cos + angle, mask=turn, other=0.0)[None, :], tl.load(sin + angle, mask=turn, other=0.0)[None, :]
    a, b = a * c + b * s, b * c - a * s
    head_of_value = head_of_key - head_groups
    more, others = _load_heads(
        value, sample, position, head_of_value, head_groups, half, value_b, value_n, value_s, value_d, CHANNELS
    )  # fmt: skip
    inside = (head_of_value < head_groups)[:, None] & (half < CHANNELS // 2)[None, :]
    pointers = target + (token * (num_heads + 2 * head_groups) + head[:, None]) * CHANNELS + half[None, :]
    tl.store(pointers, (a + more).to(target.dtype.element_ty), mask=inside)
    tl.store(pointers + CHANNELS // 2, (b + others).to(target.dtype.element_ty), mask=inside)


def _tile(heads: int, channels: int) -> tuple[int, int]:
    """Heads and pairs of channels in a program: about 1024 pairs, 8 for each of its 128 threads."""
    half = next_power_of_2(channels // 2)
    return min(next_power_of_2(heads), max(1024 // half, 1)), half


def _triton_rotate(heads: Tensor, rotated: int, table: tuple[Tensor, Tensor]) -> None:
    """The first `rotated` heads of heads (b, s, n + 2 g, d), which is contiguous, in place."""
    batch, length, count, channels = heads.shape
    tile, half = _tile(rotated, channels)
    _rotate_kernel[(batch * length, cdiv(rotated, tile))](
        heads, *table, length, rotated, count * channels, CHANNELS=channels, HEADS=tile, HALF=half, num_warps=4
    )


def _triton_put_together(grads: tuple[Tensor, ...], target: Tensor, table: tuple[Tensor, Tensor]) -> None:
    batch, length, count, channels = target.shape
    tile, half = _tile(count, channels)
    num_heads, head_groups, _ = (grad.shape[1] for grad in grads)
    strides = [stride for grad in grads for stride in grad.stride()]
    _put_together_kernel[(batch * length, cdiv(count, tile))](
        *grads, target, *table, length, num_heads, head_groups, *strides,
        CHANNELS=channels, HEADS=tile, HALF=half, num_warps=4,
    )  # fmt: skip


def rotate_in_place(heads: Tensor, rotated: int, table: tuple[Tensor, Tensor] | None, triton: bool = False) -> None:
    """Rotate the first `rotated` heads of each token of heads (b, s, n, d); nothing without a table."""
    if table is not None and triton:
        _triton_rotate(heads, rotated, table)
    elif table is not None:
        cos, sin = (angles[: heads.shape[1], None] for angles in table)
        _rotate(heads[:, :, :rotated], heads[:, :, :rotated], cos, sin)


def put_together(
    grads: tuple[Tensor, ...], target: Tensor, table: tuple[Tensor, Tensor] | None, triton: bool = False
) -> None:
    """Gradients of query, key and value, (b, n or g, s, d), side by side in target (b, s, n + 2 g, d), rotated back."""
    if triton and table is not None:
        _triton_put_together(grads, target, table)
    else:
        _put_together(grads, target, table)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projection: Tensor, num_heads: int, head_groups: int, table: tuple[Tensor, Tensor] | None,
        triton: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        ctx.table, ctx.triton = table, triton
        heads = projection.unflatten(-1, (num_heads + 2 * head_groups, -1))  # (b, s, n + 2 g, d)
        rotate_in_place(heads, num_heads + head_groups, table, triton)
        query, key, value = heads.split([num_heads, head_groups, head_groups], dim=2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        batch, _, length, channels = grads[0].shape
        grad = grads[0].new_empty(batch, length, sum(part.shape[1] for part in grads), channels)
        put_together(grads, grad, ctx.table, ctx.triton)
        return grad.flatten(2), None, None, None, None


def split_heads(
    projection: Tensor, num_heads: int, head_groups: int, table: tuple[Tensor, Tensor] | None, triton: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(b, s, (n + 2 g) d) -> query (b, n, s, d), key (b, g, s, d), value (b, g, s, d).

    `table` (from `rotary_table`) rotates queries and keys; None leaves them. All three are views of the projection,
    which nothing else may read any more: a rotated copy would be kept for the backward beside it.
    """
    return _SplitHeads.apply(projection, num_heads, head_groups, table, triton)
