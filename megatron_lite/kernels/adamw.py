"""AdamW (Loshchilov & Hutter 2019) over a whole flat shard at once: no other pass over it, no temporary.

    g = gradient / divisor                     divisor = loss scale / clipping factor
    w = w - lr * decay * w
    m = beta1 * m + (1 - beta1) * g            v = beta2 * v + (1 - beta2) * g^2
    w = w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

in fp32, in the order of torch's fused AdamW. With `nesterov` (Dozat 2016, "Incorporating Nesterov momentum into Adam",
as optax has it) the last line takes, in place of m / (1 - beta1^t), what m will be if the next gradient is this one:

    beta1 * m / (1 - beta1^(t+1)) + (1 - beta1) * g / (1 - beta1^t)

Gradients are read in whatever dtype they have. The weights are a `WeightShard`, of which every form is updated in the
same pass. Where `skipped` is set nothing is written at all.

The kernel is launched once for a shard. Its blocks find what holds for them (learning-rate scale, weight decay) in a
table with a row for each range of the shard that is updated alike; no block crosses a border. One launch for each range
would do as well on a large block of a model, but a shard of a small one, of a norm for instance, takes less time than
its launch. The learning rate is an fp32 argument: Triton specializes on integers only, so no value of it recompiles.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.kernels.split_weights import WeightShard, narrow
from megatron_lite.kernels.triton_support import cdiv, jit, tl

# Ranges begin and end at multiples of this, so that the kernel may use wide accesses.
ALIGNMENT = 64
BLOCK = 1024
NUM_WARPS = 8  # 4 elements per thread: 16 bytes of fp32
# Elements that the reference updates at a time where it casts: on CPU they stay in the cache, on a GPU launches cost.
CPU_CHUNK_NUMEL, GPU_CHUNK_NUMEL = 2**17, 2**24


class Shard(NamedTuple):
    """Weights, gradient and moments of one rank's shard, (n,) each."""

    weights: WeightShard
    gradient: Tensor  # left alone by the kernel, unscaled by the reference, or overwritten
    exp_avg: Tensor  # m, fp32
    exp_avg_sq: Tensor  # v, fp32


class Range(NamedTuple):
    """Elements of a shard that are updated alike."""

    start: int
    end: int
    lr_scale: float
    decay_scale: float  # factor on the weight decay


