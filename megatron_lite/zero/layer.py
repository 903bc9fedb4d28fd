"""A stage's layers, as `zero` knows them, and whole-layer recomputation.

A recomputed layer saves only its input; its backward pass runs the forward pass again with the same seeds.

    forward: y = f(x), saving x        backward: y = f(x) again, saving what f saves, then dx from dy
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Layer(Protocol):
    """A module that maps hidden (b, s, h) to hidden (b, s, h); its parameters are `Parameter`s on the meta device."""

    name: str  # unique in the model
    borrows_from: tuple[torch.nn.Module, ...]  # layers whose parameters this one also uses (a tied head: the embedding)
    gradients_in_forward: bool  # the forward pass already writes parameter gradients (the loss does)
    backward_needs_weights: bool  # the backward pass reads parameters, so they must be gathered for it
    recomputed: bool

    def __call__(self, hidden: Tensor | None, micro_batch: Any, /) -> Tensor: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def modules(self) -> Iterator[torch.nn.Module]: ...


class _Recomputed(torch.autograd.Function):
    """Takes trained parameters as arguments so that the output requires a gradient even if the input does not."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, hidden: Tensor, micro_batch: Any, *trained: Tensor) -> Tensor:
        ctx.layer, ctx.micro_batch = layer, micro_batch
        ctx.save_for_backward(hidden)
        return layer(hidden, micro_batch)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        hidden = hidden.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            backward(ctx.layer(hidden, ctx.micro_batch), grad_output)
        return None, hidden.grad, *(None for _ in ctx.needs_input_grad[2:])


class _Seeded(torch.autograd.Function):
    """A scalar whose backward pass hands `grad` to `output`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return output.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        grad, ctx.grad = ctx.grad, None
        return grad, None


def backward(output: Tensor, grad: Tensor | None) -> None:
    """Run the backward pass of `output` from its gradient; None: `output` is the loss. Gradients must be enabled.

    `torch.autograd.backward` with a gradient imports a library for symbolic shapes, which takes 0.4 s before the first
    step. On a GPU, avoiding that import would cost one more launch per pass of a stage.
    """
    if grad is None or output.is_cuda:
        torch.autograd.backward(output, grad)
    else:
        torch.autograd.backward(_Seeded.apply(output, grad))


def recompute(layer: Layer, hidden: Tensor, micro_batch: Any) -> Tensor:
    """Return `layer(hidden, micro_batch)`, saving only `hidden`; the layer accumulates its parameters' gradients."""
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    return _Recomputed.apply(layer, hidden, micro_batch, *trained)
