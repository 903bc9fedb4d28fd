"""AdamW (Loshchilov & Hutter 2019) over a flat shard in one pass, without temporaries.

    g = gradient / divisor                     divisor = loss scale / clipping factor
    w = w - lr * decay * w
    m = beta1 * m + (1 - beta1) * g            v = beta2 * v + (1 - beta2) * g^2
    w = w - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

in fp32, in the order of torch's fused AdamW. With `nesterov` (Dozat 2016, "Incorporating Nesterov momentum into Adam",
as in optax) the last line replaces m / (1 - beta1^t) by the value it will have if the next gradient equals this one:

    beta1 * m / (1 - beta1^(t+1)) + (1 - beta1) * g / (1 - beta1^t)

Gradients may have any floating dtype. The pass updates every form of the weights that a `WeightShard` keeps. If
`skipped` is set, nothing is written.

The kernel is launched once per shard. A table has one row for each range of the shard with its own learning-rate scale
and weight decay; blocks look up their row, and no block crosses the border of a range. Launching once per range would
be as fast for large blocks of a model, but a small shard, of a norm for instance, takes less time than its launch. The
learning rate is an fp32 argument: Triton specializes only on integers, so no learning rate recompiles the kernel.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.kernels.adamw_elements import (
    ShardPointers,
    StepPointers,
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
from megatron_lite.kernels.triton_support import cdiv, jit, tl
from megatron_lite.kernels.weight_shard import WeightShard

# Ranges begin and end at multiples of this, so that the kernels can use wide accesses.
ALIGNMENT = 64
BLOCK = 1024
NUM_WARPS = 8  # 4 elements per thread: 16 bytes of fp32
# Elements that the reference casts and updates at a time: few for a CPU's cache, many for a GPU's launches.
CPU_CHUNK_NUMEL, GPU_CHUNK_NUMEL = 2**17, 2**24


class Shard(NamedTuple):
    """Weights, gradient and moments of one rank's shard, (n,) each."""

    weights: WeightShard
    gradient: Tensor  # the kernel leaves it alone, the reference may unscale or overwrite it
    m: Tensor  # fp32
    v: Tensor  # fp32


class Range(NamedTuple):
    """Elements [start, end) of a shard with the same factors on learning rate and weight decay."""

    start: int
    end: int
    lr_scale: float
    decay_scale: float


