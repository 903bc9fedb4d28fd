"""Flat ranges copied or added with a change of dtype, and fp32 values split into bf16 and a 16-bit remainder.

    copy: target = source        add: target = target + source, in fp32, rounded once
    split: rounded = bf16(value), half up; remainder = bits(value) - (bits(rounded) << 16); joined again: every bit

One memory pass each with torch's functions too, so that only the width of the accesses matters, and most copies of a
step stay torch's: between equal dtypes and from fp32 to a narrower one (weights into a buffer of ZeRO 3, shards that
accumulate) its accesses are wide, and filling with zero is a memset. The kernel is for large gradients in a narrower
dtype that are written or added to fp32 memory, where torch looks at the dtype of every single element; no step does
that where products accumulate in fp32 (see `linear.py`), so it is measured beside torch's, and not called. AdamW
writes its weights in both dtypes in one pass and needs no copy (see `adamw.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_lite.kernels.triton_support import cdiv, jit, tl

BLOCK = 1024
NUM_WARPS = 8  # 4 elements per thread: 16 bytes of fp32


def copy(target: Tensor, source: Tensor, triton: bool = False) -> None:
    """target = source, (n,) each, contiguous, in any floating dtypes."""
    if triton:
        _launch(target, source, accumulate=False)
    else:
        target.copy_(source)


def add(target: Tensor, source: Tensor, triton: bool = False) -> None:
    """target += source, (n,) each, contiguous, in any floating dtypes."""
    if triton:
        _launch(target, source, accumulate=True)
    else:
        target.add_(source)


def split(values: Tensor, rounded: Tensor, remainder: Tensor) -> None:
    """Write fp32 values (n,) as bf16, rounded half up in magnitude, and what is missing to their bits, int16.

    A NaN with all payload bits set (a GPU's own) would be rounded over the edge, to zero: every NaN becomes the same.
    """
    bits = torch.nan_to_num(values, math.nan, math.inf, -math.inf).view(torch.int32)
    high = bits.add(0x8000).bitwise_right_shift_(16)  # arithmetic: the remainder lies in [-0x8000, 0x7fff]
    rounded.view(torch.int16).copy_(high)
    remainder.copy_(bits.sub_(high.bitwise_left_shift_(16)))


def join(rounded: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 values that were split, in new memory."""
    return rounded.float().view(torch.int32).add_(remainder).view(torch.float32)


def _launch(target: Tensor, source: Tensor, accumulate: bool) -> None:
    numel = target.numel()
    assert source.numel() == numel and target.is_contiguous() and source.is_contiguous(), (target.shape, source.shape)
    if numel:
        _copy_kernel[(cdiv(numel, BLOCK),)](target, source, numel, accumulate, BLOCK, num_warps=NUM_WARPS)


@jit
def _copy_kernel(target_ptr, source_ptr, numel, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr) -> None:
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    values = tl.load(source_ptr + offsets, mask=mask).to(tl.float32)
    if ACCUMULATE:
        values += tl.load(target_ptr + offsets, mask=mask).to(tl.float32)
    tl.store(target_ptr + offsets, narrow(values, target_ptr.dtype.element_ty), mask=mask)


@jit
def narrow(values, dtype: tl.constexpr):
    """fp32 values of a kernel in another floating dtype, rounded to the nearest, ties to even.

    bf16 bit by bit, because Triton's interpreter would cut off instead: tests see what a GPU sees.
    """
    if dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits = tl.where(values == values, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(dtype)
