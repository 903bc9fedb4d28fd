"""Rotary positions (Su et al. 2021, half-split layout) of the heads of a fused projection.

A head x = [a, b, rest] at position p, with r / 2 channels in a and in b (r = d: no rest), is
rotated by the angles
p base^(-2 j / r), or by those of `model/rotary.py`:   y = [a cos - b sin, b cos + a sin, rest].
The backward pass rotates by the opposite angles.

A table of angles contains cos and sin in fp32: either (positions, r / 2), with row i for token i of
every sample, or (b, s, r / 2), with a row per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.kernels.triton_support import cdiv, jit, next_power_of_2, tl

Table = tuple[Tensor, Tensor]


def wavelengths(channels: int, base: float, device: torch.device) -> Tensor:
    """Return base^(2 j / r), (r / 2,) in fp32: positions per radian."""
    exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=device) / channels
    return base**exponents


def angle_table(frequencies: Tensor, length: int) -> Table:
    """Return cos and sin of the angles at positions 0 to length - 1; frequencies (r / 2,) are
    radians per position."""
    # Multiply by the inverse wavelength instead of dividing: this matches other implementations bit
    # for bit, and at distant positions an angle's last bit matters.
    angles = (
        torch.arange(length, dtype=torch.float32, device=frequencies.device)[:, None] * frequencies
    )
    return angles.cos(), angles.sin()


# -- by torch
# --------------------------------------------------------------------------------------------------------


def _for_heads(table: Table, length: int) -> Table:
    """Return cos and sin shaped to multiply heads (b, s, n, r / 2): (s, 1, r / 2) or (b, s, 1, r /
    2)."""
    cos, sin = (angles[..., :length, None, :] for angles in table)
    return cos, sin


def _rotate(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Write x (b, s, n, r), rotated in fp32, to y, which may be x itself; cos and sin (.., s, 1, r
    / 2)."""
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


# -- by Triton
# -------------------------------------------------------------------------------------------------------


