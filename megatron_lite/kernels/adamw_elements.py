"""Loads, stores and arithmetic of one block of a shard, shared by the kernels of `adamw.py` and `adamw_clipped.py`."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron_lite.kernels.triton_support import jit, narrow, tl


class ShardPointers(NamedTuple):
    """Tensors of a shard as the kernels take them; split weights are int16."""

    master: Tensor | None
    rounded: Tensor | None
    remainder: Tensor | None
    gradient: Tensor
    m: Tensor
    v: Tensor


class StepPointers(NamedTuple):
    """The table of ranges and the device's numbers of one step as the kernels take them."""

    places: Tensor
    scales: Tensor
    divisor: Tensor
    corrections: Tensor
    skipped: Tensor


@jit
def elements(block, row, step, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr):
    """Return offsets, int64, of a block in a row of the table, and the mask of elements to update: none if skipped."""
    # Products with ALIGNMENT tell the compiler that accesses may be wide.
    start = tl.load(step.places + 3 * row + 1) * ALIGNMENT
    end = tl.load(step.places + 3 * row + 2) * ALIGNMENT
    offsets = start + (block - tl.load(step.places + 3 * row)) * BLOCK + tl.arange(0, BLOCK)
    return offsets, offsets < tl.where(tl.load(step.skipped) == 0, end, 0)


@jit
def load_gradient(shard, step, offsets, mask):
    """Return g in fp32."""
    return tl.load(shard.gradient + offsets, mask=mask, other=0.0).to(tl.float32) / tl.load(step.divisor)


@jit
def load_moments(shard, offsets, mask):
    """Return m and v."""
    return tl.load(shard.m + offsets, mask=mask, other=0.0), tl.load(shard.v + offsets, mask=mask, other=0.0)


@jit
def next_moments(m, v, g, BETA1: tl.constexpr, BETA2: tl.constexpr):
    """Return m and v after the update."""
    return BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g


@jit
def store_moments(m, v, shard, offsets, mask):
    """Store m and v."""
    tl.store(shard.m + offsets, m, mask=mask)
    tl.store(shard.v + offsets, v, mask=mask)


@jit
def denominator(v, step, EPS: tl.constexpr):
    """Return sqrt(v) / sqrt(1 - beta2^t) + eps."""
    return tl.sqrt(v) / tl.sqrt(tl.load(step.corrections + 1)) + EPS


@jit
def nesterov_momentum(m, g, step, BETA1: tl.constexpr):
    """Return what `nesterov` puts in place of m / (1 - beta1^t)."""
    return BETA1 / tl.load(step.corrections + 2) * m + (1 - BETA1) / tl.load(step.corrections) * g


@jit
def load_weights(shard, offsets, mask):
    """Return the fp32 weights."""
    if shard.remainder is None:
        return tl.load(shard.master + offsets, mask=mask, other=0.0)
    else:
        high = tl.load(shard.rounded + offsets, mask=mask, other=0).to(tl.int32) << 16
        low = tl.load(shard.remainder + offsets, mask=mask, other=0).to(tl.int32)
        return (high + low).to(tl.float32, bitcast=True)


@jit
def store_weights(w, shard, offsets, mask):
    """Store the fp32 weights in every form that is kept."""
    if shard.remainder is None:
        tl.store(shard.master + offsets, w, mask=mask)
        if shard.rounded is not None:
            tl.store(shard.rounded + offsets, narrow(w, shard.rounded.dtype.element_ty), mask=mask)
    else:
        # As in `weight_shard.split`: rounding a NaN with all payload bits set would overflow to zero.
        bits = tl.where(w == w, w.to(tl.int32, bitcast=True), 0x7FC00000)
        high = (bits + 0x8000) >> 16
        tl.store(shard.rounded + offsets, high.to(tl.int16), mask=mask)
        tl.store(shard.remainder + offsets, (bits - (high << 16)).to(tl.int16), mask=mask)
