"""Experts: each token's MLPs of K chosen experts, and the sum of their outputs times scores.

    y = sum_k s_k (W_e z_k + c_e),  z_k = a(U_e x + b_e),  e = the token's k-th expert        see `mlp.py`

    dz_k = s_k (dy W_e)        ds_k = dy W_e . z_k + dy . c_e        W_e.main_grad += sum of (s_k dy)^T z_k

No token is dropped. Rows, one for each token and choice, are sorted by expert and within an expert
by token, so that each expert's rows are consecutive and it multiplies only its own. Outputs are
added in fp32 in ascending order of experts, so that no result depends on the order of execution. An
expert without tokens gets a gradient of zeros.

A weight has the rows of one expert after those of another: up (E f, h) or, if gated, (E 2 f, h),
and down (E h, f). On GPUs one grouped product multiplies all rows in 16 bits; otherwise a loop over
experts reads the ends of their rows on the host. On a CPU, rows of a few experts pass through all
products before the next ones do, so that what lies between does not leave the cache.

Adapters of experts (`ExpertAdapter`) have rows of A and of B by expert, so the same products multiply
them.

Saved for the backward pass, in elements per token: x, u and z (h + 2 K f, gated h + 3 K f); with
recompute level "activation" x and u, with "full" only x.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.distributed.expert_group import NOT_SHARED, ExpertGroup
from megatron_lite.kernels.expert_exchange import Dispatch, Exchange, Segments
from megatron_lite.kernels.mlp import Bias, activate, activate_backward
from megatron_lite.kernels.products import add_product, affine, product
from megatron_lite.parameter import Function, Parameter

PART_ROWS = 1024  # from which rows are computed together on a CPU: see `Products.parts`


class Products:
    """The products of sorted rows with their experts' weights. grouped: all rows at once. experts:
    those whose rows these are, in a row; None: all."""

    def __init__(self, rows: Segments, grouped: bool, experts: range | None = None) -> None:
        self.rows, self.grouped = rows, grouped and len(rows.experts) > 0
        self._experts, self.span = experts or range(rows.num_experts), slice(None)
        if experts is not None:
            self.span = slice(rows.spans[experts[0]].start, rows.spans[experts[-1]].stop)

    def parts(self) -> Iterator[Products]:
        """Yield the products of a few experts after the others, whose intermediate results stay in
        a CPU's cache."""
        spans, first = self.rows.spans, 0
        for expert, rows in enumerate(spans):
            is_last = expert == len(spans) - 1
            if is_last or rows.stop - spans[first].start >= PART_ROWS:
                yield Products(self.rows, False, range(first, expert + 1))
                first = expert + 1

    def _used(self) -> Iterator[tuple[int, slice]]:
        first = self.span.start or 0
        for expert in self._experts:
            rows = self.rows.spans[expert]
            if rows.start < rows.stop:
                yield expert, slice(rows.start - first, rows.stop - first)

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
            affine(x[rows], weights[expert], own, result[rows], blas=True)
        return result

    def times(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Return each row of dy (r, o) times its expert's weight (o, i), (r, i)."""
        weights = weight.unflatten(0, (self.rows.num_experts, -1))
        if self.grouped:
            return functional.grouped_mm(dy, weights, offs=self.rows.ends)
        result = dy.new_empty(len(dy), weights.shape[2])
        for expert, rows in self._used():
            product(dy[rows], weights[expert].t(), result[rows], blas=True)
        return result

    def add_gradients(
        self, weight: Parameter, bias: Bias, dy: Tensor, x: Tensor, firsts: dict[int, bool]
    ) -> None:
        """Add each expert's dy (r, o)^T x (r, i) to a trained weight's gradient, and its sum of dy
        to a trained bias's. See `Products.add_gradients` of `linear.py`.

        firsts: of this backward pass: whether a weight's gradients are the first ones.
        """
        if weight.requires_grad:
            add = functools.partial(self._add_products, weight, dy, x, firsts)
            add() if weight.later is None else weight.later.append(add)
        if bias is not None and bias.requires_grad:
            sums = dy.new_zeros(self.rows.num_experts, dy.shape[1], dtype=bias.main_grad.dtype)
            for expert, rows in self._used():
                torch.sum(dy[rows], 0, dtype=sums.dtype, out=sums[expert])
            bias.accumulate(sums.view(-1))

    def _add_products(
        self, weight: Parameter, dy: Tensor, x: Tensor, firsts: dict[int, bool]
    ) -> None:
        if self.grouped:
            products = functional.grouped_mm(dy.t(), x, offs=self.rows.ends)  # (E, o, i)
            idle = self.rows.ends == functional.pad(self.rows.ends, (1, -1))
            weight.accumulate(products.masked_fill_(idle.view(-1, 1, 1), 0.0).flatten(0, 1))
            return
        totals = weight.main_grad.unflatten(0, (self.rows.num_experts, -1))
        if id(weight) not in firsts:
            firsts[id(weight)] = weight.begin_gradient()
            for expert, rows in enumerate(self.rows.spans if firsts[id(weight)] else ()):
                if rows.start == rows.stop:
                    totals[expert].zero_()
        for expert, rows in self._used():
            is_first = firsts[id(weight)]
            add_product(totals[expert], dy[rows].t(), x[rows], is_first, blas=True)


class ExpertAdapter(NamedTuple):
    """An adapter of each expert, c B A: a (E r, i), b (E o, r), factor c; see `adapters.py`."""

    a: Parameter
    b: Parameter
    factor: float

    def inner(self, part: Products, x: Tensor) -> Tensor:
        """Compute x (r, i) -> c A x (r, r')."""
        return part.affine(x, self.a, None).mul_(self.factor)

    def inner_gradient(self, part: Products, dy: Tensor) -> Tensor:
        """Compute dy (r, o) -> c B^T dy (r, r')."""
        return part.times(dy, self.b).mul_(self.factor)


class ExpertMap(NamedTuple):
    """A linear map of each expert on sorted rows: weight (E o, i), bias (E o,), and adapters."""

    weight: Parameter
    bias: Bias
    adapter: ExpertAdapter | None = None

    @property
    def parameters(self) -> list[Parameter]:
        """Tensors that may be trained."""
        found = [self.weight, self.bias, *(self.adapter or ())[:2]]
        return [each for each in found if each is not None]

    def forward(self, part: Products, x: Tensor, with_bias: bool = True) -> Tensor:
        """Compute x (r, i) -> y (r, o)."""
        y = part.affine(x, self.weight, self.bias if with_bias else None)
        if self.adapter is not None:
            y += part.affine(self.adapter.inner(part, x), self.adapter.b, None)
        return y

    def backward(self, part: Products, dy: Tensor) -> Tensor:
        """Compute dy (r, o) -> dx (r, i)."""
        dx = part.times(dy, self.weight)
        if self.adapter is not None:
            dx += part.times(self.adapter.inner_gradient(part, dy), self.adapter.a)
        return dx

    def add_gradients(self, part: Products, dy: Tensor, x: Tensor, firsts: dict[int, bool]) -> None:
        """Add to the gradients of what is trained; see `Products.add_gradients`."""
        part.add_gradients(self.weight, self.bias, dy, x, firsts)
        if (own := self.adapter) is not None:
            part.add_gradients(own.a, None, own.inner_gradient(part, dy), x, firsts)
            part.add_gradients(own.b, None, dy, own.inner(part, x), firsts)


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

    def added(
        self, total: Tensor | None, span: slice, values: Tensor, scores: Tensor | None = None
    ) -> Tensor:
        """Return total (t, h) in fp32, None at first, with each token's sum of its rows in `span`,
        values (r, h) times scores (r, 1).

        Overwrites total and fp32 values. On a GPU the rows are all.
        """
        values = values.float() if scores is None else values.float().mul_(scores)
        tokens, choices = self.shape
        if not values.is_cuda:  # there, `index_add_` adds in any order
            if total is None:
                total = values.new_zeros(tokens, values.shape[1])
            return total.index_add_(0, self.tokens[span], values)
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

    def parts(self, x: Tensor) -> list[Products]:
        """Return what to compute at a time."""
        in_parts = x.device.type == "cpu" and not self.dispatch.sends
        return [*self.products.parts()] if in_parts else [self.products]


class _Experts(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        scores: Tensor,
        up: ExpertMap,
        down: ExpertMap,
        options: _Options,
        *parameters: Parameter,
    ) -> Tensor:
        ctx.maps, ctx.options = (up, down), options
        dispatch, level = options.dispatch, options.recompute_level
        rows, keeps = dispatch.home, dispatch.sends and level != "full"
        factors, total = rows.of(scores), cast(Tensor, None)
        us, zs = list[Tensor](), list[Tensor]()
        for part in options.parts(x):
            of_rows = dispatch.rows_of(x, part.span)  # (r, h)
            us.append(up.forward(part, of_rows))  # (r, f) or (r, 2 f)
            zs.append(options.activate(us[-1]))  # (r, f)
            (y,) = dispatch.back(down.forward(part, zs[-1], options.adds_bias))()
            total = rows.added(total, part.span, y, factors[part.span])
            if level != "none":
                zs.clear()
            if level == "full":
                us.clear()
        ctx.save_for_backward(None if keeps else x, of_rows if keeps else None, scores, *us, *zs)
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, kept, scores, *saved = ctx.saved_tensors
        up: ExpertMap
        down: ExpertMap
        (up, down), options = ctx.maps, cast(_Options, ctx.options)
        dispatch, _, activation, gated, limit, level, triton, adds_bias = options
        rows, work = dispatch.home, dispatch.work
        parts = options.parts(dy)
        factors, total = rows.of(scores), cast(Tensor, None)
        of_scores, firsts = list[Tensor](), dict[int, bool]()
        for number, part in enumerate(parts):
            of_rows = dispatch.rows_of(x, part.span) if kept is None else kept  # (r, h)
            of_y = dy.index_select(0, rows.tokens[part.span])  # (r, h)
            arriving = dispatch.out(of_y, factors[part.span])
            u = up.forward(part, of_rows) if level == "full" else saved[number]
            z = saved[len(parts) + number] if level == "none" else options.activate(u)
            of_y, score = arriving()  # (r, 1)
            del arriving
            dz = down.backward(part, of_y)
            of_score = (dz * z).sum(1, dtype=torch.float32)
            if adds_bias and down.bias is not None:
                biases = down.bias.unflatten(0, (work.num_experts, -1))
                of_score += (of_y * biases[work.experts[part.span]]).sum(1, dtype=torch.float32)
            scaled = z if down.bias is None else of_y  # z is narrower
            scaled.mul_(score)
            down.add_gradients(part, of_y, z, firsts)
            del of_y, z, scaled
            du, _ = activate_backward(dz.mul_(score), u, activation, gated, False, triton, limit)
            of_x = [up.backward(part, du)] if ctx.needs_input_grad[0] else []
            arriving = dispatch.back(of_score, *of_x)
            of_x.clear()
            # while they are on their way
            up.add_gradients(part, du, of_rows, firsts)
            of_score, *of_x = arriving()
            if of_x:
                total = rows.added(total, part.span, of_x.pop())
            of_scores.append(of_score)
        dx = total.to(dy.dtype) if ctx.needs_input_grad[0] else None
        gradients = dx, rows.by_choice(torch.cat(of_scores))
        return *gradients, *(None,) * (3 + len(up.parameters + down.parameters))


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
    up: ExpertMap,
    down: ExpertMap,
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
        up: weight (E f, h) and bias (E f,) or, if gated, (E 2 f, h) and (E 2 f,), each expert's gate
            first.
        down: (E h, f) and (E h,).
        activation, recompute_level, limit: see `mlp`.
        adds_bias: whether y includes the down bias; with f split over ranks, it does on one of them.
    """
    ranks = [each.adapter.b.shape[1] for each in (up, down) if each.adapter is not None]
    products = Products(dispatch.work, _can_group(x, down.weight.shape[1], *ranks))
    options = _Options(
        dispatch, products, activation, gated, limit, recompute_level, triton, adds_bias
    )
    return _Experts.apply(x, scores, up, down, options, *up.parameters, *down.parameters)


def _can_group(x: Tensor, *channels: int) -> bool:
    """Return whether grouped products can multiply x (t, h): on GPUs in 16 bits, if rows of all
    matrices start at multiples of 16 bytes."""
    aligned = all(size % 8 == 0 for size in (x.shape[1], *channels))
    return x.is_cuda and x.dtype.itemsize == 2 and aligned
