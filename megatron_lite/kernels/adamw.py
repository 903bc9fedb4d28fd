"""AdamW (Loshchilov & Hutter 2019) over a flat shard, without temporaries in the kernel.

    g = gradient / divisor                     divisor = loss scale / clipping factor
    w = w - lr * decay * w
    m = beta1 * m + (1 - beta1) * g            v = beta2 * v + (1 - beta2) * g^2
    w = w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

in fp32, in the order of torch's fused AdamW. With `nesterov` (Dozat 2016, "Incorporating Nesterov
momentum into Adam", as in optax) the last line replaces m / (1 - beta1^t) by its next value if the
next gradient equals this one:

    beta1 * m / (1 - beta1^(t+1)) + (1 - beta1) * g / (1 - beta1^t)

Clipping updates requires all of them before any weight changes, hence two passes:

    u = m^ / (sqrt(v^) + eps) + decay * w       m^, v^: the moments without their bias

The first pass updates the moments in place and sums the squares of u. The second pass does w = w -
lr * factor * u and recomputes u, because storing u would take as much memory as a moment; only the
reference stores u, in the memory of an fp32 gradient. Each range of a shard has its own sum and
factor; to clip per parameter, make each one a range. The sums are in fp64 and depend only on the
ranges, so they repeat bit for bit. In the kernels every program sums its block, then one program
per range sums the blocks. The reference sums short rows in fp32, and their sums in fp64
(`gradient_norm.py`).

Gradients may have any floating dtype. A pass updates every form in which a `WeightShard` stores its
weights. If `skipped` is set, nothing is written.

A kernel is launched once per shard. A table has one row per range of the shard, with its
learning-rate scale and weight decay; blocks look up their row, and no block crosses a range
boundary. One launch per range would be as fast for large ranges, but for a small one, such as a
norm, the launch takes longer than the update. The learning rate is an fp32 argument: Triton
specializes only on integers, so no learning rate recompiles the kernel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.kernels.gradient_norm import squared_norm
from megatron_lite.kernels.triton_support import cdiv, jit, narrow, next_power_of_2, tl
from megatron_lite.kernels.weight_shard import WeightShard

# Ranges begin and end at multiples of this, so that the kernels can use wide accesses.
ALIGNMENT = 64
BLOCK = 1024
NUM_WARPS = 8  # 4 elements per thread: 16 bytes of fp32
SUM_BLOCK = 1024
# Elements that the reference updates at a time: few, to stay in a CPU's cache; many, to save
# launches on a GPU.
CPU_CHUNK_NUMEL, GPU_CHUNK_NUMEL = 2**17, 2**24


class Shard(NamedTuple):
    """One rank's shard: weights, gradient and moments, (n,) each."""

    weights: WeightShard
    gradient: Tensor  # the reference may unscale or overwrite it
    m: Tensor  # fp32
    v: Tensor  # fp32


class Range(NamedTuple):
    """Elements [start, end) of a shard that share learning-rate and weight-decay factors."""

    start: int
    end: int
    lr_scale: float
    decay_scale: float
    slot: int = 0  # index of its first parameter in the shard's layout
    counts: bool = (
        True  # whether this rank contributes its elements to global sums: see `zero.replicas`
    )


