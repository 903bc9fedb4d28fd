"""Output head and loss in one: the logits of some tokens at a time, forward and backward together.

    x = hidden W^T in the training dtype, its loss and dx as in `cross_entropy.py`
    dhidden = dx W        W.main_grad += dx^T hidden

The gradient is computed in the forward pass, where the logits are at hand, so that never more than one chunk of them
exists; it takes their place. `scale` therefore has to be known then: loss scale / tokens of the global batch. Where
hidden states or weight need no gradient, their product is left out.

Tokens come in chunks. Every chunk adds to the whole weight gradient, (v, h): small ones cost memory traffic. The
vocabulary may come in blocks besides, so that only the logits of a chunk and a block exist. Then the blocks are gone
through twice, for the sums and for the gradient, and their logits computed both times: four products in place of
three, a third more time (nothing in evaluation, which ends after the sums). What the blocks add to the hidden gradient
is summed up in fp32 and rounded once.

Behind the weight and its gradient may lie rows of zeros, for products of a rounder size: see `parameter.padded`. Their
logits are in no sum and have a gradient of zero, so that what is added to the rows of zeros, and to the hidden
gradient, is zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.kernels.cross_entropy import Sums, sweep
from megatron_lite.kernels.linear import add_product, product
from megatron_lite.kernels.triton_support import cdiv
from megatron_lite.parameter import Parameter, padded

# The rows of the logits begin at multiples of so many elements, also for odd vocabularies: a GPU's matrix products and
# loads are several times slower where they do not.
ROW_ALIGNMENT = 64


def held_logits(tokens: int, vocab_size: int, chunk_tokens: int, block_size: int | None) -> tuple[int, int]:
    """Rows and columns of the memory for logits, padding included: that of the vocabulary is in `vocab_size`."""
    block = min(block_size or vocab_size, vocab_size)
    return min(chunk_tokens, tokens), cdiv(block, ROW_ALIGNMENT) * ROW_ALIGNMENT


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Parameter,
        labels: Tensor,
        scale: Tensor | None,
        chunk_tokens: int,
        block_size: int | None,
        z_loss: float,
        triton: bool,
        soft_cap: float,
        padding_rows: int,
    ) -> Tensor:
        tokens, vocab_size = hidden.shape[0], weight.shape[0]
        padded_weight = padded(weight, padding_rows)
        trains_hidden = scale is not None and ctx.needs_input_grad[0]
        trains_weight = scale is not None and weight.requires_grad
        gradient = padded(weight.main_grad, padding_rows) if trains_weight else None
        passes = _passes(vocab_size, padding_rows, block_size, trains_hidden or trains_weight)
        memory = hidden.new_empty(held_logits(tokens, padded_weight.shape[0], chunk_tokens, block_size))
        sums = Sums.empty(tokens, hidden.device)
        grad_hidden = torch.empty_like(hidden) if trains_hidden else None
        is_first = trains_weight and weight.begin_gradient()
        for start in range(0, tokens, chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            chunk, label = hidden[rows], labels[rows]
            total = None if grad_hidden is None else grad_hidden[rows]  # hidden gradient, summed up over the blocks
            if total is not None and len(passes) > 1:
                total = torch.empty_like(total, dtype=torch.float32)
            for block, adds_up, with_gradient in passes:
                columns = min(block.stop, vocab_size) - block.start
                logits = memory[: chunk.shape[0]]
                grad = product(chunk, padded_weight[block], out=logits[:, : block.stop - block.start])
                sweep(
                    logits,
                    label,
                    sums.part(rows),
                    scale if with_gradient else None,
                    z_loss,
                    soft_cap=soft_cap,
                    columns=columns,
                    start=block.start,
                    adds_up=adds_up,
                    triton=triton,
                )
                if padding_rows:
                    grad[:, columns:] = 0.0
                if with_gradient and total is not None:
                    add_product(total, grad, padded_weight[block], block.start == 0)
                if with_gradient and gradient is not None:
                    add_product(gradient[block], grad.t(), chunk, is_first)
            is_first = False
            if grad_hidden is not None and total is not None and len(passes) > 1:
                grad_hidden[rows] = total
        ctx.grad_hidden = grad_hidden
        return sums.loss(labels, z_loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        # grad_output is the one that backward starts from: `scale` holds every factor already.
        grad_hidden, ctx.grad_hidden = ctx.grad_hidden, None
        return grad_hidden, *(None,) * 9


def _passes(
    vocab_size: int, padding_rows: int, block_size: int | None, gradients: bool
) -> list[tuple[slice, bool, bool]]:
    """Blocks of the vocabulary in turn; whether each is added to the sums, and whether its gradient is made.

    The last one has as much of the padding as there is room for in it.
    """
    rows = vocab_size + padding_rows
    size = min(block_size or rows, rows)
    blocks = [slice(start, min(start + size, rows)) for start in range(0, vocab_size, size)]
    if len(blocks) == 1:
        return [(blocks[0], True, gradients)]
    return [(block, True, False) for block in blocks] + [(block, False, True) for block in blocks if gradients]


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
) -> Tensor:
    """Summed cross-entropy of hidden (t, h) against weight (v, h) and labels (t,): a scalar in fp64.

    With `scale` (), the gradient of scale * loss goes into `weight.main_grad` now and to `hidden` in backward, each
    where it is required.

    Args:
        labels: int64; below zero: the token has no loss.
        chunk_tokens: tokens whose logits exist at a time.
        block_size: entries of the vocabulary whose logits exist at a time; None: all.
        z_loss: coefficient of the squared log-sum-exp.
        soft_cap: what the logits stay within (see `cross_entropy.py`); 0: anything.
        padding_rows: rows of zeros in memory, behind the weight and behind its gradient.
    """
    return _LinearCrossEntropy.apply(
        hidden, weight, labels, scale, chunk_tokens, block_size, z_loss, triton, soft_cap, padding_rows
    )
