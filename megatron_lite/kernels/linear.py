"""Linear layer: y = x W^T + b.

dx = dy W        W.main_grad += dy^T x        b.main_grad += sum over tokens of dy

The input is kept for the backward only where the weight is trained; nothing is computed for what is frozen.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.kernels.gradients import accumulate
from megatron_lite.parameter import Parameter

# Rows from which a product through oneDNN and a copy or an addition are faster than one BLAS call that does both.
ONEDNN_ACCUMULATION_ROWS = 256


def product(a: Tensor, b: Tensor) -> Tensor:
    """a (m, k) times the transpose of b (n, k) -> (m, n).

    In fp32 on a CPU with AVX-512 through oneDNN, which takes two thirds of the BLAS's time there. It is fp32
    throughout: only the order of the sums differs.
    """
    if uses_onednn(a):
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return a @ b.t()


def uses_onednn(tensor: Tensor) -> bool:
    """Whether products of tensors like this one go through oneDNN."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and _onednn_is_faster()


@functools.cache
def _onednn_is_faster() -> bool:
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return known and torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def accumulate_product(weight: Parameter, grad_output: Tensor, input_: Tensor) -> None:
    """Add grad_output (t, o)^T input (t, i) to the weight's gradient; in place where the dtypes agree."""
    main_grad = weight.main_grad
    if main_grad.dtype != grad_output.dtype:
        accumulate(weight, grad_output.t() @ input_)
    elif uses_onednn(grad_output) and grad_output.shape[0] >= ONEDNN_ACCUMULATION_ROWS:
        accumulate(weight, product(grad_output.t(), input_.t()))
    elif weight.begin_gradient():
        torch.mm(grad_output.t(), input_, out=main_grad)
    else:
        main_grad.addmm_(grad_output.t(), input_)


def affine(input_: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(..., i), weight (o, i), bias (o,) -> (..., o), without autograd."""
    if not uses_onednn(input_):
        return torch.nn.functional.linear(input_, weight, bias)  # adds the bias in the same kernel
    output = product(input_.reshape(-1, input_.shape[-1]), weight).view(*input_.shape[:-1], -1)
    return output if bias is None else output.add_(bias)


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