class Ranges:
    """All ranges of a shard, and the table that the kernels read."""

    def __init__(self, rows: Sequence[Range], device: torch.device) -> None:
        assert all(border % ALIGNMENT == 0 for row in rows for border in row[:2]), rows
        self.rows = rows
        counts = [cdiv(row.end - row.start, BLOCK) for row in rows]
        # number of blocks, in total and in the longest range
        self.blocks = sum(counts)
        self.longest = max(counts, default=0)
        places = [
            (sum(counts[:i]), row.start // ALIGNMENT, row.end // ALIGNMENT)
            for i, row in enumerate(rows)
        ]
        places.append((self.blocks, 0, 0))
        # (rows + 1, 3): first block, start and end in units of ALIGNMENT. The last row contains the
        # number of blocks.
        self.places = torch.tensor(places, dtype=torch.int64, device=device)
        # (rows, 2): lr_scale, decay_scale
        self.scales = torch.tensor([row[2:4] for row in rows], dtype=torch.float32, device=device)


@dataclass(frozen=True)
class StepNumbers:
    """Values for one update. Tensors are on the device, () in fp32; the host never reads them."""

    learning_rate: float
    weight_decay: float
    divisor: Tensor  # gradients are divided by it
    skipped: Tensor  # 1 to write nothing, else 0
    updates: Tensor  # good updates, including this one: Adam's t


@dataclass(frozen=True)
class Hyperparameters:
    """AdamW's hyperparameters for the whole run."""

    beta1: float
    beta2: float
    eps: float
    nesterov: bool = False


class Control:
    """All values for one update."""

    def __init__(self, step: StepNumbers, numbers: Hyperparameters) -> None:
        self.step = step
        self.numbers = numbers
        updates = step.updates
        rates = [math.log(beta) if beta else -math.inf for beta in (numbers.beta1, numbers.beta2)]
        exponents = [updates * rates[0], updates * rates[1], (updates + 1) * rates[0]]
        # 1 - beta1^t, 1 - beta2^t and 1 - beta1^(t + 1): (3,)
        self.corrections = torch.expm1(torch.stack(exponents)).neg_()
        # torch's fused update writes the divided gradients back; skip that for 1, which a CPU reads
        # for free.
        is_one = step.divisor.device.type == "cpu" and float(step.divisor) == 1.0
        self.grad_scale = None if is_one else step.divisor


# -- by torch
# --------------------------------------------------------------------------------------------------------


def chunks(
    rows: Sequence[Range], device: torch.device, whole: bool = False
) -> Iterator[tuple[int, Range, slice]]:
    """Yield index, range and bounds of chunks; `whole`: whole ranges, if the update needs no
    temporaries."""
    chunk_numel = CPU_CHUNK_NUMEL if device.type == "cpu" else GPU_CHUNK_NUMEL
    for index, row in enumerate(rows):
        step = row.end - row.start if whole else chunk_numel
        for start in range(row.start, row.end, step):
            yield index, row, slice(start, min(start + step, row.end))


def _fused_adamw(
    weights: Tensor,
    gradient: Tensor,
    shard: Shard,
    bounds: slice,
    rate: float,
    decay: float,
    control: Control,
) -> None:
    numbers = control.numbers
    torch._fused_adamw_(
        [weights],
        [gradient],
        [shard.m[bounds]],
        [shard.v[bounds]],
        [],
        [control.step.updates],
        lr=rate,
        beta1=numbers.beta1,
        beta2=numbers.beta2,
        weight_decay=decay,
        eps=numbers.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=control.grad_scale,
        found_inf=control.step.skipped,
    )


def _update_moments(shard: Shard, bounds: slice, control: Control) -> Tensor:
    """Update m and v, unscale an fp32 gradient, and return the direction of the step in new
    memory."""
    gradient = shard.gradient[bounds].float()
    step = torch.zeros_like(gradient)  # with learning rate -1, zero weights become the step
    _fused_adamw(step, gradient, shard, bounds, rate=-1.0, decay=0.0, control=control)
    return _direction(shard, bounds, gradient, control) if control.numbers.nesterov else step


def _direction(shard: Shard, bounds: slice, g: Tensor, control: Control) -> Tensor:
    """Return the step's direction from updated moments, in new memory, without learning rate and
    decay."""
    numbers, (correction1, correction2, next_correction1) = control.numbers, control.corrections
    m, root = shard.m[bounds], shard.v[bounds].sqrt()
    root.div_(correction2.sqrt()).add_(numbers.eps)
    if not numbers.nesterov:
        return torch.div(m, root, out=root).div_(correction1)
    step = g * ((1 - numbers.beta1) / correction1)
    return step.addcmul_(m, numbers.beta1 / next_correction1).div_(root)


def _descend(
    weights: Tensor, direction: Tensor, decay: float, rate: float | Tensor, control: Control
) -> None:
    """Compute weights -= rate * (direction + decay * weights) in place, unless skipped."""
    torch._fused_sgd_(
        [weights],
        [direction],
        [],
        weight_decay=decay,
        momentum=0.0,
        lr=rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=True,
        found_inf=control.step.skipped,
    )


# -- by Triton
# -------------------------------------------------------------------------------------------------------


class _Pointers(NamedTuple):
    """Tensors of a shard and a step as the kernels take them; split weights are int16."""

    master: Tensor | None
    rounded: Tensor | None
    remainder: Tensor | None
    gradient: Tensor
    m: Tensor
    v: Tensor
    places: Tensor
    scales: Tensor
    divisor: Tensor
    corrections: Tensor
    skipped: Tensor


@jit
def _load_weights(at, offsets, mask):
    """Return the fp32 weights."""
    if at.remainder is None:
        return tl.load(at.master + offsets, mask=mask, other=0.0)
    else:
        high = tl.load(at.rounded + offsets, mask=mask, other=0).to(tl.int32) << 16
        low = tl.load(at.remainder + offsets, mask=mask, other=0).to(tl.int32)
        return (high + low).to(tl.float32, bitcast=True)


@jit
def _store_weights(w, at, offsets, mask):
    """Store the fp32 weights in every form."""
    if at.remainder is None:
        tl.store(at.master + offsets, w, mask=mask)
        if at.rounded is not None:
            tl.store(at.rounded + offsets, narrow(w, at.rounded.dtype.element_ty), mask=mask)
    else:
        # As in `weight_at.split`: rounding a NaN with all payload bits set would overflow to zero.
        bits = tl.where(w == w, w.to(tl.int32, bitcast=True), 0x7FC00000)
        high = (bits + 0x8000) >> 16
        tl.store(at.rounded + offsets, high.to(tl.int16), mask=mask)
        tl.store(at.remainder + offsets, (bits - (high << 16)).to(tl.int16), mask=mask)


@jit
def _adamw_kernel(
    at,
    sums_ptr,
    factors_ptr,
    learning_rate,
    weight_decay,
    rows,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    NESTEROV: tl.constexpr,
    ONE_PASS: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Update one block per program. The only pass or, of two, the first with `sums_ptr` and the
    second with `factors_ptr`.

    ROWS: `rows` for the only pass, which has few; the next power of 2 for two passes, which may
    have hundreds.
    """
    block = tl.program_id(0)
    if ONE_PASS:
        row = 0
        for other in tl.static_range(1, ROWS):
            row += tl.where(block < tl.load(at.places + 3 * other), 0, 1)
    else:
        others = tl.arange(0, ROWS)
        firsts = tl.load(at.places + 3 * others, mask=others < rows, other=2**62)
        row = tl.sum((firsts <= block).to(tl.int32), axis=0) - 1
    # Products with ALIGNMENT tell the compiler that accesses may be wide.
    start = tl.load(at.places + 3 * row + 1) * ALIGNMENT
    end = tl.load(at.places + 3 * row + 2) * ALIGNMENT
    offsets = start + (block - tl.load(at.places + 3 * row)) * BLOCK + tl.arange(0, BLOCK)  # int64
    mask = offsets < tl.where(tl.load(at.skipped) == 0, end, 0)
    rate = learning_rate * tl.load(at.scales + 2 * row)
    m = tl.load(at.m + offsets, mask=mask, other=0.0)
    v = tl.load(at.v + offsets, mask=mask, other=0.0)
    w = _load_weights(at, offsets, mask)
    g = m  # placeholder: read only after it becomes the gradient
    if NESTEROV or factors_ptr is None:
        g = tl.load(at.gradient + offsets, mask=mask, other=0.0).to(tl.float32) / tl.load(
            at.divisor
        )
    if factors_ptr is None:
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        tl.store(at.m + offsets, m, mask=mask)
        tl.store(at.v + offsets, v, mask=mask)

    correction = tl.load(at.corrections)
    denominator = tl.sqrt(v) / tl.sqrt(tl.load(at.corrections + 1)) + EPS
    if NESTEROV:
        momentum = BETA1 / tl.load(at.corrections + 2) * m + (1 - BETA1) / correction * g
    if ONE_PASS:
        w -= rate * weight_decay * tl.load(at.scales + 2 * row + 1) * w
        if NESTEROV:
            w -= rate * momentum / denominator
        else:
            w -= rate / correction * m / denominator
    else:
        if not NESTEROV:
            momentum = m / correction
        u = momentum / denominator + weight_decay * tl.load(at.scales + 2 * row + 1) * w
        if factors_ptr is None:
            u = tl.where(mask, u, 0.0).to(tl.float64)
            tl.store(sums_ptr + block, tl.sum(u * u, axis=0))
        else:
            w -= rate * tl.load(factors_ptr + row) * u
    if sums_ptr is None:
        _store_weights(w, at, offsets, mask)


@jit
def _sums_kernel(block_sums_ptr, sums_ptr, places_ptr, longest, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0)
    first, end = tl.load(places_ptr + 3 * row), tl.load(places_ptr + 3 * row + 3)
    offsets = first + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, longest, BLOCK):
        total += tl.load(block_sums_ptr + start + offsets, mask=start + offsets < end, other=0.0)
    tl.store(sums_ptr + row, tl.sum(total, axis=0))


def _launch(
    shard: Shard,
    ranges: Ranges,
    control: Control,
    sums: Tensor | None = None,
    factors: Tensor | None = None,
) -> None:
    """Launch the only pass or, of two, the first with `sums` (one output per block), the second
    with `factors`."""
    if not ranges.blocks:
        return
    weights = shard.weights
    rounded = shard.weights.rounded
    numbers = control.numbers
    step = control.step
    rows, one_pass = len(ranges.rows), sums is None and factors is None
    if weights.remainder is not None:
        assert rounded is not None and rounded.dtype == torch.bfloat16
        rounded = rounded.view(torch.int16)
    of_shard = (weights.master, rounded, weights.remainder, shard.gradient, shard.m, shard.v)
    assert all(tensor is None or tensor.is_contiguous() for tensor in of_shard)
    _adamw_kernel[(ranges.blocks,)](
        _Pointers(
            *of_shard, ranges.places, ranges.scales, step.divisor, control.corrections, step.skipped
        ),
        sums,
        factors,
        float(step.learning_rate),
        float(step.weight_decay),
        rows,
        BETA1=numbers.beta1,
        BETA2=numbers.beta2,
        EPS=numbers.eps,
        NESTEROV=numbers.nesterov,
        ONE_PASS=one_pass,
        ROWS=rows if one_pass else next_power_of_2(rows),
        ALIGNMENT=ALIGNMENT,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


# -- one pass, or two
# ------------------------------------------------------------------------------------------------


def adamw(shard: Shard, ranges: Ranges, control: Control, triton: bool = False) -> None:
    """Update a shard in place."""
    step = control.step
    numbers = control.numbers
    gradient = shard.gradient
    assert all(0 <= row.start <= row.end <= gradient.numel() for row in ranges.rows), (
        ranges.rows,
        gradient.numel(),
    )
    if triton:
        _launch(shard, ranges, control)
        return
    in_place = (
        shard.weights.rounded is None and gradient.dtype == torch.float32 and not numbers.nesterov
    )
    for _, row, bounds in chunks(ranges.rows, gradient.device, whole=in_place):
        rate, decay = step.learning_rate * row.lr_scale, step.weight_decay * row.decay_scale
        weights = shard.weights.read(bounds)
        if numbers.nesterov:
            _descend(weights, _update_moments(shard, bounds, control), decay, rate, control)
        else:
            _fused_adamw(weights, gradient[bounds].float(), shard, bounds, rate, decay, control)
        if not in_place:
            shard.weights.write(weights, bounds)


def adamw_moments(shard: Shard, ranges: Ranges, control: Control, triton: bool = False) -> Tensor:
    """Update the moments in place and return the sum of u^2 over each range: (rows,), fp64; 0 if
    skipped."""
    gradient = shard.gradient
    if triton:
        sums = torch.empty(len(ranges.rows), dtype=torch.float64, device=gradient.device)
        block_sums = torch.empty(ranges.blocks, dtype=torch.float64, device=gradient.device)
        _launch(shard, ranges, control, sums=block_sums)
        if ranges.blocks:
            _sums_kernel[sums.shape](
                block_sums, sums, ranges.places, ranges.longest, SUM_BLOCK, num_warps=4
            )
        return sums
    zero = control.step.skipped.double() * 0
    totals = [zero] * len(ranges.rows)
    for index, row, bounds in chunks(ranges.rows, gradient.device):
        step = _update_moments(shard, bounds, control)
        decay = control.step.weight_decay * row.decay_scale
        # fp32: u remains for the second pass
        u = gradient[bounds] if gradient.dtype == torch.float32 else step
        torch.add(step, shard.weights.read(bounds), alpha=decay, out=u)
        totals[index] = totals[index] + squared_norm(u)
    return torch.where(control.step.skipped == 0, torch.stack(totals), zero)


def adamw_weights(
    shard: Shard, ranges: Ranges, factors: Tensor, control: Control, triton: bool = False
) -> None:
    """Update the weights in place after `adamw_moments`; `factors`, (rows,) fp32, multiply u."""
    assert (
        factors.dtype == torch.float32
        and factors.shape == (len(ranges.rows),)
        and factors.is_contiguous()
    )
    if triton:
        _launch(shard, ranges, control, factors=factors)
        return
    step = control.step
    for index, row, bounds in chunks(ranges.rows, shard.gradient.device):
        weights = shard.weights.read(bounds)
        u = shard.gradient[bounds]
        decay = 0.0
        if u.dtype != torch.float32:  # recompute u, without its decay
            decay = step.weight_decay * row.decay_scale
            u = _direction(shard, bounds, u.float() / step.divisor, control)
        _descend(weights, u, decay, factors[index] * (step.learning_rate * row.lr_scale), control)
        shard.weights.write(weights, bounds)