class Ranges:
    """All ranges of a shard, and the table that the kernel reads."""

    def __init__(self, rows: Sequence[Range], device: torch.device) -> None:
        assert all(border % ALIGNMENT == 0 for row in rows for border in row[:2]), rows
        self.rows = rows
        counts = [cdiv(row.end - row.start, BLOCK) for row in rows]
        self.blocks, self.longest = sum(counts), max(counts, default=0)  # of all, and of one range
        places = [(sum(counts[:i]), row.start // ALIGNMENT, row.end // ALIGNMENT) for i, row in enumerate(rows)]
        places.append((self.blocks, 0, 0))
        # (rows + 1, 3): first block; start and end, in units of ALIGNMENT. The last row is where the blocks end.
        self.places = torch.tensor(places, dtype=torch.int64, device=device)
        # (rows, 2)
        self.scales = torch.tensor([row[2:] for row in rows], dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Hyperparameters:
    """Numbers of one step, known on the host."""

    learning_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    nesterov: bool = False


class Control:
    """Numbers of one step, known on the device only: tensors, () in fp32.

    divisor: of the gradients. updates: Adam's t, this update included. skipped: 1 where nothing may be written, else 0.
    """

    def __init__(self, divisor: Tensor, updates: Tensor, skipped: Tensor, numbers: Hyperparameters) -> None:
        self.divisor, self.updates, self.skipped, self.numbers = divisor, updates, skipped, numbers
        rates = [math.log(beta) if beta else -math.inf for beta in (numbers.beta1, numbers.beta2)]
        exponents = [updates * rates[0], updates * rates[1], (updates + 1) * rates[0]]
        # 1 - b^t for both betas, and 1 - b^(t + 1) for the first: (3,)
        self.corrections = torch.expm1(torch.stack(exponents)).neg_()
        # A fused update that divides gradients writes them back. On CPU a look costs nothing, and often it is by 1.
        self.grad_scale = None if divisor.device.type == "cpu" and float(divisor) == 1.0 else divisor


def adamw(shard: Shard, ranges: Ranges, control: Control, triton: bool = False) -> None:
    """Update a shard in place; see the module."""
    numel = shard.gradient.numel()
    assert all(0 <= row.start <= row.end <= numel for row in ranges.rows), (ranges.rows, numel)
    if triton:
        _launch(shard, ranges, control)
    else:
        _reference(shard, ranges, control)


def _reference(shard: Shard, ranges: Ranges, control: Control) -> None:
    numbers, gradient, exp_avg, exp_avg_sq = control.numbers, *shard[1:]
    in_place = shard.weights.rounded is None and gradient.dtype == torch.float32 and not numbers.nesterov
    for _, row, bounds in chunks(shard, ranges, whole=in_place):
        rate, decay = numbers.learning_rate * row.lr_scale, numbers.weight_decay * row.decay_scale
        weights = shard.weights.read(bounds)
        if numbers.nesterov:
            descend(weights, update_moments(shard, bounds, control), decay, rate, control)
        else:
            torch._fused_adamw_(
                [weights],
                [gradient[bounds].float()],
                [exp_avg[bounds]],
                [exp_avg_sq[bounds]],
                [],
                [control.updates],
                lr=rate,
                beta1=numbers.beta1,
                beta2=numbers.beta2,
                weight_decay=decay,
                eps=numbers.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=control.grad_scale,
                found_inf=control.skipped,
            )
        shard.weights.write(weights, bounds)


# -- parts of the reference, of this and of `adamw_clipped.py` --------------------------------------------------------


def chunks(shard: Shard, ranges: Ranges, whole: bool = False) -> Iterator[tuple[int, Range, slice]]:
    """The ranges and their indices, in pieces that bound the temporaries; `whole`: in one, where there are none."""
    chunk_numel = CPU_CHUNK_NUMEL if shard.gradient.device.type == "cpu" else GPU_CHUNK_NUMEL
    for index, row in enumerate(ranges.rows):
        step = row.end - row.start if whole else chunk_numel
        for start in range(row.start, row.end, step):
            yield index, row, slice(start, min(start + step, row.end))


def update_moments(shard: Shard, bounds: slice, control: Control) -> Tensor:
    """Update m and v; unscales an fp32 gradient. Returns the direction of the step, without rate and decay, anew."""
    numbers, gradient = control.numbers, shard.gradient[bounds].float()
    step = torch.zeros_like(gradient)  # as weights that are zero, and so become the step itself
    torch._fused_adamw_(
        [step],
        [gradient],
        [shard.exp_avg[bounds]],
        [shard.exp_avg_sq[bounds]],
        [],
        [control.updates],
        lr=-1.0,
        beta1=numbers.beta1,
        beta2=numbers.beta2,
        weight_decay=0.0,
        eps=numbers.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=control.grad_scale,
        found_inf=control.skipped,
    )
    return direction(shard, bounds, gradient, control) if numbers.nesterov else step


def direction(shard: Shard, bounds: slice, gradient: Tensor, control: Control) -> Tensor:
    """The direction of the step, from moments that have been updated and the fp32 gradient, unscaled, in new memory."""
    numbers, (correction1, correction2, next_correction1) = control.numbers, control.corrections
    momentum, root = shard.exp_avg[bounds], shard.exp_avg_sq[bounds].sqrt()
    root.div_(correction2.sqrt()).add_(numbers.eps)
    if not numbers.nesterov:
        return torch.div(momentum, root, out=root).div_(correction1)
    step = gradient * ((1 - numbers.beta1) / correction1)
    return step.addcmul_(momentum, numbers.beta1 / next_correction1).div_(root)


def descend(weights: Tensor, direction: Tensor, decay: float, rate: float | Tensor, control: Control) -> None:
    """weights -= rate * (direction + decay * weights), in place."""
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
        found_inf=control.skipped,
    )


# -- the kernel ------------------------------------------------------------------------------------------------------


def _launch(shard: Shard, ranges: Ranges, control: Control) -> None:
    numbers = control.numbers
    if ranges.blocks:
        _adamw_kernel[(ranges.blocks,)](
            *pointers(shard),
            ranges.places,
            ranges.scales,
            control.divisor,
            control.corrections,
            control.skipped,
            float(numbers.learning_rate),
            float(numbers.weight_decay),
            numbers.beta1,
            numbers.beta2,
            numbers.eps,
            numbers.nesterov,
            len(ranges.rows),
            ALIGNMENT,
            BLOCK,
            num_warps=NUM_WARPS,
        )


def pointers(shard: Shard) -> list[Tensor | None]:
    """Return the six tensors that a kernel takes: master, rounded, remainder, gradient, m, v."""
    master, rounded, remainder = shard.weights.master, shard.weights.rounded, shard.weights.remainder
    if remainder is not None:
        assert rounded is not None and rounded.dtype == torch.bfloat16
        rounded = rounded.view(torch.int16)
    tensors = [master, rounded, remainder, *shard[1:]]
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return tensors


@jit
def _adamw_kernel(
    master_ptr,
    rounded_ptr,
    remainder_ptr,
    gradient_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    places_ptr,
    scales_ptr,
    divisor_ptr,
    corrections_ptr,
    skipped_ptr,
    learning_rate,
    weight_decay,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    EPS: tl.constexpr,
    NESTEROV: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    block = tl.program_id(0)
    row = 0
    for other in tl.static_range(1, ROWS):
        row += tl.where(block < tl.load(places_ptr + 3 * other), 0, 1)
    offsets, mask = elements(block, row, places_ptr, skipped_ptr, ALIGNMENT, BLOCK)
    rate = learning_rate * tl.load(scales_ptr + 2 * row)
    decay = rate * weight_decay * tl.load(scales_ptr + 2 * row + 1)

    gradient = tl.load(gradient_ptr + offsets, mask=mask, other=0.0).to(tl.float32) / tl.load(divisor_ptr)
    exp_avg = tl.load(exp_avg_ptr + offsets, mask=mask, other=0.0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0.0)
    weight = load_weights(master_ptr, rounded_ptr, remainder_ptr, offsets, mask)

    weight -= decay * weight
    exp_avg = BETA1 * exp_avg + (1 - BETA1) * gradient
    exp_avg_sq = BETA2 * exp_avg_sq + (1 - BETA2) * gradient * gradient
    root = tl.sqrt(exp_avg_sq) / tl.sqrt(tl.load(corrections_ptr + 1))
    if NESTEROV:
        weight -= rate * ahead(exp_avg, gradient, corrections_ptr, BETA1) / (root + EPS)
    else:
        weight -= rate / tl.load(corrections_ptr) * exp_avg / (root + EPS)

    tl.store(exp_avg_ptr + offsets, exp_avg, mask=mask)
    tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq, mask=mask)
    store_weights(weight, master_ptr, rounded_ptr, remainder_ptr, offsets, mask)


@jit
def elements(block, row, places_ptr, skipped_ptr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets, int64, of a block that lies in a row of the table, and which of them are updated: none if skipped."""
    # Borders as products with ALIGNMENT: so the compiler knows that accesses may be wide.
    start = tl.load(places_ptr + 3 * row + 1) * ALIGNMENT
    end = tl.load(places_ptr + 3 * row + 2) * ALIGNMENT
    offsets = start + (block - tl.load(places_ptr + 3 * row)) * BLOCK + tl.arange(0, BLOCK)
    return offsets, offsets < tl.where(tl.load(skipped_ptr) == 0, end, 0)


@jit
def ahead(exp_avg, gradient, corrections_ptr, BETA1: tl.constexpr):
    """What takes the place of m / (1 - beta1^t) with `nesterov`."""
    return BETA1 / tl.load(corrections_ptr + 2) * exp_avg + (1 - BETA1) / tl.load(corrections_ptr) * gradient


@jit
def load_weights(master_ptr, rounded_ptr, remainder_ptr, offsets, mask):
    """The fp32 weights."""
    if remainder_ptr is None:
        return tl.load(master_ptr + offsets, mask=mask, other=0.0)
    else:
        high = tl.load(rounded_ptr + offsets, mask=mask, other=0).to(tl.int32) << 16
        low = tl.load(remainder_ptr + offsets, mask=mask, other=0).to(tl.int32)
        return (high + low).to(tl.float32, bitcast=True)


@jit
def store_weights(weight, master_ptr, rounded_ptr, remainder_ptr, offsets, mask):
    """The fp32 weights, in every form in which they are kept."""
    if remainder_ptr is None:
        tl.store(master_ptr + offsets, weight, mask=mask)
        if rounded_ptr is not None:
            tl.store(rounded_ptr + offsets, narrow(weight, rounded_ptr.dtype.element_ty), mask=mask)
    else:
        # As `split_weights.split`: a NaN with all payload bits set would be rounded over the edge, to zero.
        bits = tl.where(weight == weight, weight.to(tl.int32, bitcast=True), 0x7FC00000)
        high = (bits + 0x8000) >> 16
        tl.store(rounded_ptr + offsets, high.to(tl.int16), mask=mask)
        tl.store(remainder_ptr + offsets, (bits - (high << 16)).to(tl.int16), mask=mask)
