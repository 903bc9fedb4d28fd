"""Fused output head and loss: logits of a few tokens at a time, forward and backward together.

    x = hidden W^T, (t, v) in the training dtype; then in fp32
    lse = log sum exp(x)        loss = lse - x[label] + z lse^2        dx = ((1 + 2 z lse) exp(x - lse) - onehot) scale
    dhidden = dx W        W.main_grad += dx^T hidden

z is the coefficient of the z-loss, which keeps the log-sum-exp near zero (PaLM, Chowdhery et al.
2022, section 5). A label below zero masks its token: no loss, no gradient. With a soft cap c the
loss is computed from y = c tanh(x / c), which stays within +-c (Gemma 2, 2024, section 2), and dx =
dy (1
- (y / c)^2).

The forward pass computes the gradient in the memory of the logits, so only one chunk of logits
exists at a time. It must therefore know `scale`: the loss scale / tokens of the global batch.
Frozen hidden states or weights skip their product.

Tokens are processed in chunks. Every chunk adds to the full weight gradient, (v, h), so small
chunks cost memory traffic. The vocabulary may also be split into blocks, which limits the logits to
one chunk and one block. Blocks are visited twice, for the sums and for the gradient, and their
logits are computed both times: four products instead of three, a third more time (evaluation needs
only the sums). The hidden gradient is summed over blocks in fp32 and rounded once.

`sweep` adds one block of logits to the sums `lse` and x[label], or turns the block into its
gradient, which needs the sums over all blocks, or does both if the block is the whole vocabulary.
Reference and kernel read logits in their dtype, compute in fp32 and copy only a few rows to fp32.

Zero rows may pad the weight and its gradient in memory to a size that suits products: see
`parameter.padded`. Their logits are excluded from all sums and have zero gradients, so they add
zero to the hidden gradient and to themselves.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.kernels.linear import complete
from megatron_lite.kernels.products import add_product, product
from megatron_lite.kernels.tensor_collectives import WHOLE, Vocabulary
from megatron_lite.kernels.triton_support import jit, next_power_of_2, tanh, tl, turns
from megatron_lite.parameter import Function, Parameter, padded

LOG2_E = math.log2(math.e)
LOWEST = -3.0e38  # the maximum of no entries: minus infinity minus minus infinity would be NaN
# Elements that the reference computes at a time; on a CPU they stay in the cache between
# operations.
REFERENCE_ELEMENTS = {"cpu": 2**17, "cuda": 2**26}
# Elements of a row that a program of the kernel loads at a time; each thread takes runs of RUN. Two
# programs of 8,192 elements share a multiprocessor, and one loads while the other computes: on an
# H200 they take 0.67 of the time of one program of 16,384 at 32,000 entries, and 0.86 at 128,256.
LARGEST_BLOCK, RUN = 8192, 8
# Rows of logits begin at multiples of this many elements, whatever the vocabulary size: otherwise a
# GPU's matrix products and loads are several times slower.
ROW_ALIGNMENT = 64


class Sums(NamedTuple):
    """Per-token sums over the vocabulary blocks visited so far."""

    lse: Tensor  # log-sum-exp, (t,) in fp32
    at_label: Tensor  # the label's logit, (t,) in fp32

    @classmethod
    def empty(cls, tokens: int, device: torch.device) -> Sums:
        """Allocate sums for the first block to fill."""
        return cls(*torch.empty(2, tokens, dtype=torch.float32, device=device))

    def loss(self, labels: Tensor, z_loss: float = 0.0) -> Tensor:
        """Return the loss summed over unmasked tokens: () in fp64, because there may be many."""
        lse = self.lse.double()
        losses = lse - self.at_label + (z_loss * lse.square() if z_loss else 0.0)
        return losses.masked_fill(labels < 0, 0.0).sum()


def capped(x: Tensor, soft_cap: float) -> Tensor:
    """Return c tanh(x / c) in new memory; without a cap (0), x itself."""
    return x.div(soft_cap).tanh_().mul_(soft_cap) if soft_cap else x


# -- loss and gradient of logits by torch
# ----------------------------------------------------------------------------


def _reference_sweep(
    logits: Tensor,
    labels: Tensor,
    sums: Sums,
    scale: Tensor | None,
    z_loss: float,
    soft_cap: float,
    columns: int,
    start: int,
    accumulate: bool,
    keep: bool,
) -> None:
    place = labels[:, None] - start  # column of the label in the block, (t, 1)
    inside = (place >= 0) & (place < columns)
    place = place.clamp(0, columns - 1)
    step = max(1, REFERENCE_ELEMENTS[logits.device.type] // columns)
    narrow = logits.dtype != torch.float32 or keep
    scratch = logits.new_empty(
        min(step, len(logits)) if narrow else 0, columns, dtype=torch.float32
    )
    tanhs = logits.new_empty(
        min(step, len(logits)) if soft_cap else 0, columns, dtype=torch.float32
    )
    loop = range(0, logits.shape[0], step)
    for begin in turns(loop, logits) if logits.is_meta else loop:
        rows = slice(begin, begin + step)
        part = logits[rows, :columns]
        at = place[rows]
        found = inside[rows]
        lse, at_label = sums.lse[rows, None], sums.at_label[rows, None]
        x = scratch[: len(part)].copy_(part) if narrow else part
        if soft_cap:
            y_over_cap = torch.tanh(x.div_(soft_cap), out=tanhs[: len(part)])
            torch.mul(y_over_cap, soft_cap, out=x)
        if accumulate:
            shift = x.amax(dim=-1, keepdim=True).clamp_(min=LOWEST)
            label_logit = torch.where(found, x.gather(-1, at), 0.0 if start == 0 else at_label)
            total = _exp_(x.sub_(shift)).sum(dim=-1, keepdim=True)
            block_lse = total.log().add_(shift)
            lse.copy_(block_lse if start == 0 else torch.logaddexp(lse, block_lse))
            at_label.copy_(label_logit)
        if scale is None:
            continue
        factor = scale * (1 + 2 * z_loss * lse) if z_loss else scale.expand(lse.shape)
        if accumulate:
            factor = factor / total  # x is exp(x - shift)
        else:
            _exp_(x.sub_(lse))
        dx = x.mul_(factor.masked_fill(labels[rows, None] < 0, 0.0))
        dx.scatter_add_(-1, at, torch.where(found, -scale, 0.0))
        if soft_cap:
            dx.mul_(y_over_cap.square_().neg_().add_(1.0))
        if narrow:
            part.copy_(dx)


def _exp_(x: Tensor) -> Tensor:
    """Compute exp in place through powers of two: half the time of `exp_` on a CPU, relative error
    |x| 2^-24."""
    return x.mul_(LOG2_E).exp2_()


# -- loss and gradient of logits by Triton
# ---------------------------------------------------------------------------


@jit
def _sweep_kernel(
    x_ptr,
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
    ACCUMULATE: tl.constexpr,
    CAPPED: tl.constexpr,
    LOWEST: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Process one row per program. Each run of a block has its own maximum and sum, so that threads
    need not synchronize."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * row_stride
    label = tl.load(labels_ptr + row).to(tl.int32)
    place = label - start
    blocks = tl.cdiv(width, RUNS * RUN)
    lanes = tl.arange(0, RUNS)[:, None] * RUN + tl.arange(0, RUN)[None, :]
    if ACCUMULATE:
        found = (place >= 0) & (place < columns)
        # before the gradient overwrites it
        at_label = tl.load(x_ptr + place, mask=found, other=0.0).to(tl.float32)
        if CAPPED:
            at_label = soft_cap * tanh(at_label / soft_cap)
        largest = tl.full((RUNS,), LOWEST, tl.float32)
        total = tl.zeros((RUNS,), tl.float32)
        for block in range(0, blocks):
            offsets = block * (RUNS * RUN) + lanes
            x = tl.load(x_ptr + offsets, mask=offsets < width, other=0.0).to(tl.float32)
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
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
        factor = tl.where(label >= 0, scale * (1.0 + 2.0 * z_loss * lse), 0.0)
        for block in range(0, blocks):  # from the end, which may still be in the cache
            offsets = (blocks - 1 - block) * (RUNS * RUN) + lanes
            x = tl.load(x_ptr + offsets, mask=offsets < width, other=0.0).to(tl.float32)
            if CAPPED:
                part = tanh(x / soft_cap)
                x = soft_cap * part
            dx = tl.exp(x - lse) * factor
            dx = tl.where(offsets == place, dx - scale, dx)
            if CAPPED:
                dx *= 1.0 - part * part
            dx = tl.where(offsets < columns, dx, 0.0)
            tl.store(x_ptr + offsets, dx.to(x_ptr.dtype.element_ty), mask=offsets < width)


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
    accumulate: bool = True,
    keep: bool = False,
    triton: bool = False,
) -> None:
    """Visit a block of logits, without autograd: add it to the sums, replace it by its gradient, or
    both.

    Args:
        logits: (t, w), any float dtype, any row stride. Overwritten, unless `keep`, by a visit
            that only adds to the sums.
        labels: (t,) int64; below zero: masked.
        sums: over the preceding blocks; `start` 0 initializes them.
        scale: (), factor of the gradient; None: compute no gradient.
        z_loss: coefficient of the squared log-sum-exp.
        soft_cap: bound on the logits; 0: none.
        columns: entries in the block; further columns are padding with arbitrary values.
        start: index of the block's first entry in the vocabulary.
        accumulate: add the block to `sums`; combined with `scale`, the block must be the whole
            vocabulary.
    """
    tokens, width = logits.shape
    columns = width if columns is None else columns
    if not triton:
        _reference_sweep(
            logits, labels, sums, scale, z_loss, soft_cap, columns, start, accumulate, keep
        )
        return
    assert logits.stride(1) == 1 and labels.is_contiguous()
    block = min(LARGEST_BLOCK, max(next_power_of_2(width), 32 * RUN))
    _sweep_kernel[(tokens,)](
        logits,
        labels,
        *sums,
        scale,
        z_loss,
        soft_cap,
        start,
        width,
        columns,
        logits.stride(0),
        FIRST=start == 0,
        ACCUMULATE=accumulate,
        CAPPED=soft_cap != 0.0,
        LOWEST=LOWEST,
        RUNS=block // RUN,
        RUN=RUN,
        num_warps=max(1, min(32, block // 512)),
    )


# -- the head
# --------------------------------------------------------------------------------------------------------


def held_logits(
    tokens: int, vocab_size: int, chunk_tokens: int, block_size: int | None
) -> tuple[int, int]:
    """Return rows and columns of the logits buffer, padding included; `vocab_size` includes padding
    rows."""
    block = min(block_size or vocab_size, vocab_size)
    return min(chunk_tokens, tokens), -(-block // ROW_ALIGNMENT) * ROW_ALIGNMENT


class _Options(NamedTuple):
    """Arguments of `linear_cross_entropy` that are not tensors."""

    chunk_tokens: int
    block_size: int | None
    z_loss: float
    soft_cap: float
    padding_rows: int
    triton: bool
    vocabulary: Vocabulary


def _visits(
    vocab_size: int, options: _Options, with_gradient: bool, is_all: bool
) -> tuple[list[slice], list[tuple[bool, bool]]]:
    """Return the blocks, as rows of the padded weight, and the sweeps over them as (add to the
    sums, compute gradients).

    The last block takes the padding rows that fit. is_all: this rank has the whole vocabulary, so a
    single block is visited once. Otherwise gradients require the sums over the whole vocabulary
    first.
    """
    rows = vocab_size + options.padding_rows
    size = min(options.block_size or rows, rows)
    blocks = [slice(start, min(start + size, rows)) for start in range(0, vocab_size, size)]
    if not with_gradient or (len(blocks) == 1 and is_all):
        return blocks, [(True, with_gradient)]
    return blocks, [(True, False), (False, True)]


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Parameter,
        labels: Tensor,
        scale: Tensor | None,
        options: _Options,
    ) -> Tensor:
        vocab_size = weight.shape[0]
        padding_rows = options.padding_rows
        vocabulary = options.vocabulary
        ctx.shape, hidden = hidden.shape, vocabulary.of_residual(hidden).flatten(0, -2)
        labels, tokens = vocabulary.labels(labels), hidden.shape[0]
        w = padded(weight, padding_rows)
        trains_hidden = scale is not None and ctx.needs_input_grad[0]
        trains_weight = scale is not None and weight.requires_grad
        dhidden = torch.empty_like(hidden) if trains_hidden else None
        dw = padded(weight.main_grad, padding_rows) if trains_weight else None
        first_dw = trains_weight and weight.begin_gradient()
        blocks, visits = _visits(
            vocab_size, options, trains_hidden or trains_weight, not vocabulary.is_split
        )
        is_one = len(blocks) == 1
        memory = hidden.new_empty(
            held_logits(tokens, w.shape[0], options.chunk_tokens, options.block_size)
        )
        # With AMX, oneDNN multiplies what follows a row of bf16 by zero, and NaN times zero is NaN.
        memory[:, blocks[0].stop :] = 0.0
        sums = Sums.empty(tokens, hidden.device)
        loop = range(0, tokens, options.chunk_tokens)
        for start in turns(loop, hidden) if hidden.is_meta else loop:
            chunk = slice(start, start + options.chunk_tokens)
            part = hidden[chunk]
            part_labels = labels[chunk]
            part_sums = Sums(sums.lse[chunk], sums.at_label[chunk])
            logits = memory[: part.shape[0]]
            total = None if dhidden is None else dhidden[chunk]  # sum of dhidden over the blocks
            if total is not None and not is_one:
                total = torch.empty_like(total, dtype=torch.float32)
            for (accumulate, with_gradient), rows in itertools.product(visits, blocks):
                first, end = rows.start, rows.stop
                columns, x = min(end, vocab_size) - first, logits[:, : end - first]
                # otherwise the memory still contains the logits of the only block
                if accumulate or not is_one:
                    product(part, w[rows], out=x)
                sweep(
                    logits,
                    part_labels,
                    part_sums,
                    scale if with_gradient else None,
                    options.z_loss,
                    soft_cap=options.soft_cap,
                    columns=columns,
                    start=first,
                    accumulate=accumulate,
                    keep=is_one and accumulate and len(visits) > 1,
                    triton=options.triton,
                )
                if accumulate and rows is blocks[-1]:
                    vocabulary.join(*part_sums)
                if not with_gradient:
                    continue
                dx = x  # the same memory
                if padding_rows:
                    dx[:, columns:] = 0.0
                if total is not None:
                    add_product(total, dx, w[rows], first == 0)
                if dw is not None:
                    add_product(dw[rows], dx.t(), part, first_dw)
            first_dw = False
            if dhidden is not None and total is not None and not is_one:
                dhidden[chunk] = total
        ctx.dhidden = None if dhidden is None else vocabulary.start_into_residual(dhidden)
        return vocabulary.total(sums.loss(labels, options.z_loss))

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        # `scale` includes every factor, dloss too
        dhidden = ctx.dhidden
        ctx.dhidden = None
        dhidden = None if dhidden is None else complete(dhidden).view(ctx.shape)
        return dhidden, None, None, None, None


def linear_cross_entropy(
    hidden: Tensor,
    weight: Parameter,
    labels: Tensor,
    scale: Tensor | None,
    chunk_tokens: int,
    block_size: int | None = None,
    z_loss: float = 0.0,
    triton: bool = False,
    soft_cap: float = 0.0,
    padding_rows: int = 0,
    vocabulary: Vocabulary = WHOLE,
) -> Tensor:
    """Return the summed cross-entropy of hidden (..., h) with weight (v, h) and labels (b, s) or
    (t,): () in fp64.

    With `scale` (), add the gradient of scale * loss to `weight.main_grad` now and pass it to
    `hidden` in the backward pass, if they require one.

    Args:
        labels: int64; below zero: the token has no loss.
        chunk_tokens: tokens whose logits exist at a time.
        block_size: entries of the vocabulary whose logits exist at a time; None: all.
        z_loss: coefficient of the squared log-sum-exp.
        soft_cap: bound on the logits; 0: none.
        padding_rows: zero rows after the weight and after its gradient in memory.
        vocabulary: how rows and tokens are split over ranks; the loss covers all tokens.
    """
    options = _Options(chunk_tokens, block_size, z_loss, soft_cap, padding_rows, triton, vocabulary)
    return _LinearCrossEntropy.apply(hidden, weight, labels, scale, options)
