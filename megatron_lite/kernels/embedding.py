"""Embedding look-up: y[t] = W[token[t]];   W.main_grad[token[t]] += dy[t], without a dense (v, h) temporary.

The first gradient of an accumulation zeroes `main_grad`, because rows without a token or position
get no gradient.

On a GPU `index_add_` adds atomically, in any order, unless PyTorch's deterministic algorithms are
on. The Triton kernel always adds in the same order: positions are sorted by token, and the program
of a token's first position sums that token's positions in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.kernels.tensor_collectives import WHOLE, Vocabulary
from megatron_lite.kernels.triton_support import cdiv, jit, next_power_of_2, tl
from megatron_lite.parameter import Function, Parameter


@jit
def _add_rows_kernel(
    total_ptr,
    dy_ptr,
    tokens_ptr,
    order_ptr,
    ends_ptr,
    hidden_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum COLUMNS elements of one token's row per program, ROWS positions at a time."""
    first = tl.program_id(0)
    token = tl.load(tokens_ptr + first)
    previous = tl.load(tokens_ptr + tl.maximum(first - 1, 0))
    if (first == 0) | (token != previous):
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < hidden_size
        count = (tl.load(ends_ptr + first) - first).to(tl.int32)
        target = total_ptr + token * hidden_size + column
        result = tl.load(target, mask=inside, other=0.0).to(tl.float32)
        for start in range(0, count, ROWS):
            row = start + tl.arange(0, ROWS)
            position = tl.load(order_ptr + first + row, mask=row < count, other=0)
            pointers = dy_ptr + position[:, None] * hidden_size + column[None, :]
            values = tl.load(pointers, mask=(row < count)[:, None] & inside[None, :], other=0.0)
            result += tl.sum(values.to(tl.float32), axis=0)
        tl.store(target, result.to(total_ptr.dtype.element_ty), mask=inside)


def _triton_add_rows(total: Tensor, tokens: Tensor, dy: Tensor) -> None:
    """Compute total (v, h) [tokens (t,)] += dy (t, h); int64 tokens make the offsets into `total`
    and `dy` int64."""
    sorted_tokens, order = torch.sort(tokens, stable=True)
    # end of each token's run of positions
    ends = torch.searchsorted(sorted_tokens, sorted_tokens, right=True)
    hidden_size = dy.shape[1]
    columns = min(next_power_of_2(hidden_size), 512)
    grid = (tokens.shape[0], cdiv(hidden_size, columns))
    _add_rows_kernel[grid](
        total,
        dy.contiguous(),
        sorted_tokens,
        order,
        ends,
        hidden_size,
        ROWS=8,
        COLUMNS=columns,
        num_warps=4,
    )


class _Embedding(Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Parameter,
        tokens: Tensor,
        vocabulary: Vocabulary,
        triton: bool,
        dtype: torch.dtype | None,
    ) -> Tensor:
        rows, absent = vocabulary.rows(tokens)
        ctx.save_for_backward(rows, absent)
        ctx.weight = weight
        ctx.vocabulary = vocabulary
        ctx.triton = triton
        y = torch.nn.functional.embedding(rows, weight)
        if absent is not None:
            y.masked_fill_(absent.unsqueeze(-1), 0.0)
        return vocabulary.embedded(y).to(dtype or weight.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, ...]:
        rows, absent = ctx.saved_tensors
        dy = ctx.vocabulary.of_residual(dy)
        if absent is not None:
            dy = dy.view(*absent.shape, -1).masked_fill(absent.unsqueeze(-1), 0.0)
        main_grad = ctx.weight.main_grad
        if ctx.weight.begin_gradient():
            main_grad.zero_()
        tokens, dy = rows.reshape(-1), dy.reshape(-1, dy.shape[-1])
        if ctx.triton:
            _triton_add_rows(main_grad, tokens, dy)
        else:
            main_grad.index_add_(0, tokens, dy.to(main_grad.dtype))
        return None, None, None, None, None


class _Positions(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Parameter) -> Tensor:
        ctx.weight, ctx.sequence_length = weight, hidden.shape[1]
        return hidden + weight[: hidden.shape[1]]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        weight, length = ctx.weight, ctx.sequence_length
        if weight.requires_grad:
            grad = dy.sum(dim=0, dtype=weight.main_grad.dtype)
            if weight.begin_gradient():
                weight.main_grad[:length].copy_(grad)
                weight.main_grad[length:].zero_()
            else:
                weight.main_grad[:length].add_(grad)
        return dy, None


def embedding(
    weight: Parameter,
    tokens: Tensor,
    triton: bool = False,
    dtype: torch.dtype | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> Tensor:
    """Look up tokens (b, s) int64 in weight (v, h) -> (b, s, h) in `dtype`, by default the
    weight's.

    vocabulary: how rows and tokens are split over ranks.
    """
    return _Embedding.apply(weight, tokens, vocabulary, triton, dtype)


def add_positions(hidden: Tensor, weight: Parameter) -> Tensor:
    """Return hidden (b, s, h) + weight (p, h)[:s]; the weight may have a narrower dtype."""
    return _Positions.apply(hidden, weight)
