"""Adapters of a frozen linear layer (LoRA, Hu et al. 2021, arXiv:2106.09685), inside its products:

    y = W x + c B A x        u = c A x, t = c B^T dy:    dx += A^T t    A.main_grad += t x^T    B.main_grad += dy u^T

A weight may hold several linear maps (queries, keys, values). Each has its own A and B, stacked by
rows: u is one product of x with all A's, and each map's rows of y get the product of its B with its
part of u, added in place.

Of W, the backward pass only computes the gradient of the input. The input is saved for A.

Tensor-parallel ranks that split the outputs have all of A and their rows of B; t, and so the
gradient of A, is a partial sum. Ranks that split the inputs have their columns of A and all of B; u,
and so the gradient of B, is a partial sum. No collective is added: the layer's own sums dx or y, and
`zero/replicas.py` the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.kernels.linear import Arriving, Products, complete
from megatron_lite.kernels.products import add_product, product
from megatron_lite.kernels.triton_support import generator_for
from megatron_lite.parameter import Parameter


@dataclass
class AdapterPass:
    """The products of one pass through a linear layer with adapters.

    a: (m r, i), b: (o', r), for m linear maps. rows: of the layer's outputs that each map computes, as
    (start, end). factor: c. dropout: of x, before A; its mask depends only on the seed; None: no
    dropout. base: the products with W.
    """

    a: Parameter
    b: Parameter
    rows: tuple[tuple[int, int], ...]
    factor: float
    dropout: float
    seed: int | None
    base: Products
    _u: Tensor | None = None
    _t: Tensor | None = None

    def products(self) -> Products:
        """Return the layer's products."""
        return Products(self._forward, self._input_gradient, self._add_gradients, (self.a, self.b))

    def _forward(self, x: Arriving, weight: Parameter, bias: Tensor | None) -> Tensor:
        """Compute x (..., i) -> y (..., o)."""
        y = self.base.forward(x, weight, bias)
        flat = self._dropped(complete(x).flatten(0, -2))
        self._u = product(flat, self.a).mul_(self.factor)
        for of_y, b, of_u in self._maps(y.view(-1, y.shape[-1]), self._u):
            add_product(of_y, of_u, b.t(), first=False, blas=True)
        return y

    def _input_gradient(self, dy: Arriving, weight: Parameter) -> Tensor:
        """Compute dy (t, o) -> dx (t, i)."""
        dx = self.base.input_gradient(dy, weight)
        self._t = self._inner_gradient(complete(dy))
        if (mask := self._mask(dx)) is None:
            add_product(dx, self._t, self.a.detach(), first=False, blas=True)
        else:
            dx += product(self._t, self.a.t()).mul_(mask)
        return dx

    def _add_gradients(self, weight: Parameter, dy: Tensor, x: Tensor) -> None:
        """Add to the gradients of A and B, given dy (t, o) and x (t, i)."""
        assert self._u is not None
        t, self._t = self._inner_gradient(dy) if self._t is None else self._t, None
        add_product(self.a.main_grad, t.t(), self._dropped(x), self.a.begin_gradient())
        first, start = self.b.begin_gradient(), 0
        for of_dy, b, of_u in self._maps(dy, self._u):
            rows = self.b.main_grad[start : start + len(b)]
            add_product(rows, of_dy.t(), of_u, first)
            start += len(b)

    def _inner_gradient(self, dy: Tensor) -> Tensor:
        """Return t (t, m r)."""
        t = dy.new_empty(len(dy), len(self.a))
        for of_dy, b, of_t in self._maps(dy, t):
            of_t.copy_(product(of_dy, b.t()))
        return t.mul_(self.factor)

    def _maps(self, outputs: Tensor, inner: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each map's outputs (t, o_k), B (o_k, r) and inner activations (t, r)."""
        b, start = self.b.detach(), 0
        inner_of_maps = inner.split(b.shape[1], dim=1)
        for (first, end), of_inner in zip(self.rows, inner_of_maps, strict=True):
            yield outputs[:, first:end], b[start : start + end - first], of_inner
            start += end - first

    def _dropped(self, x: Tensor) -> Tensor:
        mask = self._mask(x)
        return x if mask is None else x * mask

    def _mask(self, x: Tensor) -> Tensor | None:
        if self.dropout == 0.0 or self.seed is None:
            return None
        generator, kept = generator_for(x).manual_seed(self.seed), 1.0 - self.dropout
        return torch.empty_like(x).bernoulli_(kept, generator=generator).div_(kept)
