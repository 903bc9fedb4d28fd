"""A recomputed layer saves only its input; its backward pass runs the forward pass again with the
same seeds.

forward: y = f(x), saving x        backward: y = f(x) again, saving what f saves, then dx from dy
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.parameter import Function, backward
from megatron_lite.zero.layer import Layer


class _Recomputed(Function):
    """Autograd function of `recompute`. Takes the trained parameters as arguments so that the
    output requires a gradient even if the input does not."""

    @staticmethod
    def forward(
        ctx: Any, layer: Layer, hidden: Tensor, micro_batch: Any, *trained: Tensor
    ) -> Tensor:
        ctx.layer, ctx.micro_batch = layer, micro_batch
        ctx.save_for_backward(hidden)
        return layer(hidden, micro_batch)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            backward(ctx.layer(hidden, ctx.micro_batch), grad_output)
        return None, hidden.grad, *(None for _ in ctx.needs_input_grad[2:])


def recompute(layer: Layer, hidden: Tensor, micro_batch: Any) -> Tensor:
    """Return `layer(hidden, micro_batch)`, saving only `hidden`; the layer accumulates its
    parameters' gradients."""
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    return _Recomputed.apply(layer, hidden, micro_batch, *trained)
