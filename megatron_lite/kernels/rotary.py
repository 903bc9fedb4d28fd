"""From the fused projection to query, key and value, with rotary positions (Su et al. 2021, half-split layout).

For a head x = [a, b, rest] at position p, where a and b have r / 2 channels each (r = d: all of them are turned), with
angles p * base^(-2 j / r) or those that `layers/rotary.py` makes of them:   y = [a cos - b sin, b cos + a sin, rest].
The backward is the rotation by the opposite angle.

A table of angles is cos and sin, each (positions, r / 2) in fp32, of which token i of every sample takes row i, or
(b, s, r / 2) with rows of its own for every token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.kernels.triton_support import cdiv, jit, next_power_of_2, tl

Table = tuple[Tensor, Tensor]


def wavelengths(channels: int, base: float, device: torch.device) -> Tensor:
    """base^(2 j / r), (r / 2,) in fp32: radians of position for one of angle."""
    exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels
    waves: Tensor = base**exponents
    return waves


def angle_table(frequencies: Tensor, length: int) -> Table:
    """cos and sin of the angles at positions 0 to length - 1; `frequencies` (r / 2,) are radians for each position."""
    # Times the inverse, not divided by: the last bit of an angle counts at distant positions, and others have it so.
    angles = torch.arange(length, dtype=torch.float32, device=frequencies.device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotary_table(length: int, channels: int, base: float, device: torch.device) -> Table:
    """As `angle_table`, of the plain frequencies base^(-2 j / r)."""
    return angle_table(1.0 / wavelengths(channels, base, device), length)


def _of_tokens(table: Table, length: int) -> Table:
    """cos and sin as they multiply heads (b, s, n, r / 2): (s, 1, r / 2) or (b, s, 1, r / 2)."""
    cos, sin = (angles[..., :length, None, :] for angles in table)
    return cos, sin


def _rotate(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor) -> None:
    """target (b, s, n, r), which may be the source itself, = source rotated in fp32; cos and sin (.., s, 1, r / 2)."""
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


def _reference_put_together(grads: tuple[Tensor, ...], target: Tensor, table: Table | None) -> None:
    parts = zip(target.split([grad.shape[1] for grad in grads], dim=2), grads, (True, True, False), strict=True)
    for part, grad, rotated in parts:
        source = grad.transpose(1, 2)  # (b, s, heads, d)
        turned = 2 * table[0].shape[-1] if rotated and table is not None else 0
        if turned and table is not None:
            cos, sin = _of_tokens(table, target.shape[1])
            _rotate(source[..., :turned], part[..., :turned], cos, -sin)
        if turned < part.shape[-1]:
            part[..., turned:].copy_(source[..., turned:])


@jit
def _rotate_kernel(
    heads,
    cos,
    sin,
    rows,
    rotated,
    stride,
    CHANNELS: tl.constexpr,
    TURNED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """In place, HEADS of the first `rotated` heads of one token in a program; `stride` from token to token, whose
    angles are in `rows` rows over and over again.
    """
    token, half = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    angle = tl.program_id(0) % rows * (TURNED // 2) + half
    turn = half < TURNED // 2
    c, s = tl.load(cos + angle, mask=turn, other=0.0)[None, :], tl.load(sin + angle, mask=turn, other=0.0)[None, :]
    inside = (head < rotated)[:, None] & turn[None, :]
    pointers = heads + token * stride + head[:, None] * CHANNELS + half[None, :]
    a = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(pointers + TURNED // 2, mask=inside, other=0.0).to(tl.float32)
    tl.store(pointers, (a * c - b * s).to(heads.dtype.element_ty), mask=inside)
    tl.store(pointers + TURNED // 2, (b * c + a * s).to(heads.dtype.element_ty), mask=inside)


@jit
def _channels(lane, CHANNELS: tl.constexpr, TURNED: tl.constexpr):
    """The two channels of a lane: two that turn together or, behind these pairs, one of each half of the rest.

    Of an odd number of channels the last lane has only the first of its two: lane < (CHANNELS + 1) // 2 have a first,
    lane < CHANNELS // 2 a second.
    """
    if TURNED == CHANNELS:
        first, second = lane, lane + CHANNELS // 2
    else:
        turns = lane < TURNED // 2
        first = tl.where(turns, lane, lane + TURNED // 2)
        second = first + tl.where(turns, TURNED // 2, (CHANNELS - TURNED + 1) // 2)
    return first, second


@jit
def _load_heads(
    pointer,
    sample,
    position,
    head,
    count,
    lane,
    stride_b,
    stride_n,
    stride_s,
    stride_d,
    CHANNELS: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Both channels of each lane, of those of `head` that are in (b, count, s, d), whatever its strides; zero for the
    others.
    """
    first, second = _channels(lane, CHANNELS, TURNED)
    inside = ((head >= 0) & (head < count))[:, None]
    rows = pointer + sample * stride_b + position * stride_s + head[:, None] * stride_n
    a = tl.load(rows + first[None, :] * stride_d, mask=inside & (lane < (CHANNELS + 1) // 2)[None, :], other=0.0)
    b = tl.load(rows + second[None, :] * stride_d, mask=inside & (lane < CHANNELS // 2)[None, :], other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@jit
def _put_together_kernel(
    query,
    key,
    value,
    target,
    cos,
    sin,
    length,
    rows,
    num_heads,
    head_groups,
    query_b,
    query_n,
    query_s,
    query_d,
    key_b,
    key_n,
    key_s,
    key_d,
    value_b,
    value_n,
    value_s,
    value_d,
    CHANNELS: tl.constexpr,
    TURNED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """HEADS of the n + 2 g heads of one token in a program; of the three sources each gives those that it has."""
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    sample, position = token // length, token % length
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    a, b = _load_heads(
        query, sample, position, head, num_heads, lane, query_b, query_n, query_s, query_d, CHANNELS, TURNED
    )
    head_of_key = head - num_heads
    more, others = _load_heads(
        key, sample, position, head_of_key, head_groups, lane, key_b, key_n, key_s, key_d, CHANNELS, TURNED
    )
    a, b = a + more, b + others
    turn, angle = lane < TURNED // 2, token % rows * (TURNED // 2) + lane
    c, s = tl.load(cos + angle, mask=turn, other=1.0)[None, :], tl.load(sin + angle, mask=turn, other=0.0)[None, :]
    if TURNED == CHANNELS:
        a, b = a * c + b * s, b * c - a * s
    else:  # never 0 times what is not turned: it may be infinite
        turned_a, turned_b = a * c + b * s, b * c - a * s
        a, b = tl.where(turn[None, :], turned_a, a), tl.where(turn[None, :], turned_b, b)
    head_of_value = head_of_key - head_groups
    more, others = _load_heads(
        value, sample, position, head_of_value, head_groups, lane, value_b, value_n, value_s, value_d, CHANNELS, TURNED
    )
    first, second = _channels(lane, CHANNELS, TURNED)
    inside = (head_of_value < head_groups)[:, None]
    heads = target + (token * (num_heads + 2 * head_groups) + head[:, None]) * CHANNELS
    a, b = (a + more).to(target.dtype.element_ty), (b + others).to(target.dtype.element_ty)
    tl.store(heads + first[None, :], a, mask=inside & (lane < (CHANNELS + 1) // 2)[None, :])
    tl.store(heads + second[None, :], b, mask=inside & (lane < CHANNELS // 2)[None, :])


def _tile(heads: int, pairs: int) -> tuple[int, int]:
    """Heads and pairs of channels in a program: about 1024 pairs, 8 for each of its 128 threads."""
    half = next_power_of_2(pairs)
    return min(next_power_of_2(heads), max(1024 // half, 1)), half


def _rows(table: Table, batch: int, length: int) -> int:
    """After how many tokens the rows of a table, which must be contiguous, begin again."""
    assert all(angles.is_contiguous() for angles in table) and table[0].shape[-2] >= length
    assert table[0].dim() == 2 or table[0].shape[:2] == (batch, length)
    return length if table[0].dim() == 2 else batch * length


def _triton_rotate(heads: Tensor, rotated: int, table: Table) -> None:
    batch, length, count, channels = heads.shape
    turned = 2 * table[0].shape[-1]
    tile, half = _tile(rotated, turned // 2)
    _rotate_kernel[(batch * length, cdiv(rotated, tile))](
        heads,
        *table,
        _rows(table, batch, length),
        rotated,
        count * channels,
        CHANNELS=channels,
        TURNED=turned,
        HEADS=tile,
        HALF=half,
        num_warps=4,
    )


def _triton_put_together(grads: tuple[Tensor, ...], target: Tensor, table: Table) -> None:
    batch, length, count, channels = target.shape
    tile, half = _tile(count, cdiv(channels, 2))
    num_heads, head_groups, _ = (grad.shape[1] for grad in grads)
    strides = [stride for grad in grads for stride in grad.stride()]
    _put_together_kernel[(batch * length, cdiv(count, tile))](
        *grads,
        target,
        *table,
        length,
        _rows(table, batch, length),
        num_heads,
        head_groups,
        *strides,
        CHANNELS=channels,
        TURNED=2 * table[0].shape[-1],
        HEADS=tile,
        HALF=half,
        num_warps=4,
    )


def rotate_in_place(heads: Tensor, rotated: int, table: Table | None, triton: bool = False) -> None:
    """The first `rotated` heads of heads (b, s, c, d), which is contiguous; nothing without a table."""
    if table is None:
        return
    if triton:
        _triton_rotate(heads, rotated, table)
    else:
        part = heads[:, :, :rotated, : 2 * table[0].shape[-1]]
        _rotate(part, part, *_of_tokens(table, heads.shape[1]))


def put_together(grads: tuple[Tensor, ...], target: Tensor, table: Table | None, triton: bool = False) -> None:
    """Gradients of query, key and value, (b, n or g, s, d), side by side in target (b, s, n + 2 g, d), rotated back."""
    if triton and table is not None:
        _triton_put_together(grads, target, table)
    else:
        _reference_put_together(grads, target, table)


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projection: Tensor, num_heads: int, head_groups: int, table: Table | None, triton: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
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
    projection: Tensor, num_heads: int, head_groups: int, table: Table | None, triton: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """(b, s, (n + 2 g) d) -> query (b, n, s, d), key (b, g, s, d), value (b, g, s, d).

    `table` rotates queries and keys; None leaves them. All three are views of the projection, which nothing else may
    read any more: a rotated copy would be kept for the backward beside it.
    """
    return _SplitHeads.apply(projection, num_heads, head_groups, table, triton)