class Ranges:
    """All ranges of a shard, and the table that the kernels read."""

    def __init__(self, rows: Sequence[Range], device: torch.device) -> None:
        assert all(border % ALIGNMENT == 0 for row in rows for border in row[:2]), rows
        self.rows = rows
        counts = [cdiv(row.end - row.start, BLOCK) for row in rows]
        self.blocks, self.longest = sum(counts), max(counts, default=0)  # blocks in all, and in the longest range
        places = [(sum(counts[:i]), row.start // ALIGNMENT, row.end // ALIGNMENT) for i, row in enumerate(rows)]
        places.append((self.blocks, 0, 0))
        # (rows + 1, 3): first block, start and end in units of ALIGNMENT. The last row holds the number of blocks.
        self.places = torch.tensor(places, dtype=torch.int64, device=device)
        # (rows, 2): lr_scale, decay_scale
        self.scales = torch.tensor([row[2:] for row in rows], dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Hyperparameters:
    """Numbers of one step that the host knows."""

    learning_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    nesterov: bool = False


class Control:
    """Numbers of one step that only the device knows: tensors, () in fp32.

    Args:
        divisor: of the gradients.
        updates: Adam's t, counting this update.
        skipped: 1 to write nothing, else 0.
    """

    def __init__(self, divisor: Tensor, updates: Tensor, skipped: Tensor, numbers: Hyperparameters) -> None:
        self.divisor, self.updates, self.skipped, self.numbers = divisor, updates, skipped, numbers
        rates = [math.log(beta) if beta else -math.inf for beta in (numbers.beta1, numbers.beta2)]
        exponents = [updates * rates[0], updates * rates[1], (updates + 1) * rates[0]]
        # 1 - beta1^t, 1 - beta2^t and 1 - beta1^(t + 1): (3,)
        self.corrections = torch.expm1(torch.stack(exponents)).neg_()
        # torch's fused update writes divided gradients back. Avoid that for 1; reading it costs nothing on a CPU.
        self.grad_scale = None if divisor.device.type == "cpu" and float(divisor) == 1.0 else divisor


# -- by torch, for one pass and for `adamw_clipped.py` ---------------------------------------------------------------


def _reference(shard: Shard, ranges: Ranges, control: Control) -> None:
    numbers = control.numbers
    in_place = shard.weights.rounded is None and shard.gradient.dtype == torch.float32 and not numbers.nesterov
    for _, row, bounds in chunks(shard, ranges, whole=in_place):
        rate, decay = numbers.learning_rate * row.lr_scale, numbers.weight_decay * row.decay_scale
        weights = shard.weights.read(bounds)
        if numbers.nesterov:
            descend(weights, update_moments(shard, bounds, control), decay, rate, control)
        else:
            _fused_adamw(weights, shard.gradient[bounds].float(), shard, bounds, rate, decay, control)
        shard.weights.write(weights, bounds)


def _fused_adamw(
    weights: Tensor, gradient: Tensor, shard: Shard, bounds: slice, rate: float, decay: float, control: Control
) -> None:
    numbers = control.numbers
    torch._fused_adamw_(
        [weights],
        [gradient],
        [shard.m[bounds]],
        [shard.v[bounds]],
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


def chunks(shard: Shard, ranges: Ranges, whole: bool = False) -> Iterator[tuple[int, Range, slice]]:
    """Yield index, range and bounds of pieces small enough for temporaries, or of whole ranges if there are none."""
    chunk_numel = CPU_CHUNK_NUMEL if shard.gradient.device.type == "cpu" else GPU_CHUNK_NUMEL
    for index, row in enumerate(ranges.rows):
        step = row.end - row.start if whole else chunk_numel
        for start in range(row.start, row.end, step):
            yield index, row, slice(start, min(start + step, row.end))


def update_moments(shard: Shard, bounds: slice, control: Control) -> Tensor:
    """Update m and v, unscale an fp32 gradient, and return the direction of the step in new memory."""
    gradient = shard.gradient[bounds].float()
    step = torch.zeros_like(gradient)  # weights of zero become the step at a learning rate of -1
    _fused_adamw(step, gradient, shard, bounds, rate=-1.0, decay=0.0, control=control)
    return direction(shard, bounds, gradient, control) if control.numbers.nesterov else step


def direction(shard: Shard, bounds: slice, g: Tensor, control: Control) -> Tensor:
    """Return the direction of the step, without learning rate and decay, for updated moments, in new memory."""
    numbers, (correction1, correction2, next_correction1) = control.numbers, control.corrections
    m, root = shard.m[bounds], shard.v[bounds].sqrt()
    root.div_(correction2.sqrt()).add_(numbers.eps)
    if not numbers.nesterov:
        return torch.div(m, root, out=root).div_(correction1)
    step = g * ((1 - numbers.beta1) / correction1)
    return step.addcmul_(m, numbers.beta1 / next_correction1).div_(root)


def descend(weights: Tensor, direction: Tensor, decay: float, rate: float | Tensor, control: Control) -> None:
    """weights -= rate * (direction + decay * weights), in place, unless skipped."""
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


# -- by Triton -------------------------------------------------------------------------------------------------------


def pointers(shard: Shard, ranges: Ranges, control: Control) -> tuple[ShardPointers, StepPointers]:
    """Return the arguments that all kernels have in common."""
    weights, rounded = shard.weights, shard.weights.rounded
    if weights.remainder is not None:
        assert rounded is not None and rounded.dtype == torch.bfloat16
        rounded = rounded.view(torch.int16)
    tensors = ShardPointers(weights.master, rounded, weights.remainder, shard.gradient, shard.m, shard.v)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    return tensors, StepPointers(ranges.places, ranges.scales, control.divisor, control.corrections, control.skipped)


@jit
def _adamw_kernel(
    shard,
    step,
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
        row += tl.where(block < tl.load(step.places + 3 * other), 0, 1)
    offsets, mask = elements(block, row, step, ALIGNMENT, BLOCK)
    rate = learning_rate * tl.load(step.scales + 2 * row)
    decay = rate * weight_decay * tl.load(step.scales + 2 * row + 1)

    g = load_gradient(shard, step, offsets, mask)
    m, v = load_moments(shard, offsets, mask)
    w = load_weights(shard, offsets, mask)

    w -= decay * w
    m, v = next_moments(m, v, g, BETA1, BETA2)
    if NESTEROV:
        w -= rate * nesterov_momentum(m, g, step, BETA1) / denominator(v, step, EPS)
    else:
        w -= rate / tl.load(step.corrections) * m / denominator(v, step, EPS)

    store_moments(m, v, shard, offsets, mask)
    store_weights(w, shard, offsets, mask)


def _launch(shard: Shard, ranges: Ranges, control: Control) -> None:
    numbers = control.numbers
    if ranges.blocks:
        _adamw_kernel[(ranges.blocks,)](
            *pointers(shard, ranges, control),
            float(numbers.learning_rate),
            float(numbers.weight_decay),
            BETA1=numbers.beta1,
            BETA2=numbers.beta2,
            EPS=numbers.eps,
            NESTEROV=numbers.nesterov,
            ROWS=len(ranges.rows),
            ALIGNMENT=ALIGNMENT,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def adamw(shard: Shard, ranges: Ranges, control: Control, triton: bool = False) -> None:
    """Update a shard in place."""
    numel = shard.gradient.numel()
    assert all(0 <= row.start <= row.end <= numel for row in ranges.rows), (ranges.rows, numel)
    if triton:
        _launch(shard, ranges, control)
    else:
        _reference(shard, ranges, control)
