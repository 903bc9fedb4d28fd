"""Layer norm (Ba et al. 2016) and RMS norm (Zhang & Sennrich 2019); statistics in fp32.

    layer norm: y = (x - mean) / sqrt(var + eps) * w + b        RMS norm: y = x / sqrt(mean(x^2) + eps) * w

RMS norm backward, with n = x / rms and g = dy * w:   dx = (g - n * mean(g * n)) / rms,   dw = sum of dy * n.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.kernels.gradients import accumulate
from megatron_lite.parameter import Parameter


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Parameter, bias: Parameter, eps: float) -> Tensor:
        output, mean, rstd = torch.native_layer_norm(input_, weight.shape, weight, bias, eps)
        ctx.save_for_backward(input_, mean, rstd)
        ctx.weight, ctx.bias = weight, bias
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None, None]:
        input_, mean, rstd = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        wanted = [ctx.needs_input_grad[0], weight.requires_grad, bias.requires_grad]
        grad_input, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad_output.contiguous(), input_, weight.shape, mean, rstd, weight, bias, wanted
        )
        if weight.requires_grad:
            accumulate(weight, grad_weight)
        if bias.requires_grad:
            accumulate(bias, grad_bias)
        return grad_input, None, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, weight: Parameter, eps: float) -> Tensor:
        x = input_.float()
        rstd = x.square().mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(input_, rstd)
        ctx.weight = weight
        return (x * rstd).to(input_.dtype).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, None, None]:
        input_, rstd = ctx.saved_tensors
        hidden_size = input_.shape[-1]
        normalized = input_.float() * rstd
        grad = grad_output.float() * normalized
        if ctx.weight.requires_grad:
            accumulate(ctx.weight, grad.view(-1, hidden_size).sum(dim=0))
        if not ctx.needs_input_grad[0]:
            return None, None, None
        projection = (grad @ ctx.weight.float() / hidden_size).unsqueeze(-1)  # mean(g * n), (..., 1)
        grad_input = torch.addcmul(grad_output.float() * ctx.weight, normalized, projection, value=-1).mul_(rstd)
        return grad_input.to(input_.dtype), None, None


def layer_norm(input_: Tensor, weight: Parameter, bias: Parameter, eps: float) -> Tensor:
    """(..., h), weight and bias (h,) -> (..., h)."""
    return _LayerNorm.apply(input_, weight, bias, eps)


def rms_norm(input_: Tensor, weight: Parameter, eps: float) -> Tensor:
    """(..., h), weight (h,) -> (..., h)."""
    return _RMSNorm.apply(input_, weight, eps)
