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
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.distributed.expert_group import NOT_SHARED, ExpertGroup
from megatron_lite.kernels.expert_exchange import Dispatch, Exchange, Segments
from megatron_lite.kernels.mlp import Bias, activate, activate_backward
from megatron_lite.kernels.products import add_product, affine, product
from megatron_lite.parameter import Function, Parameter


class Products:
    """The products of sorted rows with their experts' weights. grouped: all rows at once."""

    def __init__(self, rows: Segments, grouped: bool) -> None:
        self.rows, self.grouped = rows, grouped and len(rows.experts) > 0

    def _used(self) -> Iterator[tuple[int, slice]]:
        return (
            (expert, rows) for expert, rows in enumerate(self.rows.spans) if rows.start < rows.stop
        )

    def affine(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return each row of x (r, i) times its expert's weight (o, i)^T plus its bias, (r, o)."""
        weights = weight.unflatten(0, (self.rows.num_experts, -1))
        biases = None if bias is None else bias.unflatten(0, (self.rows.num_experts, -1))
        if self.grouped:
            result = functional.grouped_mm(x, weights.transpose(1, 2), offs=self.rows.ends)
            return result if biases is None else result.add_(biases[self.rows.experts])
        result = x.new_empty(len(x), weights.shape[1])
        for expert, rows in self._used():
            own = None if biases is None else biases[expert]
            affine(x[rows], weights[expert], own, result[rows])
        return result

    def times(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return each row of dy (r, o) times its expert's weight (o, i), (r, i)."""
        weights = weight.unflatten(0, (self.rows.num_experts, -1))
        if self.grouped:
            return functional.grouped_mm(dy, weights, offs=self.rows.ends)
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
            sums = dy.new_zeros(self.rows.num_experts, dy.shape[1], dtype=bias.main_grad.dtype)
            for expert, rows in self._used():
                torch.sum(dy[rows], 0, dtype=sums.dtype, out=sums[expert])
            bias.accumulate(sums.view(-1))

    def _add_products(self, weight: Parameter, dy: Tensor, x: Tensor) -> None:
        if self.grouped:
            products = functional.grouped_mm(dy.t(), x, offs=self.rows.ends)  # (E, o, i)
            idle = self.rows.ends == functional.pad(self.rows.ends, (1, -1))
            weight.accumulate(products.masked_fill_(idle.view(-1, 1, 1), 0.0).flatten(0, 1))
            return
        first, totals = (
            weight.begin_gradient(),
            weight.main_grad.unflatten(0, (self.rows.num_experts, -1)),
        )
        for expert, rows in enumerate(self.rows.spans):
            if rows.start < rows.stop:
                add_product(totals[expert], dy[rows].t(), x[rows], first)
            elif first:
                totals[expert].zero_()


class Rows(Segments):
    """The rows of t tokens with K choices each, r = t K, sorted by expert.

    chosen: (t, K) int64, ascending.
    """

    def __init__(self, chosen: Tensor, num_experts: int) -> None:
        experts, self._order = chosen.flatten().sort(stable=True)  # (r,) each
        super().__init__(experts, num_experts)
        self.shape = chosen.shape
        self.tokens = self._order // chosen.shape[1]  # (r,)

    def of(self, values: Tensor) -> Tensor:
        """Return values (t, K) by row, (r, 1)."""
        return values.flatten()[self._order].unsqueeze(1)

    def by_choice(self, values: Tensor) -> Tensor:
        """Return values by row (r,) as (t, K)."""
        return torch.empty_like(values).index_copy_(0, self._order, values).view(self.shape)

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

    dispatch: Dispatch
    products: Products
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
        dispatch, level = options.dispatch, options.recompute_level
        rows, products = dispatch.home, options.products
        of_rows = dispatch.rows_of(x)  # (r, h)
        u = products.affine(of_rows, up, up_bias)  # (r, f) or (r, 2 f)
        z = options.activate(u)  # (r, f)
        keeps = dispatch.sends and level != "full"
        ctx.save_for_backward(
            None if keeps else x,
            of_rows if keeps else None,
            scores,
            None if level == "full" else u,
            z if level == "none" else None,
        )
        (y,) = dispatch.back(products.affine(z, down, down_bias if options.adds_bias else None))
        return rows.summed(y, rows.of(scores)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, of_rows, scores, u, z = ctx.saved_tensors
        up, up_bias, down, down_bias = ctx.weights
        options: _Options = ctx.options
        dispatch, products, activation, gated, limit, _, triton, adds_bias = options
        rows, work = dispatch.home, dispatch.work
        if of_rows is None:
            of_rows = dispatch.rows_of(x)  # (r, h)
        if u is None:
            u = products.affine(of_rows, up, up_bias)
        if z is None:
            z = options.activate(u)
        dtype = dy.dtype
        dy, scores = dispatch.out(
            dy.index_select(0, rows.tokens), rows.of(scores)
        )  # (r, h) and (r, 1)
        dz = products.times(dy, down)
        of_scores = (dz * z).sum(1, dtype=torch.float32)
        if adds_bias and down_bias is not None:
            biases = down_bias.unflatten(0, (work.num_experts, -1))[work.experts]
            of_scores += (dy * biases).sum(1, dtype=torch.float32)
        scaled = z if down_bias is None else dy  # z is narrower
        scaled.mul_(scores)
        products.add_gradients(down, down_bias, dy, z)
        del dy, z
        du, _ = activate_backward(dz.mul_(scores), u, activation, gated, False, triton, limit)
        products.add_gradients(up, up_bias, du, of_rows)
        if not ctx.needs_input_grad[0]:
            return None, rows.by_choice(*dispatch.back(of_scores)), *(None,) * 5
        dx, of_scores = dispatch.back(products.times(du, up), of_scores)
        return rows.summed(dx).to(dtype), rows.by_choice(of_scores), *(None,) * 5


def dispatched(
    x: Tensor, chosen: Tensor, num_experts: int, group: ExpertGroup = NOT_SHARED
) -> Dispatch:
    """Start sending tokens x (t, h) to the ranks of their chosen experts (t, K), ascending, int64.

    num_experts: of all ranks. group: those that share them out.
    """
    rows = Rows(chosen, num_experts)
    if group.world_size == 1:
        return Dispatch(rows, rows)
    exchange = Exchange(rows, group)
    exchange.begin(x.detach())
    return exchange


def experts(
    x: Tensor,
    scores: Tensor,
    dispatch: Dispatch,
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
    """Compute x (t, h), scores (t, K) in fp32 -> y (t, h). E: this rank's experts.

    Args:
        dispatch: the rows of x, from `dispatched`.
        up, up_bias: (E f, h) and (E f,) or, if gated, (E 2 f, h) and (E 2 f,), each expert's gate
            first.
        down, down_bias: (E h, f) and (E h,).
        activation, recompute_level, limit: see `mlp`.
        adds_bias: whether y includes the down bias; with f split over ranks, it does on one of them.
    """
    products = Products(dispatch.work, _can_group(x, down.shape[1]))
    options = _Options(
        dispatch, products, activation, gated, limit, recompute_level, triton, adds_bias
    )
    return _Experts.apply(x, scores, up, up_bias, down, down_bias, options)


def _can_group(x: Tensor, channels: int) -> bool:
    """Return whether grouped products can multiply x (t, h): on GPUs in 16 bits, if rows of all
    matrices start at multiples of 16 bytes."""
    return x.is_cuda and x.dtype.itemsize == 2 and channels % 8 == x.shape[1] % 8 == 0
