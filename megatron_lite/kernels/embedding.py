"""Embedding look-up: y[t] = W[token[t]];   W.main_grad[token[t]] += dy[t], without a dense (v, h) temporary.

Rows that no token or position touched have a gradient of zero, so the first gradient of an accumulation zeroes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.parameter import Parameter


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Parameter, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.weight = weight
        return torch.nn.functional.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None]:
        (tokens,) = ctx.saved_tensors
        main_grad = ctx.weight.main_grad
        if ctx.weight.begin_gradient():
            main_grad.zero_()
        grads = grad_output.reshape(-1, grad_output.shape[-1]).to(main_grad.dtype)
        main_grad.index_add_(0, tokens.reshape(-1), grads)
        return None, None


class _Positions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Parameter) -> Tensor:
        ctx.weight, ctx.sequence_length = weight, hidden.shape[1]
        return hidden + weight[: hidden.shape[1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        weight, length = ctx.weight, ctx.sequence_length
        if weight.requires_grad:
            grad = grad_output.sum(dim=0, dtype=weight.main_grad.dtype)
            if weight.begin_gradient():
                weight.main_grad[:length].copy_(grad)
                weight.main_grad[length:].zero_()
            else:
                weight.main_grad[:length].add_(grad)
        return grad_output, None


def embedding(weight: Parameter, tokens: Tensor) -> Tensor:
    """weight (v, h), tokens (b, s) int64 -> (b, s, h)."""
    return _Embedding.apply(weight, tokens)


def add_positions(hidden: Tensor, weight: Parameter) -> Tensor:
    """hidden (b, s, h) + weight (p, h)[:s]."""
    return _Positions.apply(hidden, weight)
