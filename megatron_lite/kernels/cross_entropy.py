"""Cross-entropy of logits x (t, v) in fp32, its gradient in the logits' own memory.

    lse = log sum exp(x)        loss = lse - x[label] + z lse^2        dx = ((1 + 2 z lse) exp(x - lse) - onehot) scale

z is the coefficient of the z-loss, which holds the log-sum-exp near zero (PaLM, Chowdhery et al. 2022, section 5). A
label below zero masks its token: no loss, no gradient.

With a soft cap c the loss is that of y = c tanh(x / c), which stays within +-c (Gemma 2, 2024, section 2), in place of
x, and dx = dy (1 - (y / c)^2).

The vocabulary may come in blocks: `sweep` adds the entries of one block to the sums `lse` and x[label], or turns the
block into its gradient, which needs the sums over all blocks. Where one block is everything, it does both at once.

Reference and kernel read the logits in their dtype and compute in fp32; neither makes an fp32 copy of more than a few
rows. Without autograd: `linear_cross_entropy.py` calls it between its products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.kernels.triton_support import jit, next_power_of_2, tanh, tl

LOG2_E = math.log2(math.e)
LOWEST = -3.0e38  # stands for the largest of no entries: minus infinity less minus infinity would be no number
# Elements that the reference works on at a time: on a CPU what stays in the cache from one operation to the next.
REFERENCE_ELEMENTS = {"cpu": 2**17, "cuda": 2**26}
# Elements of a row that a program of the kernel loads at a time; each thread takes runs of RUN.
LARGEST_BLOCK, RUN = 16384, 8


@dataclass(frozen=True)
class Sums:
    """Of the tokens' logits, over the blocks of the vocabulary so far. All on one device."""

    lse: Tensor  # log-sum-exp, (t,) in fp32
    at_label: Tensor  # the logit of the label, (t,) in fp32

    @classmethod
    def empty(cls, tokens: int, device: torch.device) -> Sums:
        """Memory that the first block fills."""
        both = torch.empty(2, tokens, dtype=torch.float32, device=device)
        return cls(both[0], both[1])

    def part(self, rows: slice) -> Sums:
        return Sums(self.lse[rows], self.at_label[rows])

    def loss(self, labels: Tensor, z_loss: float = 0.0) -> Tensor:
        """The sum over tokens with a label, () in fp64, as there may be many."""
        lse = self.lse.double()
        losses = lse - self.at_label
        if z_loss:
            losses = losses + z_loss * lse.square()
        return losses.masked_fill(labels < 0, 0.0).sum()


def sweep(
    logits: Tensor,
    labels: Tensor,
    sums: Sums,
    scale: Tensor | None,
    z_loss: float = 0.0,
    *,
    soft_cap: float = 0.0,
    columns: int | None = None,
    start: int = 0,
    adds_up: bool = True,
    triton: bool = False,
) -> None:
    """Go through a block of logits once: add it to the sums, replace it by its gradient, or both.

    Args:
        logits: (t, w), any float dtype, rows at any distance. Overwritten, whatever is asked for.
        labels: (t,) int64; below zero: masked.
        sums: of the blocks before; they are begun where `start` is 0.
        scale: (), factor of the gradient; None: no gradient is wanted.
        z_loss: coefficient of the square of the log-sum-exp.
        soft_cap: what the logits stay within; 0: anything.
        columns: entries in the block, where w has padding behind them. Padding may hold anything, and holds anything
            afterwards.
        start: the first entry's number in the vocabulary.
        adds_up: add the block to `sums`; together with `scale` for a block that is the whole vocabulary.
    """
    columns = logits.shape[1] if columns is None else columns
    run = _sweep_with_triton if triton else _sweep_with_torch
    run(logits, labels, sums, scale, z_loss, soft_cap, columns, start, adds_up)


def capped(logits: Tensor, soft_cap: float) -> Tensor:
    """c tanh(x / c) in new memory; without a cap (0) the logits themselves."""
    return logits.div(soft_cap).tanh_().mul_(soft_cap) if soft_cap else logits


