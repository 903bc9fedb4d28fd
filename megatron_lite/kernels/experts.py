"""Experts: each token's MLPs of K chosen experts, and the sum of their outputs times scores.

    y = sum_k s_k (W_e z_k + c_e),  z_k = a(U_e x + b_e),  e = the token's k-th expert        see `mlp.py`

    dz_k = s_k (dy W_e)        ds_k = dy W_e . z_k + dy . c_e        W_e.main_grad += sum of (s_k dy)^T z_k

No token is dropped. Rows, one for each token and choice, are sorted by expert and within an expert
by token, so that each expert's rows are consecutive and it multiplies only its own. Outputs are
added in fp32 in ascending order of experts, so that no result depends on the order of execution. An
expert without tokens gets a gradient of zeros.

A weight has the rows of one expert after those of another: up (E f, h) or, if gated, (E 2 f, h),
and down (E h, f). On GPUs one grouped product multiplies all rows in 16 bits; otherwise a loop over
experts reads the ends of their rows on the host.

Saved for the backward pass, in elements per token: x, u and z (h + 2 K f, gated h + 3 K f); with
recompute level "activation" x and u, with "full" only x.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.kernels.mlp import Bias, activate, activate_backward
from megatron_lite.kernels.products import add_product, affine, product
from megatron_lite.parameter import Function, Parameter


class Rows:
    """The rows of t tokens with K choices each, r = t K, sorted by expert.

    chosen: (t, K) int64, ascending. grouped: use grouped products.
    """

    def __init__(self, chosen: Tensor, num_experts: int, grouped: bool = False) -> None:
        self.experts, self._order = chosen.flatten().sort(stable=True)  # (r,) each
        self.shape = chosen.shape
        self.num_experts, self._grouped = num_experts, grouped
        self.tokens = self._order // chosen.shape[1]  # (r,)
        every = torch.arange(num_experts, device=chosen.device)
        self.ends = torch.searchsorted(self.experts, every, right=True, out_int32=True)  # (E,)

    @functools.cached_property
    def spans(self) -> list[slice]:
        """Each expert's rows (reads the device). A plan expects equally many."""
        rows, count = len(self.tokens), self.num_experts
        ends = (
            [rows * (expert + 1) // count for expert in range(count)]
            if self.ends.is_meta
            else self.ends.tolist()
        )
        return [slice(*pair) for pair in itertools.pairwise([0, *ends])]

    def _used(self) -> Iterator[tuple[int, slice]]:
        return ((expert, rows) for expert, rows in enumerate(self.spans) if rows.start < rows.stop)

    def of(self, values: Tensor) -> Tensor:
        """Return values (t, K) by row, (r, 1)."""
        return values.flatten()[self._order].unsqueeze(1)

    def by_choice(self, values: Tensor) -> Tensor:
        """Return values by row (r,) as (t, K)."""
        return torch.empty_like(values).index_copy_(0, self._order, values).view(self.shape)

    def affine(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return each row of x (r, i) times its expert's weight (o, i)^T plus its bias, (r, o)."""
        weights = weight.unflatten(0, (self.num_experts, -1))
        biases = None if bias is None else bias.unflatten(0, (self.num_experts, -1))
        if self._grouped:
            result = functional.grouped_mm(x, weights.transpose(1, 2), offs=self.ends)
            return result if biases is None else result.add_(biases[self.experts])
        result = x.new_empty(len(x), weights.shape[1])
        for expert, rows in self._used():
            own = None if biases is None else biases[expert]
            affine(x[rows], weights[expert], own, result[rows])
        return result

    def times(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return each row of dy (r, o) times its expert's weight (o, i), (r, i)."""
        weights = weight.unflatten(0, (self.num_experts, -1))
        if self._grouped:
            return functional.grouped_mm(dy, weights, offs=self.ends)
        result = dy.new_empty(len(dy), weights.shape[2])
        for expert, rows in self._used():
            product(dy[rows], weights[expert].t(), result[rows])
        return result

    def add_gradients(self, weight: Parameter, bias: Bias, dy: Tensor, x: Tensor) -> None:
        """Add each expert's dy (r, o)^T x (r, i) to a trained weight's gradient, and its sum of dy
        to a trained bias's. See `Products.add_gradients`."""
        if weight.requires_grad:
            add = functools.partial(self._add_products, weight, dy, x)
            add() if weight.later is None else weight.later.append(add)
        if bias is not None and bias.requires_grad:
            sums = dy.new_zeros(self.num_experts, dy.shape[1], dtype=bias.main_grad.dtype)
            for expert, rows in self._used():
                torch.sum(dy[rows], 0, dtype=sums.dtype, out=sums[expert])
            bias.accumulate(sums.view(-1))

    def _add_products(self, weight: Parameter, dy: Tensor, x: Tensor) -> None:
        if self._grouped:
            products = functional.grouped_mm(dy.t(), x, offs=self.ends)  # (E, o, i)
            idle = self.ends == functional.pad(self.ends, (1, -1))
            weight.accumulate(products.masked_fill_(idle.view(-1, 1, 1), 0.0).flatten(0, 1))
            return
        first, totals = (
            weight.begin_gradient(),
            weight.main_grad.unflatten(0, (self.num_experts, -1)),
        )
        for expert, rows in enumerate(self.spans):
            if rows.start < rows.stop:
                add_product(totals[expert], dy[rows].t(), x[rows], first)
            elif first:
                totals[expert].zero_()

    def summed(self, values: Tensor, scores: Tensor | None = None) -> Tensor:
        """Return each token's sum of its rows of values (r, h), times scores (r, 1): (t, h) in fp32.

        Overwrites fp32 values.
        """
        values = values.float() if scores is None else values.float().mul_(scores)
        tokens, choices = self.shape
        if not values.is_cuda:  # there, `index_add_` adds in any order
            return values.new_zeros(tokens, values.shape[1]).index_add_(0, self.tokens, values)
        places = torch.empty_like(self._order)
        places[self._order] = torch.arange(len(places), device=places.device)
        places = places.view(tokens, choices)
        total = values[places[:, 0]]
        for choice in range(1, choices):
            total += values[places[:, choice]]
        return total


class _Options(NamedTuple):
    """Arguments of `experts` that are not tensors. adds_bias: whether y includes the down bias."""

    rows: Rows
    activation: str
    gated: bool
    limit: float
    recompute_level: str
    triton: bool
    adds_bias: bool

    def activate(self, u: Tensor) -> Tensor:
        return activate(u, self.activation, self.gated, self.triton, self.limit)


class _Experts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scores: Tensor,
        up: Parameter,
        up_bias: Bias,
        down: Parameter,
        down_bias: Bias,
        options: _Options,
    ) -> Tensor:
        ctx.weights, ctx.options = (up, up_bias, down, down_bias), options
        rows, level = options.rows, options.recompute_level
        u = rows.affine(x[rows.tokens], up, up_bias)  # (r, f) or (r, 2 f)
        z = options.activate(u)  # (r, f)
        ctx.save_for_backward(
            x, scores, None if level == "full" else u, z if level == "none" else None
        )
        y = rows.affine(z, down, down_bias if options.adds_bias else None)
        return rows.summed(y, rows.of(scores)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, scores, u, z = ctx.saved_tensors
        up, up_bias, down, down_bias = ctx.weights
        options: _Options = ctx.options
        rows, activation, gated, limit, _, triton, adds_bias = options
        of_rows = x[rows.tokens]  # (r, h)
        if u is None:
            u = rows.affine(of_rows, up, up_bias)
        if z is None:
            z = options.activate(u)
        dy = dy[rows.tokens]  # (r, h)
        dz = rows.times(dy, down)
        of_scores = (dz * z).sum(1, dtype=torch.float32)
        if adds_bias and down_bias is not None:
            biases = down_bias.unflatten(0, (rows.num_experts, -1))[rows.experts]
            of_scores += (dy * biases).sum(1, dtype=torch.float32)
        scores = rows.of(scores)
        rows.add_gradients(down, down_bias, dy.mul_(scores), z)
        del dy, z
        du, _ = activate_backward(dz.mul_(scores), u, activation, gated, False, triton, limit)
        rows.add_gradients(up, up_bias, du, of_rows)
        dx = rows.summed(rows.times(du, up)).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, rows.by_choice(of_scores), *(None,) * 5


def experts(
    x: Tensor,
    scores: Tensor,
    chosen: Tensor,
    up: Parameter,
    up_bias: Bias,
    down: Parameter,
    down_bias: Bias,
    activation: str,
    gated: bool,
    recompute_level: str = "none",
    triton: bool = False,
    adds_bias: bool = True,
    limit: float = 0.0,
) -> Tensor:
    """Compute x (t, h), scores (t, K) in fp32, chosen (t, K) -> y (t, h).

    Args:
        chosen: each token's experts, ascending, int64.
        up, up_bias: (E f, h) and (E f,) or, if gated, (E 2 f, h) and (E 2 f,), each expert's gate
            first.
        down, down_bias: (E h, f) and (E h,).
        activation, recompute_level, limit: see `mlp`.
        adds_bias: whether y includes the down bias; with f split over ranks, it does on one of them.
    """
    num_experts = len(down) // x.shape[1]
    rows = Rows(chosen, num_experts, _can_group(x, down.shape[1]))
    options = _Options(rows, activation, gated, limit, recompute_level, triton, adds_bias)
    return _Experts.apply(x, scores, up, up_bias, down, down_bias, options)


def _can_group(x: Tensor, channels: int) -> bool:
    """Return whether grouped products can multiply x (t, h): on GPUs in 16 bits, if rows of all
    matrices start at multiples of 16 bytes."""
    return x.is_cuda and x.dtype.itemsize == 2 and channels % 8 == x.shape[1] % 8 == 0
