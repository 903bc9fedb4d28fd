"""Linear layer: y = x W^T + b.

    dx = dy W        W.main_grad += dy^T x        b.main_grad += sum over tokens of dy

The input is saved for the backward pass only if the weight is trained. Frozen parameters cost no
computation. The first gradient of an accumulation overwrites `main_grad` and later ones add to it,
so no buffer is zeroed first. See `products.py` for the products.

Products use the weight's dtype, or rounded factors: see `eight_bit.py`.

Tensor parallelism splits a layer's outputs or inputs; see `tensor_collectives.py`. With split
outputs the input is gathered, and gathered again in the backward pass, overlapped with dy W; the
reduction of dx overlaps with the weight gradient. With split inputs the product is reduced over
ranks, and dy is gathered. While tokens are gathered, a rank multiplies its own. One rank adds the
bias to its partial sum; every rank sees all tokens' dy and thus computes the same bias gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.kernels.products import add_product
from megatron_lite.kernels.tensor_collectives import ONE_RANK, Affine, Collectives, Pending
from megatron_lite.parameter import Function, Parameter


def accumulate(parameter: Parameter, gradient: Tensor | Callable[[Tensor | None], Tensor]) -> None:
    """Write the first gradient of an accumulation to `main_grad`, or add a later one, of any dtype.

    gradient: a tensor, or a function of `out` (`main_grad` for the first gradient), which saves the
    copy if it writes there.
    """
    first, grad = parameter.begin_gradient(), parameter.main_grad
    value = gradient if isinstance(gradient, Tensor) else gradient(grad if first else None)
    if value is not grad:
        grad.copy_(value) if first else grad.add_(value)


def accumulate_bias(bias: Parameter | None, dy: Tensor) -> None:
    """Add the sum of dy (t, o) over tokens to a trained bias's gradient; the first sum is not
    copied."""
    if bias is not None and bias.requires_grad:
        dtype = bias.main_grad.dtype
        accumulate(bias, lambda out: torch.sum(dy, 0, dtype=dtype, out=out))


def accumulate_product(weight: Parameter, dy: Tensor, x: Tensor) -> None:
    """Add dy (t, o)^T x (t, i) to the weight's gradient, in the gradient's dtype."""
    add_product(weight.main_grad, dy.t(), x, weight.begin_gradient())


class Products(NamedTuple):
    """The three products of a linear layer; by default in the dtype of its weight."""

    forward: Affine = Pending.affine  # (..., i) -> (..., o)
    input_gradient: Callable[[Pending, Parameter], Tensor] = Pending.times  # (t, o) -> (t, i)
    of_weight: Callable[[Parameter, Tensor, Tensor], None] = (
        accumulate_product  # of dy (t, o) and x (t, i)
    )

    def add_weight_gradient(self, weight: Parameter, dy: Tensor, x: Tensor) -> None:
        """Add dy^T x to the weight's gradient: now, or in a later pass if this one computes only
        the input's gradient."""
        if weight.later is None:
            self.of_weight(weight, dy, x)
        else:
            # without the graph
            weight.later.append(functools.partial(self.of_weight, weight, dy.detach(), x.detach()))


PLAIN = Products()


# -- the layer
# -------------------------------------------------------------------------------------------------------


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Parameter,
        bias: Parameter | None,
        before: Collectives,
        after: Collectives,
        products: Products,
    ) -> Tensor:
        if weight.requires_grad:
            ctx.save_for_backward(x)
        ctx.kept = weight, bias, before, after, products, x.shape
        return after.reduced_affine(before.start_gather(x), weight, bias, products.forward)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, before, after, products, shape = ctx.kept
        gathering, dx = after.start_gather(dy.reshape(-1, dy.shape[-1])), None
        x = before.start_gather(*ctx.saved_tensors) if weight.requires_grad else None
        if ctx.needs_input_grad[0]:
            dx = before.start_reduce(products.input_gradient(gathering, weight))
        flat_dy = gathering.wait()
        if x is not None:
            products.add_weight_gradient(weight, flat_dy, x.wait().flatten(0, -2))
        accumulate_bias(bias, flat_dy)
        return None if dx is None else dx.wait().view(shape), *(None,) * 5


def linear(
    x: Tensor,
    weight: Parameter,
    bias: Parameter | None = None,
    before: Collectives = ONE_RANK,
    after: Collectives = ONE_RANK,
    products: Products = PLAIN,
) -> Tensor:
    """Compute x (..., i), weight (o, i), bias (o,) -> (..., o).

    before: collectives of the input if outputs are split over ranks. after: of the output if inputs
    are split.
    """
    return _Linear.apply(x, weight, bias, before, after, products)