def reference_rows(columns: int, device_type: str) -> int:
    """Rows that the reference works on at a time."""
    return max(1, REFERENCE_ELEMENTS[device_type] // columns)


def _sweep_with_torch(
    logits: Tensor,
    labels: Tensor,
    sums: Sums,
    scale: Tensor | None,
    z_loss: float,
    soft_cap: float,
    columns: int,
    start: int,
    adds_up: bool,
) -> None:
    place = labels[:, None] - start  # of the label in the block, (t, 1)
    inside = (place >= 0) & (place < columns)
    place = place.clamp(0, columns - 1)
    step, narrow = reference_rows(columns, logits.device.type), logits.dtype != torch.float32
    scratch = logits.new_empty(min(step, len(logits)) if narrow else 0, columns, dtype=torch.float32)
    parts = logits.new_empty(min(step, len(logits)) if soft_cap else 0, columns, dtype=torch.float32)
    for begin in range(0, logits.shape[0], step):
        rows = slice(begin, begin + step)
        here, at, found = logits[rows, :columns], place[rows], inside[rows]
        lse, at_label = sums.lse[rows, None], sums.at_label[rows, None]
        x = scratch[: len(here)].copy_(here) if narrow else here
        if soft_cap:
            part = torch.tanh(x.div_(soft_cap), out=parts[: len(here)])  # y / c
            torch.mul(part, soft_cap, out=x)
        if adds_up:
            shift = x.amax(dim=-1, keepdim=True).clamp_(min=LOWEST)
            of_label = torch.where(found, x.gather(-1, at), 0.0 if start == 0 else at_label)
            total = _exp_(x.sub_(shift)).sum(dim=-1, keepdim=True)
            of_block = total.log().add_(shift)
            lse.copy_(of_block if start == 0 else torch.logaddexp(lse, of_block))
            at_label.copy_(of_label)
        if scale is None:
            continue
        factor = scale * (1 + 2 * z_loss * lse) if z_loss else scale.expand(lse.shape)
        if adds_up:
            factor = factor / total  # x is exp(x - shift)
        else:
            _exp_(x.sub_(lse))
        x.mul_(factor.masked_fill(labels[rows, None] < 0, 0.0))
        x.scatter_add_(-1, at, torch.where(found, -scale, 0.0))
        if soft_cap:
            x.mul_(part.square_().neg_().add_(1.0))
        if narrow:
            here.copy_(x)


def _exp_(x: Tensor) -> Tensor:
    """exp in place, through powers of two: on a CPU in half the time of `exp_`. Relative error |x| 2^-24."""
    return x.mul_(LOG2_E).exp2_()


@jit
def _sweep_kernel(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    at_label_ptr,
    scale_ptr,
    z_loss,
    soft_cap,
    start,
    width,
    columns,
    row_stride,
    FIRST: tl.constexpr,
    ADDS_UP: tl.constexpr,
    GRADIENT: tl.constexpr,
    CAPPED: tl.constexpr,
    LOWEST: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
):
    """One row. Each run of a block keeps a largest value and a sum of its own, so that no thread waits for others."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    label = tl.load(labels_ptr + row).to(tl.int32)
    place = label - start
    blocks = tl.cdiv(width, RUNS * RUN)
    lanes = tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    if ADDS_UP:
        found = (place >= 0) & (place < columns)
        at_label = tl.load(logits_ptr + place, mask=found, other=0.0).to(tl.float32)  # before it is overwritten
        if CAPPED:
            at_label = soft_cap * tanh(at_label / soft_cap)
        largest = tl.full((RUNS,), LOWEST, tl.float32)
        total = tl.zeros((RUNS,), tl.float32)
        for block in range(0, blocks):
            offsets = block * (RUNS * RUN) + lanes
            x = tl.load(logits_ptr + offsets, mask=offsets < width, other=0.0).to(tl.float32)
            if CAPPED:
                x = soft_cap * tanh(x / soft_cap)
            x = tl.where(offsets < columns, x, float("-inf"))
            larger = tl.maximum(largest, tl.max(x, axis=1))
            total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger[:, None]), axis=1)
            largest = larger
        shift = tl.max(largest, axis=0)
        lse = shift + tl.log(tl.sum(total * tl.exp(largest - shift), axis=0))
        if FIRST:
            tl.store(at_label_ptr + row, at_label)
        else:
            tl.store(at_label_ptr + row, at_label, mask=found)
            before = tl.load(lse_ptr + row)
            shift = tl.maximum(tl.maximum(lse, before), LOWEST)
            lse = shift + tl.log(tl.exp(lse - shift) + tl.exp(before - shift))
        tl.store(lse_ptr + row, lse)
    else:
        lse = tl.load(lse_ptr + row)
    if GRADIENT:
        scale = tl.load(scale_ptr)
        factor = tl.where(label >= 0, scale * (1.0 + 2.0 * z_loss * lse), 0.0)
        for block in range(0, blocks):  # from the end, which the cache may still hold
            offsets = (blocks - 1 - block) * (RUNS * RUN) + lanes
            x = tl.load(logits_ptr + offsets, mask=offsets < width, other=0.0).to(tl.float32)
            if CAPPED:
                part = tanh(x / soft_cap)
                x = soft_cap * part
            grad = tl.exp(x - lse) * factor
            grad = tl.where(offsets == place, grad - scale, grad)
            if CAPPED:
                grad *= 1.0 - part * part
            grad = tl.where(offsets < columns, grad, 0.0)
            tl.store(logits_ptr + offsets, grad.to(logits_ptr.dtype.element_ty), mask=offsets < width)


def _sweep_with_triton(
    logits: Tensor,
    labels: Tensor,
    sums: Sums,
    scale: Tensor | None,
    z_loss: float,
    soft_cap: float,
    columns: int,
    start: int,
    adds_up: bool,
) -> None:
    assert logits.stride(1) == 1 and labels.is_contiguous()
    tokens, width = logits.shape
    block = min(LARGEST_BLOCK, max(next_power_of_2(width), 32 * RUN))
    _sweep_kernel[(tokens,)](
        logits,
        labels,
        sums.lse,
        sums.at_label,
        sums.lse if scale is None else scale,
        z_loss,
        soft_cap,
        start,
        width,
        columns,
        logits.stride(0),
        FIRST=start == 0,
        ADDS_UP=adds_up,
        GRADIENT=scale is not None,
        CAPPED=soft_cap != 0.0,
        LOWEST=LOWEST,
        RUNS=block // RUN,
        RUN=RUN,
        num_warps=max(1, min(32, block // 512)),
    )
