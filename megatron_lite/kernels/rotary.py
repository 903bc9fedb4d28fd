"""Rotary positions (Su et al. 2021, half-split layout) of the heads of a fused projection.

A head x = [a, b, rest] at position p, with r / 2 channels in a and in b (r = d: no rest), is rotated by the angles
p base^(-2 j / r), or by those of `model/rotary.py`:   y = [a cos - b sin, b cos + a sin, rest].
The backward pass rotates by the opposite angles.

A table of angles holds cos and sin in fp32: either (positions, r / 2), with row i for token i of every sample, or
(b, s, r / 2), with a row per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.kernels.triton_support import cdiv, jit, next_power_of_2, tl

Table = tuple[Tensor, Tensor]


def wavelengths(channels: int, base: float, device: torch.device) -> Tensor:
    """Return base^(2 j / r), (r / 2,) in fp32: positions per radian."""
    exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels
    waves: Tensor = base**exponents
    return waves


def angle_table(frequencies: Tensor, length: int) -> Table:
    """Return cos and sin of the angles at positions 0 to length - 1; frequencies (r / 2,) are radians per position."""
    # Multiply by the inverse wavelength instead of dividing: this matches other implementations bit for bit, and at
    # distant positions the last bit of an angle matters.
    angles = torch.arange(length, dtype=torch.float32, device=frequencies.device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotary_table(length: int, channels: int, base: float, device: torch.device) -> Table:
    """Return the angle table of the plain frequencies base^(-2 j / r)."""
    return angle_table(1.0 / wavelengths(channels, base, device), length)


# -- by torch --------------------------------------------------------------------------------------------------------


def _for_heads(table: Table, length: int) -> Table:
    """Return cos and sin shaped to multiply heads (b, s, n, r / 2): (s, 1, r / 2) or (b, s, 1, r / 2)."""
    cos, sin = (angles[..., :length, None, :] for angles in table)
    return cos, sin


def _rotate(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write x (b, s, n, r), rotated in fp32, to y, which may be x itself; cos and sin (.., s, 1, r / 2)."""
    if x.dtype != torch.float32:
        single = x.float()
        _rotate(single, single, cos, sin)
        y.copy_(single)
        return
    a, b = x.chunk(2, dim=-1)
    y_a, y_b = y.chunk(2, dim=-1)
    a_sin = a * sin
    torch.mul(a, cos, out=y_a).addcmul_(b, sin, value=-1)
    torch.addcmul(a_sin, b, cos, out=y_b)


# -- by Triton -------------------------------------------------------------------------------------------------------


