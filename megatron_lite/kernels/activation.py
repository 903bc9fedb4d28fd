"""MLP activations, plain y = a(x) or gated y = a(gate) * up with gate and up side by side in one tensor.

    plain: dx = dy a'(x)        gated: dgate = dy up a'(gate),   dup = dy a(gate)

Without autograd: the MLP calls both directions itself (see `mlp.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

aten = torch.ops.aten

# name -> (a(x) in new memory, dy * a'(x) from (dy, x))
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (
        lambda x: functional.gelu(x, approximate="tanh"),
        lambda grad, x: aten.gelu_backward(grad, x, approximate="tanh"),
    ),
    "gelu_exact": (functional.gelu, lambda grad, x: aten.gelu_backward(grad, x)),
    "silu": (functional.silu, aten.silu_backward),
    "relu": (functional.relu, lambda grad, x: grad * (x > 0)),
    "squared_relu": (lambda x: functional.relu(x).square(), lambda grad, x: grad * functional.relu(x) * 2),
    "identity": (torch.clone, lambda grad, x: grad),
}


def activate(input_: Tensor, name: str, gated: bool) -> Tensor:
    """(..., f) -> (..., f), or (..., 2 f) -> (..., f) when gated; in new memory."""
    forward = FUNCTIONS[name][0]
    if not gated:
        return forward(input_)
    gate, up = input_.chunk(2, dim=-1)
    return forward(gate).mul_(up)


def activate_backward(grad_output: Tensor, input_: Tensor, name: str, gated: bool) -> Tensor:
    """The gradient of the input of `activate`; when gated it takes the input's memory."""
    forward, backward = FUNCTIONS[name]
    if not gated:
        return backward(grad_output, input_)
    gate, up = input_.chunk(2, dim=-1)
    grad_activation = grad_output * up
    torch.mul(grad_output, forward(gate), out=up)
    gate.copy_(backward(grad_activation, gate))
    return input_
