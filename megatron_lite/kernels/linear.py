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

from megatron_lite.distributed.traffic import Handle
from megatron_lite.kernels.products import add_product, affine, product
from megatron_lite.parameter import Function, Parameter

Forward = Callable[..., Tensor]  # (x, weight, bias) -> y; see `multiply`


# -- the collectives around products
# ---------------------------------------------------------------------------------------------


class Pending:
    """A tensor whose collective may be in flight.

    Args:
        own: tokens that are complete already. Products begin with them, and split the tokens in the
            same way every time, so that recomputation gives the same bits.
        is_slice: `wait` returns a copy, so that the memory of all tokens can be freed.
    """

    def __init__(
        self,
        tensor: Tensor,
        work: Handle | None = None,
        own: slice | None = None,
        is_slice: bool = False,
    ) -> None:
        self._tensor = tensor
        self._work = work
        self._own = own
        self._is_slice = is_slice

    def wait(self, copies: bool = True) -> Tensor:
        """Return the complete tensor. copies: see `is_slice`."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            if self._is_slice and copies:
                self._tensor = self._tensor.clone()
        return self._tensor

    def affine(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """See `multiply`."""
        return self._multiplied(lambda rows, out: affine(rows, weight, bias, out), weight.shape[0])

    def times(self, weight: Tensor) -> Tensor:
        """See `multiply_back`."""
        return self._multiplied(lambda rows, out: product(rows, weight.t(), out), weight.shape[1])

    def _multiplied(
        self, multiply: Callable[[Tensor, Tensor | None], Tensor], channels: int
    ) -> Tensor:
        """Return `multiply(rows, out)` for all tokens, this rank's first."""
        assert self._own is not None
        rows, own = self._tensor.flatten(0, -2), self._own
        result = rows.new_empty(len(rows), channels)
        multiply(rows[own], result[own])
        self.wait()
        for others in (slice(0, own.start), slice(own.stop, None)):
            if len(rows[others]):
                multiply(rows[others], result[others])
        return result.view(*self._tensor.shape[:-1], channels)


Arriving = Tensor | Pending  # with several ranks it may be in flight


def complete(x: Arriving) -> Tensor:
    """Return the complete tensor."""
    return x if isinstance(x, Tensor) else x.wait()


class Exchange:
    """The collectives before and after products; a single rank exchanges nothing."""

    def start_gather(self, residual: Tensor) -> Arriving:
        """Start to gather all tokens: (t, h) if the residual stream is (t, h), else (b, s, h) or
        (1, b s, h)."""
        return residual

    def start_reduce(self, parts: Tensor) -> Arriving:
        """Start to sum `parts` (..., h) over ranks into the residual stream; may overwrite
        `parts`."""
        return parts

    def reduced_product(
        self, forward: Forward, x: Arriving, weight: Any, bias: Tensor | None
    ) -> Tensor:
        """Return x (..., i) times weight (o, i)^T plus bias (o,), summed over ranks into the
        residual stream."""
        return forward(x, weight, bias)


NO_EXCHANGE = Exchange()


# -- the products
# ---------------------------------------------------------------------------------------------


def multiply(x: Arriving, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product of (..., i) with weight (o, i)^T plus bias (o,), (..., o)."""
    if isinstance(x, Tensor):
        return affine(x, weight, bias)
    return x.affine(weight, bias)


def multiply_back(dy: Arriving, weight: Tensor) -> Tensor:
    """Return the product of (t, o) with weight (o, i), (t, i)."""
    return product(dy, weight.t()) if isinstance(dy, Tensor) else dy.times(weight)


def accumulate_product(weight: Parameter, dy: Tensor, x: Tensor) -> None:
    """Add dy (t, o)^T x (t, i) to the weight's gradient, in the gradient's dtype."""
    add_product(weight.main_grad, dy.t(), x, weight.begin_gradient())


class Products(NamedTuple):
    """The three products of a linear layer; by default in the dtype of its weight."""

    forward: Forward = multiply  # (..., i) -> (..., o)
    input_gradient: Callable[[Arriving, Parameter], Tensor] = multiply_back  # (t, o) -> (t, i)
    of_weight: Callable[[Parameter, Tensor, Tensor], None] = (
        accumulate_product  # of dy (t, o) and x (t, i)
    )
    adapters: tuple[Parameter, ...] = ()  # trained instead of the weight; see `kernels/adapters.py`

    def needs_input(self, weight: Parameter) -> bool:
        """Return whether gradients of parameters need the layer's input."""
        return weight.requires_grad or bool(self.adapters)

    def add_gradients(
        self, weight: Parameter, bias: Parameter | None, dy: Tensor, x: Tensor | None
    ) -> None:
        """Add dy^T x to a trained weight's gradient (x None: not needed), and the sum of dy over tokens
        to a trained bias's.

        The product waits for a later pass if this one computes only the input's gradient.
        """
        if x is not None:
            if weight.later is None:
                self.of_weight(weight, dy, x)
            else:  # without the graph
                weight.later.append(
                    functools.partial(self.of_weight, weight, dy.detach(), x.detach())
                )
        if bias is not None and bias.requires_grad:
            bias.accumulate(functools.partial(torch.sum, dy, 0, dtype=bias.main_grad.dtype))


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
        before: Exchange,
        after: Exchange,
        products: Products,
        *adapters: Parameter,
    ) -> Tensor:
        if products.needs_input(weight):
            ctx.save_for_backward(x)
        ctx.kept = weight, bias, before, after, products, x.shape
        return after.reduced_product(products.forward, before.start_gather(x), weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, before, after, products, shape = ctx.kept
        gathering, dx = after.start_gather(dy.reshape(-1, dy.shape[-1])), None
        x = before.start_gather(*ctx.saved_tensors) if products.needs_input(weight) else None
        if ctx.needs_input_grad[0]:
            dx = before.start_reduce(products.input_gradient(gathering, weight))
        flat_dy = complete(gathering)
        products.add_gradients(
            weight, bias, flat_dy, None if x is None else complete(x).flatten(0, -2)
        )
        dx = None if dx is None else complete(dx).view(shape)
        return dx, *(None,) * (5 + len(products.adapters))


def linear(
    x: Tensor,
    weight: Parameter,
    bias: Parameter | None = None,
    before: Exchange = NO_EXCHANGE,
    after: Exchange = NO_EXCHANGE,
    products: Products = PLAIN,
) -> Tensor:
    """Compute x (..., i), weight (o, i), bias (o,) -> (..., o).

    before: exchange of the input if outputs are split over ranks. after: of the output if inputs
    are split.
    """
    return _Linear.apply(x, weight, bias, before, after, products, *products.adapters)
