"""MLP activations, plain a(x) or gated a(gate) * up with gate and up side by side in one tensor.

Only the input is kept for the backward pass: the derivative is computed from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

aten = torch.ops.aten

# name -> (a(x), dy * a'(x) from (dy, x))
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (
        lambda x: functional.gelu(x, approximate="tanh"),
        lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
    ),
    "gelu_exact": (functional.gelu, lambda grad, x: aten.gelu_backward(grad, x)),
    "silu": (functional.silu, aten.silu_backward),
    "relu": (functional.relu, lambda grad, x: grad * (x > 0)),
    "squared_relu": (lambda x: functional.relu(x).square(), lambda grad, x: grad * functional.relu(x) * 2),
    "identity": (lambda x: x, lambda grad, x: grad),
}


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(input_)
        ctx.name = name
        return FUNCTIONS[name][0](input_).clone() if name == "identity" else FUNCTIONS[name][0](input_)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (input_,) = ctx.saved_tensors
        return FUNCTIONS[ctx.name][1](grad_output, input_), None


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_: Tensor, name: str) -> Tensor:
        ctx.save_for_backward(input_)
        ctx.name = name
        gate, up = input_.chunk(2, dim=-1)
        return FUNCTIONS[name][0](gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (input_,) = ctx.saved_tensors
        forward, backward = FUNCTIONS[ctx.name]
        gate, up = input_.chunk(2, dim=-1)
        grad_input = torch.empty_like(input_)
        grad_gate, grad_up = grad_input.chunk(2, dim=-1)
        torch.mul(grad_output, forward(gate), out=grad_up)
        grad_gate.copy_(backward(grad_output * up, gate))
        return grad_input, None


def activation(input_: Tensor, name: str, gated: bool) -> Tensor:
    """(..., f) -> (..., f), or (..., 2 f) -> (..., f) when gated."""
    return (_GatedActivation if gated else _Activation).apply(input_, name)
