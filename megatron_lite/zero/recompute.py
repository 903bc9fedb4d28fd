"""A layer of which only the input is kept: its backward pass runs the forward pass again, with the same seeds.

forward: y = f(x), keeping x        backward: y = f(x) once more, keeping what f keeps, then dx from dy
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Recomputed(torch.autograd.Function):
    """The trained parameters are arguments so that the output needs a gradient where only they do."""

    @staticmethod
    def forward(ctx: Any, layer: torch.nn.Module, hidden: Tensor, micro_batch: Any, *trained: Tensor) -> Tensor:
        ctx.layer, ctx.micro_batch = layer, micro_batch
        ctx.save_for_backward(hidden)
        return layer(hidden, micro_batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            output = ctx.layer(hidden, ctx.micro_batch)
        torch.autograd.backward(output, grad_output)
        return None, hidden.grad, *(None for _ in ctx.needs_input_grad[2:])


def recomputed(layer: torch.nn.Module, hidden: Tensor, micro_batch: Any) -> Tensor:
    """`layer(hidden, micro_batch)`, keeping only `hidden`; the layer adds to its parameters' gradients itself."""
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    return _Recomputed.apply(layer, hidden, micro_batch, *trained)