@jit
def _rotate_kernel(
    heads_ptr,
    cos_ptr,
    sin_ptr,
    table_rows,
    rotated_heads,
    stride,
    CHANNELS: tl.constexpr,
    R: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Rotate in place HEADS of the first `rotated_heads` heads of one token per program.

    stride: elements between tokens. Token i takes row i modulo `table_rows` of the table.
    """
    token, half = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    angle = tl.program_id(0) % table_rows * (R // 2) + half
    rotates = half < R // 2
    cos = tl.load(cos_ptr + angle, mask=rotates, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=rotates, other=0.0)[None, :]
    inside = (head < rotated_heads)[:, None] & rotates[None, :]
    pointers = heads_ptr + token * stride + head[:, None] * CHANNELS + half[None, :]
    a = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(pointers + R // 2, mask=inside, other=0.0).to(tl.float32)
    tl.store(pointers, (a * cos - b * sin).to(heads_ptr.dtype.element_ty), mask=inside)
    tl.store(pointers + R // 2, (b * cos + a * sin).to(heads_ptr.dtype.element_ty), mask=inside)


@jit
def _channels(lane, CHANNELS: tl.constexpr, R: tl.constexpr):
    """Return a lane's two channels: a rotated pair or, after the pairs, one channel from each half of the rest.

    If the number of channels is odd, the last lane has no second one: lanes < (CHANNELS + 1) // 2 have a first
    channel, lanes < CHANNELS // 2 a second.
    """
    if R == CHANNELS:
        first, second = lane, lane + CHANNELS // 2
    else:
        rotates = lane < R // 2
        first = tl.where(rotates, lane, lane + R // 2)
        second = first + tl.where(rotates, R // 2, (CHANNELS - R + 1) // 2)
    return first, second


@jit
def _load_heads(pointer, strides, sample, position, head, count, lane, CHANNELS: tl.constexpr, R: tl.constexpr):
    """Load both channels of each lane from (b, count, s, d) with these strides; zero for heads out of range."""
    stride_b, stride_n, stride_s, stride_d = strides
    first, second = _channels(lane, CHANNELS, R)
    inside = ((head >= 0) & (head < count))[:, None]
    rows = pointer + sample * stride_b + position * stride_s + head[:, None] * stride_n
    a = tl.load(rows + first[None, :] * stride_d, mask=inside & (lane < (CHANNELS + 1) // 2)[None, :], other=0.0)
    b = tl.load(rows + second[None, :] * stride_d, mask=inside & (lane < CHANNELS // 2)[None, :], other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@jit
def _join_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    target_ptr,
    cos_ptr,
    sin_ptr,
    length,
    table_rows,
    num_heads,
    head_groups,
    query_strides,
    key_strides,
    value_strides,
    CHANNELS: tl.constexpr,
    R: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """HEADS of the n + 2 g heads of one token per program; each of the three gradients supplies its own heads."""
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    sample, position = token // length, token % length
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    key_head = head - num_heads
    value_head = key_head - head_groups
    a, b = _load_heads(query_ptr, query_strides, sample, position, head, num_heads, lane, CHANNELS, R)
    key_a, key_b = _load_heads(key_ptr, key_strides, sample, position, key_head, head_groups, lane, CHANNELS, R)
    a, b = a + key_a, b + key_b
    rotates, angle = lane < R // 2, token % table_rows * (R // 2) + lane
    cos = tl.load(cos_ptr + angle, mask=rotates, other=1.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=rotates, other=0.0)[None, :]
    if R == CHANNELS:
        a, b = a * cos + b * sin, b * cos - a * sin
    else:  # never multiply the rest by 0: it may be infinite
        rotated_a, rotated_b = a * cos + b * sin, b * cos - a * sin
        a, b = tl.where(rotates[None, :], rotated_a, a), tl.where(rotates[None, :], rotated_b, b)
    value_a, value_b = _load_heads(
        value_ptr, value_strides, sample, position, value_head, head_groups, lane, CHANNELS, R
    )
    first, second = _channels(lane, CHANNELS, R)
    inside = (value_head < head_groups)[:, None]
    heads = target_ptr + (token * (num_heads + 2 * head_groups) + head[:, None]) * CHANNELS
    a, b = (a + value_a).to(target_ptr.dtype.element_ty), (b + value_b).to(target_ptr.dtype.element_ty)
    tl.store(heads + first[None, :], a, mask=inside & (lane < (CHANNELS + 1) // 2)[None, :])
    tl.store(heads + second[None, :], b, mask=inside & (lane < CHANNELS // 2)[None, :])


def _tile(heads: int, pairs: int) -> tuple[int, int]:
    """Return heads and channel pairs per program: about 1024 pairs, 8 for each of 128 threads."""
    half = next_power_of_2(pairs)
    return min(next_power_of_2(heads), max(1024 // half, 1)), half


def _table_rows(table: Table, batch: int, length: int) -> int:
    """Return the number of tokens after which the rows of a contiguous table repeat."""
    assert all(angles.is_contiguous() for angles in table) and table[0].shape[-2] >= length
    assert table[0].dim() == 2 or table[0].shape[:2] == (batch, length)
    return length if table[0].dim() == 2 else batch * length


# -- both ------------------------------------------------------------------------------------------------------------


def rotate_in_place(heads: Tensor, rotated_heads: int, table: Table | None, triton: bool = False) -> None:
    """Rotate the first `rotated_heads` heads of a contiguous (b, s, c, d); no-op without a table."""
    if table is None:
        return
    (batch, length, count, channels), r = heads.shape, 2 * table[0].shape[-1]
    if not triton:
        x = heads[:, :, :rotated_heads, :r]
        _rotate(x, x, *_for_heads(table, length))
        return
    tile, half = _tile(rotated_heads, r // 2)
    rows, stride = _table_rows(table, batch, length), count * channels
    _rotate_kernel[(batch * length, cdiv(rotated_heads, tile))](
        heads, *table, rows, rotated_heads, stride, CHANNELS=channels, R=r, HEADS=tile, HALF=half, num_warps=4
    )


def join_gradients(grads: tuple[Tensor, ...], target: Tensor, table: Table | None, triton: bool = False) -> None:
    """Write gradients of query, key and value (b, n or g, s, d), rotated back, to target (b, s, n + 2 g, d)."""
    (batch, length, count, channels), r = target.shape, 0 if table is None else 2 * table[0].shape[-1]
    if not triton:
        parts = target.split([grad.shape[1] for grad in grads], dim=2)
        for part, grad, rotated in zip(parts, grads, (r, r, 0), strict=True):
            dy = grad.transpose(1, 2)  # (b, s, heads, d)
            if table is not None and rotated:
                cos, sin = _for_heads(table, length)
                _rotate(dy[..., :rotated], part[..., :rotated], cos, -sin)
            if rotated < channels:
                part[..., rotated:].copy_(dy[..., rotated:])
    elif table is None:
        torch.cat([grad.transpose(1, 2) for grad in grads], dim=2, out=target)  # one launch
    else:
        tile, half = _tile(count, cdiv(channels, 2))
        _join_kernel[(batch * length, cdiv(count, tile))](
            *grads,
            target,
            *table,
            length,
            _table_rows(table, batch, length),
            grads[0].shape[1],
            grads[1].shape[1],
            *(grad.stride() for grad in grads),
            CHANNELS=channels,
            R=r,
            HEADS=tile,
            HALF=half,
            num_warps=4,
        )
