"""Linear layer: y = x W^T + b.

dx = dy W        W.main_grad += dy^T x        b.main_grad += sum over tokens of dy
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.parameter import Parameter

# Rows from which a product and an addition through oneDNN are faster than one BLAS call that accumulates.
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


def add_weight_gradient(main_grad: Tensor, grad_output: Tensor, input_: Tensor) -> None:
    """main_grad (o, i) += grad_output (t, o)^T input (t, i); in place where the dtypes agree."""
    if main_grad.dtype != grad_output.dtype:
        main_grad.add_(grad_output.t() @ input_)
    elif uses_onednn(grad_output) and grad_output.shape[0] >= ONEDNN_ACCUMULATION_ROWS:
        main_grad.add_(product(grad_output.t(), input_.t()))
    else:
        main_grad.addmm_(grad_output.t(), input_)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
        ctx.save_for_backward(input_)
        ctx.weight, ctx.bias = weight, bias
        if not uses_onednn(input_):
            return torch.nn.functional.linear(input_, weight, bias)  # adds the bias in the same kernel
        output = product(input_.reshape(-1, input_.shape[-1]), weight).view(*input_.shape[:-1], -1)
        return output if bias is None else output.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (input_,) = ctx.saved_tensors
        flat = grad_output.reshape(-1, grad_output.shape[-1])
        add_weight_gradient(ctx.weight.main_grad, flat, input_.reshape(-1, input_.shape[-1]))
        if ctx.bias is not None:
            ctx.bias.main_grad.add_(flat.sum(dim=0, dtype=ctx.bias.main_grad.dtype))
        return product(flat, ctx.weight.t()).view(input_.shape), None, None


def linear(input_: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
    """(..., i), weight (o, i), bias (o,) -> (..., o)."""
    return _Linear.apply(input_, weight, bias)