@jit
def _channels(lane, CHANNELS: tl.constexpr, R: tl.constexpr):
    """Return a lane's two channels: a rotated pair or, after the pairs, one channel from each half
    of the rest.

    If the number of channels is odd, the last lane has no second one: lanes < (CHANNELS + 1) // 2
    have a first channel, lanes < CHANNELS // 2 a second.
    """
    if R == CHANNELS:
        first, second = lane, lane + CHANNELS // 2
    else:
        rotates = lane < R // 2
        first = tl.where(rotates, lane, lane + R // 2)
        second = first + tl.where(rotates, R // 2, (CHANNELS - R + 1) // 2)
    return first, second


@jit
def _load_heads(
    pointer, strides, sample, position, head, count, lane, CHANNELS: tl.constexpr, R: tl.constexpr
):
    """Load both channels of each lane from (b, count, s, d) with these strides; zero for heads out
    of range."""
    stride_b, stride_n, stride_s, stride_d = strides
    first, second = _channels(lane, CHANNELS, R)
    inside = ((head >= 0) & (head < count))[:, None]
    rows = pointer + sample * stride_b + position * stride_s + head[:, None] * stride_n
    a = tl.load(
        rows + first[None, :] * stride_d,
        mask=inside & (lane < (CHANNELS + 1) // 2)[None, :],
        other=0.0,
    )
    b = tl.load(
        rows + second[None, :] * stride_d, mask=inside & (lane < CHANNELS // 2)[None, :], other=0.0
    )
    return a.to(tl.float32), b.to(tl.float32)


@jit
def _rotate_kernel(
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
    heads,
    target_heads,
    query_strides,
    key_strides,
    value_strides,
    BACK: tl.constexpr,
    CHANNELS: tl.constexpr,
    R: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Rotate HEADS of the n queries and g keys of one token per program, with BACK by the opposite
    angles.

    Keys and values, which are not rotated, may be None. The target (b, s, target_heads, d) may be
    the memory of the queries. Token i uses row i modulo `table_rows` of the table.
    """
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    sample, position = token // length, token % length
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    a, b = _load_heads(
        query_ptr, query_strides, sample, position, head, num_heads, lane, CHANNELS, R
    )
    if key_ptr is not None:
        key_head = head - num_heads
        key_a, key_b = _load_heads(
            key_ptr, key_strides, sample, position, key_head, head_groups, lane, CHANNELS, R
        )
        a, b = a + key_a, b + key_b
    rotates, angle = lane < R // 2, token % table_rows * (R // 2) + lane
    cos = tl.load(cos_ptr + angle, mask=rotates, other=1.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=rotates, other=0.0)[None, :]
    if BACK:
        sin = -sin
    rotated_a, rotated_b = a * cos - b * sin, b * cos + a * sin
    if R == CHANNELS:
        a, b = rotated_a, rotated_b
    else:  # never multiply the rest by 0: it may be infinite
        a, b = tl.where(rotates[None, :], rotated_a, a), tl.where(rotates[None, :], rotated_b, b)
    if value_ptr is not None:
        value_head = head - num_heads - head_groups
        value_a, value_b = _load_heads(
            value_ptr, value_strides, sample, position, value_head, head_groups, lane, CHANNELS, R
        )
        a, b = a + value_a, b + value_b
    first, second = _channels(lane, CHANNELS, R)
    inside = (head < heads)[:, None]
    target = target_ptr + (token * target_heads + head[:, None]) * CHANNELS
    a, b = a.to(target_ptr.dtype.element_ty), b.to(target_ptr.dtype.element_ty)
    tl.store(target + first[None, :], a, mask=inside & (lane < (CHANNELS + 1) // 2)[None, :])
    tl.store(target + second[None, :], b, mask=inside & (lane < CHANNELS // 2)[None, :])


def _launch(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    target: Tensor,
    table: Table,
    pairs: int,
    back: bool,
) -> None:
    """Rotate (b, heads, s, d) into the first heads of target (b, s, c, d). pairs: channel pairs
    that are written."""
    (batch, length, target_heads, channels), sources = target.shape, (query, key, value)
    assert all(angles.is_contiguous() for angles in table) and table[0].shape[-2] >= length
    assert table[0].dim() == 2 or table[0].shape[:2] == (batch, length)
    heads = sum(source.shape[1] for source in sources if source is not None)
    half = next_power_of_2(pairs)
    # about 1024 pairs per program, 8 per thread with 128 threads
    tile = min(next_power_of_2(heads), max(1024 // half, 1))
    _rotate_kernel[(batch * length, cdiv(heads, tile))](
        *sources,
        target,
        *table,
        length,
        length
        if table[0].dim() == 2
        else batch * length,  # tokens after which the table's rows repeat
        query.shape[1],
        0 if key is None else key.shape[1],
        heads,
        target_heads,
        *(None if source is None else source.stride() for source in sources),
        BACK=back,
        CHANNELS=channels,
        R=2 * table[0].shape[-1],
        HEADS=tile,
        HALF=half,
        num_warps=4,
    )


# -- both
# ------------------------------------------------------------------------------------------------------------


def rotate_in_place(heads: Tensor, rotated_heads: int, table: Table, triton: bool) -> None:
    """Rotate the first `rotated_heads` heads of a contiguous (b, s, c, d)."""
    x, r = heads[:, :, :rotated_heads], 2 * table[0].shape[-1]
    if triton:
        _launch(x.transpose(1, 2), None, None, heads, table, r // 2, back=False)
    else:
        _rotate(x[..., :r], x[..., :r], *_for_heads(table, heads.shape[1]))


def join_gradients(
    grads: tuple[Tensor, ...], target: Tensor, table: Table | None, triton: bool
) -> None:
    """Write the gradients of query, key and value (b, n or g, s, d), rotated back, to target (b, s,
    n + 2 g, d)."""
    if table is None:
        torch.cat([grad.transpose(1, 2) for grad in grads], dim=2, out=target)  # one launch
    elif triton:
        query, key, value = grads
        _launch(query, key, value, target, table, cdiv(target.shape[3], 2), back=True)
    else:
        r, (cos, sin) = 2 * table[0].shape[-1], _for_heads(table, target.shape[1])
        parts = target.split([grad.shape[1] for grad in grads], dim=2)
        for part, grad, rotated in zip(parts, grads, (r, r, 0), strict=True):
            dy = grad.transpose(1, 2)  # (b, s, heads, d)
            if rotated:
                _rotate(dy[..., :rotated], part[..., :rotated], cos, -sin)
            part[..., rotated:].copy_(dy[..., rotated:])
