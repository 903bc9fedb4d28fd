"""AdamW in two passes, for what has to know every update before it changes any weight: clipping the update.

    u = m^ / (sqrt(v^) + eps) + decay * w       m^, v^: the moments without their bias, see `adamw.py`

First pass: the moments are updated in place, and u is squared and added up. Second pass: w = w - lr * factor * u, with
u made again from what it was made of: keeping it would take as much memory as a moment. Only the reference keeps it, in
the memory of the gradient, where that is in fp32. The sums are kept apart for the ranges of a shard, which also have a
factor each: a range is a parameter where each of them is clipped by itself.

The sums are in fp64 and depend on the ranges alone: the same bits each time. Kernel: every program adds up its block,
then one for each range the blocks' sums. Reference: short rows in fp32, and their sums in fp64 (`gradient_norm.py`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.kernels.adamw import (
    ALIGNMENT,
    BLOCK,
    NUM_WARPS,
    Control,
    Ranges,
    Shard,
    ahead,
    chunks,
    descend,
    direction,
    elements,
    load_weights,
    pointers,
    store_weights,
    update_moments,
)
from megatron_lite.kernels.gradient_norm import squared_norm
from megatron_lite.kernels.triton_support import jit, next_power_of_2, tl

SUM_BLOCK = 1024


def adamw_moments(shard: Shard, ranges: Ranges, control: Control, triton: bool = False) -> Tensor:
    """Update the moments in place. Returns the sum of the squares of u in each range: (rows,), fp64; 0 if skipped."""
    if triton:
        return _launch_moments(shard, ranges, control)
    nothing = control.skipped.double() * 0
    sums = [nothing] * len(ranges.rows)
    for index, row, bounds in chunks(shard, ranges):
        step, decay = update_moments(shard, bounds, control), control.numbers.weight_decay * row.decay_scale
        update = shard.gradient[bounds] if _keeps(shard) else step
        torch.add(step, shard.weights.read(bounds), alpha=decay, out=update)
        sums[index] = sums[index] + squared_norm([update])
    return torch.where(control.skipped == 0, torch.stack(sums), nothing)


def adamw_weights(shard: Shard, ranges: Ranges, factors: Tensor, control: Control, triton: bool = False) -> None:
    """Update the weights in place, once `adamw_moments` has been here. factors: on u, (rows,) fp32."""
    if triton:
        _launch_weights(shard, ranges, factors, control)
        return
    numbers = control.numbers
    for index, row, bounds in chunks(shard, ranges):
        weights, decay = shard.weights.read(bounds), numbers.weight_decay * row.decay_scale
        rate = factors[index] * (numbers.learning_rate * row.lr_scale)
        if _keeps(shard):
            descend(weights, shard.gradient[bounds], 0.0, rate, control)
        else:
            gradient = shard.gradient[bounds].float() / control.divisor
            descend(weights, direction(shard, bounds, gradient, control), decay, rate, control)
        shard.weights.write(weights, bounds)


def _keeps(shard: Shard) -> bool:
    """Whether the reference keeps u between the passes."""
    return shard.gradient.dtype == torch.float32


def _launch_moments(shard: Shard, ranges: Ranges, control: Control) -> Tensor:
    numbers, rows = control.numbers, len(ranges.rows)
    sums = torch.empty(rows, dtype=torch.float64, device=shard.gradient.device)
    if ranges.blocks:
        block_sums = torch.empty(ranges.blocks, dtype=torch.float64, device=sums.device)
        _moments_kernel[(ranges.blocks,)](
            *pointers(shard),
            block_sums,
            ranges.places,
            ranges.scales,
            control.divisor,
            control.corrections,
            control.skipped,
            float(numbers.weight_decay),
            rows,
            numbers.beta1,
            numbers.beta2,
            numbers.eps,
            numbers.nesterov,
            next_power_of_2(rows),
            ALIGNMENT,
            BLOCK,
            num_warps=NUM_WARPS,
        )
        _sums_kernel[(rows,)](block_sums, sums, ranges.places, ranges.longest, SUM_BLOCK, num_warps=4)
    return sums


def _launch_weights(shard: Shard, ranges: Ranges, factors: Tensor, control: Control) -> None:
    numbers, rows = control.numbers, len(ranges.rows)
    assert factors.dtype == torch.float32 and factors.shape == (rows,) and factors.is_contiguous()
    if ranges.blocks:
        _weights_kernel[(ranges.blocks,)](
            *pointers(shard),
            factors,
            ranges.places,
            ranges.scales,
            control.divisor,
            control.corrections,
            control.skipped,
            float(numbers.learning_rate),
            float(numbers.weight_decay),
            rows,
            numbers.beta1,
            numbers.eps,
            numbers.nesterov,
            next_power_of_2(rows),
            ALIGNMENT,
            BLOCK,
            num_warps=NUM_WARPS,
        )


@jit
def _moments_kernel(
    master_ptr,
    rounded_ptr,
    remainder_ptr,
    gradient_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    sums_ptr,
    places_ptr,
    scales_ptr,
    divisor_ptr,
    corrections_ptr,
    skipped_ptr,
    weight_decay,
    rows,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    NESTEROV: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    row = _row_of(block, places_ptr, rows, ROWS)
    offsets, mask = elements(block, row, places_ptr, skipped_ptr, ALIGNMENT, BLOCK)
    gradient = tl.load(gradient_ptr + offsets, mask=mask, other=0.0).to(tl.float32) / tl.load(divisor_ptr)
    exp_avg = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0.0)
    weight = load_weights(master_ptr, rounded_ptr, remainder_ptr, offsets, mask)

    exp_avg = BETA1 * exp_avg + (1 - BETA1) * gradient
    exp_avg_sq = BETA2 * exp_avg_sq + (1 - BETA2) * gradient * gradient
    update = _direction(exp_avg, exp_avg_sq, gradient, corrections_ptr, BETA1, EPS, NESTEROV)
    update += weight_decay * tl.load(scales_ptr + 2 * row + 1) * weight

    tl.store(exp_avg_ptr + offsets, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq, mask=mask)
    update = tl.where(mask, update, 0.0).to(tl.float64)
    tl.store(sums_ptr + block, tl.sum(update * update, axis=0))


@jit
def _sums_kernel(block_sums_ptr, sums_ptr, places_ptr, longest, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0)
    first, end = tl.load(places_ptr + 3 * row), tl.load(places_ptr + 3 * row + 3)
    offsets = first + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, longest, BLOCK):
        total += tl.load(block_sums_ptr + start + offsets, mask=start + offsets < end, other=0.0)
    tl.store(sums_ptr + row, tl.sum(total, axis=0))


@jit
def _weights_kernel(
    master_ptr,
    rounded_ptr,
    remainder_ptr,
    gradient_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    factors_ptr,
    places_ptr,
    scales_ptr,
    divisor_ptr,
    corrections_ptr,
    skipped_ptr,
    learning_rate,
    weight_decay,
    rows,
    BETA1: tl.constexpr,
    EPS: tl.constexpr,
    NESTEROV: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    row = _row_of(block, places_ptr, rows, ROWS)
    offsets, mask = elements(block, row, places_ptr, skipped_ptr, ALIGNMENT, BLOCK)
    exp_avg = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0.0)
    weight = load_weights(master_ptr, rounded_ptr, remainder_ptr, offsets, mask)
    gradient = exp_avg
    if NESTEROV:
        gradient = tl.load(gradient_ptr + offsets, mask=mask, other=0.0).to(tl.float32) / tl.load(divisor_ptr)

    update = _direction(exp_avg, exp_avg_sq, gradient, corrections_ptr, BETA1, EPS, NESTEROV)
    update += weight_decay * tl.load(scales_ptr + 2 * row + 1) * weight
    weight -= learning_rate * tl.load(scales_ptr + 2 * row) * tl.load(factors_ptr + row) * update
    store_weights(weight, master_ptr, rounded_ptr, remainder_ptr, offsets, mask)


@jit
def _direction(
    exp_avg, exp_avg_sq, gradient, corrections_ptr, BETA1: tl.constexpr, EPS: tl.constexpr, NESTEROV: tl.constexpr
):
    """Of the step, without learning rate and decay. The gradient counts with NESTEROV only."""
    root = tl.sqrt(exp_avg_sq) / tl.sqrt(tl.load(corrections_ptr + 1))
    if NESTEROV:
        momentum = ahead(exp_avg, gradient, corrections_ptr, BETA1)
    else:
        momentum = exp_avg / tl.load(corrections_ptr)
    return momentum / (root + EPS)


@jit
def _row_of(block, places_ptr, rows, ROWS: tl.constexpr):
    """The row of the table that a block lies in, of perhaps hundreds; ROWS: their number, or the next power of 2."""
    others = tl.arange(0, ROWS)
    firsts = tl.load(places_ptr + 3 * others, mask=others < rows, other=2**62)
    return tl.sum((firsts <= block).to(tl.int32), axis=0) - 1
