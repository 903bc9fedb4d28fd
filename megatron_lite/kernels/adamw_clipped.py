"""AdamW in two passes, because clipping an update needs every update before any weight changes.

    u = m^ / (sqrt(v^) + eps) + decay * w       m^, v^: the moments without their bias, see `adamw.py`

The first pass updates the moments in place and sums the squares of u. The second pass does w = w - lr * factor * u and
recomputes u, because keeping u would take as much memory as a moment; only the reference keeps u, in the memory of an
fp32 gradient. Every range of a shard has its own sum and its own factor: to clip every parameter by itself, each
parameter is a range.

The sums are in fp64 and depend only on the ranges, so they repeat bit for bit. In the kernels every program sums its
block, then one program per range sums the blocks. The reference sums short rows in fp32, and their sums in fp64
(`gradient_norm.py`).
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
    chunks,
    descend,
    direction,
    pointers,
    update_moments,
)
from megatron_lite.kernels.adamw_elements import (
    denominator,
    elements,
    load_gradient,
    load_moments,
    load_weights,
    nesterov_momentum,
    next_moments,
    store_moments,
    store_weights,
)
from megatron_lite.kernels.gradient_norm import squared_norm
from megatron_lite.kernels.triton_support import jit, next_power_of_2, tl

SUM_BLOCK = 1024


# -- by torch --------------------------------------------------------------------------------------------------------


def _keeps_update(shard: Shard) -> bool:
    """Whether the reference keeps u between the passes."""
    return shard.gradient.dtype == torch.float32


def _reference_moments(shard: Shard, ranges: Ranges, control: Control) -> Tensor:
    zero = control.skipped.double() * 0
    sums = [zero] * len(ranges.rows)
    for index, row, bounds in chunks(shard, ranges):
        step, decay = update_moments(shard, bounds, control), control.numbers.weight_decay * row.decay_scale
        u = shard.gradient[bounds] if _keeps_update(shard) else step
        torch.add(step, shard.weights.read(bounds), alpha=decay, out=u)
        sums[index] = sums[index] + squared_norm([u])
    return torch.where(control.skipped == 0, torch.stack(sums), zero)


def _reference_weights(shard: Shard, ranges: Ranges, factors: Tensor, control: Control) -> None:
    numbers = control.numbers
    for index, row, bounds in chunks(shard, ranges):
        weights, decay = shard.weights.read(bounds), numbers.weight_decay * row.decay_scale
        rate = factors[index] * (numbers.learning_rate * row.lr_scale)
        if _keeps_update(shard):
            descend(weights, shard.gradient[bounds], 0.0, rate, control)
        else:
            g = shard.gradient[bounds].float() / control.divisor
            descend(weights, direction(shard, bounds, g, control), decay, rate, control)
        shard.weights.write(weights, bounds)


# -- by Triton -------------------------------------------------------------------------------------------------------


@jit
def _row_of(block, step, rows, ROWS: tl.constexpr):
    """Return the row of the table, of perhaps hundreds, that a block lies in; ROWS: `rows` or the next power of 2."""
    others = tl.arange(0, ROWS)
    firsts = tl.load(step.places + 3 * others, mask=others < rows, other=2**62)
    return tl.sum((firsts <= block).to(tl.int32), axis=0) - 1


@jit
def _update(m, v, g, w, row, step, weight_decay, BETA1: tl.constexpr, EPS: tl.constexpr, NESTEROV: tl.constexpr):
    """Return u; g is read only with NESTEROV."""
    if NESTEROV:
        momentum = nesterov_momentum(m, g, step, BETA1)
    else:
        momentum = m / tl.load(step.corrections)
    return momentum / denominator(v, step, EPS) + weight_decay * tl.load(step.scales + 2 * row + 1) * w


@jit
def _moments_kernel(
    shard,
    step,
    sums_ptr,
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
    row = _row_of(block, step, rows, ROWS)
    offsets, mask = elements(block, row, step, ALIGNMENT, BLOCK)
    g = load_gradient(shard, step, offsets, mask)
    m, v = load_moments(shard, offsets, mask)
    w = load_weights(shard, offsets, mask)

    m, v = next_moments(m, v, g, BETA1, BETA2)
    u = _update(m, v, g, w, row, step, weight_decay, BETA1, EPS, NESTEROV)

    store_moments(m, v, shard, offsets, mask)
    u = tl.where(mask, u, 0.0).to(tl.float64)
    tl.store(sums_ptr + block, tl.sum(u * u, axis=0))


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
    shard,
    step,
    factors_ptr,
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
    row = _row_of(block, step, rows, ROWS)
    offsets, mask = elements(block, row, step, ALIGNMENT, BLOCK)
    m, v = load_moments(shard, offsets, mask)
    w = load_weights(shard, offsets, mask)
    g = m
    if NESTEROV:
        g = load_gradient(shard, step, offsets, mask)
    u = _update(m, v, g, w, row, step, weight_decay, BETA1, EPS, NESTEROV)
    w -= learning_rate * tl.load(step.scales + 2 * row) * tl.load(factors_ptr + row) * u
    store_weights(w, shard, offsets, mask)


def _launch_moments(shard: Shard, ranges: Ranges, control: Control) -> Tensor:
    numbers, rows = control.numbers, len(ranges.rows)
    sums = torch.empty(rows, dtype=torch.float64, device=shard.gradient.device)
    if ranges.blocks:
        block_sums = torch.empty(ranges.blocks, dtype=torch.float64, device=sums.device)
        _moments_kernel[(ranges.blocks,)](
            *pointers(shard, ranges, control),
            block_sums,
            float(numbers.weight_decay),
            rows,
            BETA1=numbers.beta1,
            BETA2=numbers.beta2,
            EPS=numbers.eps,
            NESTEROV=numbers.nesterov,
            ROWS=next_power_of_2(rows),
            ALIGNMENT=ALIGNMENT,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )
        _sums_kernel[(rows,)](block_sums, sums, ranges.places, ranges.longest, SUM_BLOCK, num_warps=4)
    return sums


def _launch_weights(shard: Shard, ranges: Ranges, factors: Tensor, control: Control) -> None:
    numbers, rows = control.numbers, len(ranges.rows)
    assert factors.dtype == torch.float32 and factors.shape == (rows,) and factors.is_contiguous()
    if ranges.blocks:
        _weights_kernel[(ranges.blocks,)](
            *pointers(shard, ranges, control),
            factors,
            float(numbers.learning_rate),
            float(numbers.weight_decay),
            rows,
            BETA1=numbers.beta1,
            EPS=numbers.eps,
            NESTEROV=numbers.nesterov,
            ROWS=next_power_of_2(rows),
            ALIGNMENT=ALIGNMENT,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


# -- the two passes --------------------------------------------------------------------------------------------------


def adamw_moments(shard: Shard, ranges: Ranges, control: Control, triton: bool = False) -> Tensor:
    """Update the moments in place and return the sum of u^2 over each range: (rows,), fp64; 0 if skipped."""
    run = _launch_moments if triton else _reference_moments
    return run(shard, ranges, control)


def adamw_weights(shard: Shard, ranges: Ranges, factors: Tensor, control: Control, triton: bool = False) -> None:
    """Update the weights in place after `adamw_moments`; `factors`, (rows,) fp32, multiply u."""
    run = _launch_weights if triton else _reference_weights
    run(shard, ranges, factors, control)
