"""Linear layer: y = x W^T + b.

dx = dy W        W.main_grad += dy^T x        b.main_grad += sum over tokens of dy

The input is kept for the backward only where the weight is trained; nothing is computed for what is frozen. How a
product gets into `main_grad` is in `gradients.py`, which CPU library computes fp32 products in `cpu_products.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megatron_lite.kernels.cpu_products import goes_through_onednn, through_onednn
from megatron_lite.kernels.gradients import accumulate, product_accumulation
from megatron_lite.parameter import Parameter


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """a (m, k) times the transpose of b (n, k) -> (m, n), in the memory of `out` where that is given."""
    with through_onednn(a, b.shape[0]):
        return torch.mm(a, b.t(), out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """total (m, n) = a (m, k) b (k, n) where it is the first, else +=, in the total's dtype."""
    way = product_accumulation(a.device, a.dtype, total.dtype)
    with through_onednn(a, b.shape[1]):
        way.run(total, a, b, first)


def accumulate_product(weight: Parameter, grad_output: Tensor, input_: Tensor) -> None:
    """Add grad_output (t, o)^T input (t, i) to the weight's gradient, in the gradient's dtype."""
    add_product(weight.main_grad, grad_output.t(), input_, weight.begin_gradient())


def affine(input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., i), weight (o, i), bias (o,) -> (..., o), without autograd."""
    with through_onednn(input_, weight.shape[0]):
        return functional.linear(input_, weight, bias)


def describe_products(device: torch.device, dtype: torch.dtype, grad_dtype: torch.dtype) -> str:
    """How products of matrices in `dtype` get into gradients in `grad_dtype` on a device, for the log."""
    library = ", large products through oneDNN" if goes_through_onednn(device, dtype) else ""
    return f"weight gradients are added up {product_accumulation(device, dtype, grad_dtype).name}{library}"


def accumulate_bias(bias: Parameter | None, grad_output: Tensor) -> None:
    """Add the sum over tokens of grad_output (t, o) to the gradient of a bias that is trained."""
    if bias is not None and bias.requires_grad:
        accumulate(bias, grad_output.sum(dim=0, dtype=bias.main_grad.dtype))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
        if weight.requires_grad:
            ctx.save_for_backward(input_)
        ctx.weight, ctx.bias = weight, bias
        return affine(input_, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None]:
        weight, flat = ctx.weight, grad_output.reshape(-1, grad_output.shape[-1])
        if weight.requires_grad:
            (input_,) = ctx.saved_tensors
            accumulate_product(weight, flat, input_.reshape(-1, input_.shape[-1]))
        accumulate_bias(ctx.bias, flat)
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return product(flat, weight.t()).view(*grad_output.shape[:-1], -1), None, None


def linear(input_: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
    """(..., i), weight (o, i), bias (o,) -> (..., o)."""
    return _Linear.apply(input_, weight, bias)
