"""Linear layer: y = x W^T + b.

dx = dy W        W.main_grad += dy^T x        b.main_grad += sum over tokens of dy
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.parameter import Parameter


def add_weight_gradient(main_grad: Tensor, grad_output: Tensor, input_: Tensor) -> None:
    """main_grad (o, i) += grad_output (t, o)^T input (t, i), without a temporary where the dtypes agree."""
    if main_grad.dtype == grad_output.dtype:
        main_grad.addmm_(grad_output.t(), input_)
    else:
        main_grad.add_(grad_output.t() @ input_)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
        ctx.save_for_backward(input_)
        ctx.weight, ctx.bias = weight, bias
        return torch.nn.functional.linear(input_, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (input_,) = ctx.saved_tensors
        flat = grad_output.reshape(-1, grad_output.shape[-1])
        add_weight_gradient(ctx.weight.main_grad, flat, input_.reshape(-1, input_.shape[-1]))
        if ctx.bias is not None:
            ctx.bias.main_grad.add_(flat.sum(dim=0))
        return grad_output @ ctx.weight, None, None


def linear(input_: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
    """(..., i), weight (o, i), bias (o,) -> (..., o)."""
    return _Linear.apply(input_, weight, bias)
