"""MLP: y = z W^T + b with z = a(u), or gated z = a(gate) * up with u = [gate, up], and u = x U^T +
c.

    plain: du = dz a'(u)        gated: dgate = dz up a'(gate),   dup = dz a(gate)
    dz = dy W,   dx = du U        W.main_grad += dy^T z,   U.main_grad += du^T x

    gelu: u s(2 k (u + c u^3)), k = sqrt(2 / pi), c = 0.044715       gelu_exact: u (1 + erf(u / sqrt 2)) / 2
    silu: u s(u)        quick_gelu: u s(1.702 u)        with the sigmoid s(x) = 1 / (1 + e^-x)
    relu: max(u, 0)        squared_relu: max(u, 0)^2        tanh: tanh(u)        identity: u

With a limit c (gpt-oss 2025), gated z = a(min(gate, c)) * (max(min(up, c), -c) + 1), and what is cut
off has no gradient.

gelu: Hendrycks and Gimpel (2016), usually written with tanh; 1 + tanh(x) = 2 s(2 x). quick_gelu:
their section 2.

Saved for the backward pass, in elements per token: x, u and z (h + 2 f, gated h + 3 f); with
recompute level "activation" x and u (h + f, gated h + 2 f); with level "full" only x (h). The
backward pass recomputes the rest with the same operations from the same values, so no level changes
a bit. z is a by-product of du, which needs a(u) anyway. Tensors that only a frozen parameter's
gradient would need are not saved.

Tensor parallelism splits the f channels: x is gathered before the first product, y reduced after
the second; see `linear.py`. Each rank saves its channels of u and z, and its part of x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.kernels.linear import NO_EXCHANGE, PLAIN, Exchange, Products, complete
from megatron_lite.kernels.triton_support import cdiv, jit, next_power_of_2, tanh, tl, turns
from megatron_lite.parameter import Function, Parameter

Bias = Parameter | None
aten = torch.ops.aten
QUICK = 1.702
TWO_K = 1.5957691216057308  # 2 sqrt(2 / pi)

# Elements that `_gelu` computes at a time: few enough to stay in the cache between its passes.
PIECE_NUMEL = 2**17


def _gelu(u: Tensor) -> Tensor:
    """Return GELU(u). On a CPU in fp32, use the sigmoid: torch's tanh takes about twice as long."""
    if u.dtype != torch.float32 or u.is_cuda:
        return functional.gelu(u, approximate="tanh")
    z, two_k = torch.empty_like(u), u.new_tensor(TWO_K)
    rows = max(1, PIECE_NUMEL // u.shape[-1])
    every_x, every_out = (x.reshape(-1, u.shape[-1]) for x in (u, z))
    loop = range(0, every_x.shape[0], rows)
    for start in turns(loop, u) if u.is_meta else loop:
        x, out = every_x[start : start + rows], every_out[start : start + rows]
        torch.addcmul(two_k, x, x, value=TWO_K * 0.044715, out=out).mul_(x).sigmoid_().mul_(x)
    return z


# name -> (a(u) in new memory, dz * a'(u) from (dz, u) in the memory of u)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (
        _gelu,
        lambda dz, u: aten.gelu_backward.grad_input(dz, u, approximate="tanh", grad_input=u),
    ),
    "gelu_exact": (
        functional.gelu,
        lambda dz, u: aten.gelu_backward.grad_input(dz, u, grad_input=u),
    ),
    "silu": (functional.silu, lambda dz, u: aten.silu_backward.grad_input(dz, u, grad_input=u)),
    # The derivative is silu's at 1.702 u. Clamping keeps 1.702 u finite in fp16; beyond 100 the
    # derivative is 0 or 1.
    "quick_gelu": (
        lambda u: (u * QUICK).sigmoid_().mul_(u),
        lambda dz, u: aten.silu_backward.grad_input(
            dz, u.mul_(QUICK).clamp_(-100, 100), grad_input=u
        ),
    ),
    "relu": (
        functional.relu,
        lambda dz, u: aten.threshold_backward.grad_input(dz, u, 0.0, grad_input=u),
    ),
    "squared_relu": (
        lambda u: functional.relu(u).square_(),
        lambda dz, u: u.relu_().mul_(dz).mul_(2),
    ),
    "tanh": (torch.tanh, lambda dz, u: aten.tanh_backward.grad_input(dz, u.tanh_(), grad_input=u)),
    "identity": (torch.clone, lambda dz, u: u.copy_(dz)),
}


# -- the activation by Triton
# ----------------------------------------------------------------------------------------


@jit
def _value_and_slope(u, NAME: tl.constexpr):
    """Return a(u) and a'(u) of fp32 values."""
    if NAME == "gelu":
        s = tl.sigmoid(1.5957691216057308 * (u + 0.044715 * u * u * u))
        value = u * s
        slope = s + value * (1.0 - s) * (1.5957691216057308 + 0.2140644488 * u * u)
    elif NAME == "gelu_exact":
        s = 0.5 + 0.5 * tl.erf(u * 0.7071067811865476)
        value = u * s
        slope = s + u * 0.3989422804014327 * tl.exp(-0.5 * u * u)
    elif NAME == "silu":
        s = tl.sigmoid(u)
        value = u * s
        slope = s + value * (1.0 - s)
    elif NAME == "quick_gelu":
        s = tl.sigmoid(1.702 * u)
        value = u * s
        slope = s + 1.702 * value * (1.0 - s)
    elif NAME == "tanh":
        value = tanh(u)
        slope = 1.0 - value * value
    elif NAME == "identity":
        value = u
        slope = tl.full(u.shape, 1.0, tl.float32)
    elif NAME == "relu":
        value = tl.where(u < 0.0, 0.0, u)  # NaN stays NaN
        slope = tl.where(u > 0.0, 1.0, 0.0)
    elif NAME == "squared_relu":
        value = tl.where(u < 0.0, 0.0, u)
        slope = 2.0 * value
        value = value * value
    else:
        tl.static_assert(False, "this activation has no branch in _value_and_slope")
    return value, slope


@jit
def _activate_kernel(
    u_ptr,
    dz_ptr,
    z_ptr,
    width,
    NAME: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Process one block of channels of one row (width,) per program: write z if wanted; given dz,
    overwrite u with du.

    z may overwrite dz.
    """
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if dz_ptr is not None:
        dz = tl.load(dz_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate_pointers = u_ptr + row * 2 * width + column
        up = tl.load(gate_pointers + width, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_pointers, mask=inside, other=0.0).to(tl.float32)
        cuts_gate, cuts_up = gate > LIMIT, tl.abs(up) > LIMIT
        if LIMIT > 0.0:
            gate = tl.where(cuts_gate, LIMIT, gate)
            up = 1.0 + tl.where(cuts_up, tl.where(up > 0.0, LIMIT, -LIMIT), up)
        z, slope = _value_and_slope(gate, NAME)
        if dz_ptr is not None:
            dgate, dup = dz * up * slope, dz * z
            if LIMIT > 0.0:
                dgate = tl.where(cuts_gate, 0.0, dgate)
                dup = tl.where(cuts_up, 0.0, dup)
            tl.store(gate_pointers, dgate.to(u_ptr.dtype.element_ty), mask=inside)
            tl.store(gate_pointers + width, dup.to(u_ptr.dtype.element_ty), mask=inside)
        z *= up
    else:
        u_pointers = u_ptr + row * width + column
        z, slope = _value_and_slope(
            tl.load(u_pointers, mask=inside, other=0.0).to(tl.float32), NAME
        )
        if dz_ptr is not None:
            tl.store(u_pointers, (dz * slope).to(u_ptr.dtype.element_ty), mask=inside)
    if z_ptr is not None:
        tl.store(z_ptr + row * width + column, z.to(z_ptr.dtype.element_ty), mask=inside)


def _launch(
    u: Tensor, dz: Tensor | None, z: Tensor | None, width: int, name: str, gated: bool, limit: float
) -> None:
    """Launch with 128 threads of 8 channels each: 16 bytes in bf16."""
    block = min(next_power_of_2(width), 1024)
    grid = (u.numel() // (width * (2 if gated else 1)) * cdiv(width, block),)
    options = {"NAME": name, "GATED": gated, "LIMIT": limit}
    _activate_kernel[grid](u, dz, z, width, **options, BLOCK=block, num_warps=4)


# -- the activation
# --------------------------------------------------------------------------------------------------


def activate(u: Tensor, name: str, gated: bool, triton: bool, limit: float = 0.0) -> Tensor:
    """Compute u (..., f), or (..., 2 f) if gated, -> z (..., f) in new memory, without autograd.

    limit: of gate and up; 0: none.
    """
    if triton:
        u = u.contiguous()
        z = u.new_empty((*u.shape[:-1], u.shape[-1] // (2 if gated else 1)))
        _launch(u, None, z, z.shape[-1], name, gated, limit)
        return z
    forward = FUNCTIONS[name][0]
    if not gated:
        return forward(u)
    gate, up = u.chunk(2, dim=-1)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit).add_(1.0)
    return forward(gate).mul_(up)


def activate_backward(
    dz: Tensor, u: Tensor, name: str, gated: bool, needs_z: bool, triton: bool, limit: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """Return du in the memory of u and, if `needs_z`, the same z as `activate`, bit for bit.

    dz and u are contiguous; both are overwritten.
    """
    if triton:
        assert u.is_contiguous() and dz.is_contiguous()
        z = dz if needs_z else None
        _launch(u, dz, z, dz.shape[-1], name, gated, limit)
        return u, z
    forward, backward = FUNCTIONS[name]
    if not gated:
        z = forward(u) if needs_z else None
        return backward(dz, u), z
    gate, up = u.chunk(2, dim=-1)
    if limit:
        cut = (gate > limit, up.abs() > limit)
        gate.clamp_(max=limit)
        up.clamp_(-limit, limit).add_(1.0)
    value = forward(gate)
    z = value * up if needs_z else None
    dup = value.mul_(dz)  # cannot overwrite `up` yet: dgate reads it
    backward(dz.mul_(up), gate)
    up.copy_(dup)
    if limit:
        for gradient, is_cut in zip((gate, up), cut, strict=True):
            gradient.masked_fill_(is_cut, 0.0)
    return u, z


# -- the MLP
# ---------------------------------------------------------------------------------------------------------


class _Options(NamedTuple):
    """Arguments of `mlp` that are not tensors."""

    activation: str
    gated: bool
    limit: float
    recompute_level: str
    triton: bool
    exchange: Exchange
    after: Exchange
    of_up: Products
    of_down: Products

    def activate(self, u: Tensor) -> Tensor:
        return activate(u, self.activation, self.gated, self.triton, self.limit)


class _MLP(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        up: Parameter,
        up_bias: Bias,
        down: Parameter,
        down_bias: Bias,
        options: _Options,
        *adapters: Parameter,
    ) -> Tensor:
        ctx.up = up
        ctx.up_bias = up_bias
        ctx.down = down
        ctx.down_bias = down_bias
        ctx.options = options
        # (..., f) or (..., 2 f)
        u = options.of_up.forward(options.exchange.start_gather(x), up, up_bias)
        z = options.activate(u)  # (..., f)
        # for dx and the gradients of `up` and its bias
        ctx.needs_du = any(ctx.needs_input_grad[:3]) or bool(options.of_up.adapters)
        keeps_x, keeps_z = options.of_up.needs_input(up), options.of_down.needs_input(down)
        # `activate_backward` has most of z, and an adapter's gradient alone is not worth its memory
        recomputes_z = keeps_z and (options.recompute_level != "none" or not down.requires_grad)
        recomputes_u = options.recompute_level == "full"
        needs_u = ctx.needs_du or recomputes_z
        ctx.save_for_backward(
            x if keeps_x or (needs_u and recomputes_u) else None,
            u if needs_u and not recomputes_u else None,
            z if keeps_z and not recomputes_z else None,
        )
        ctx.shape = x.shape
        return options.after.reduced_product(options.of_down.forward, z, down, down_bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, u, z = ctx.saved_tensors
        up, down = ctx.up, ctx.down
        options = ctx.options
        activation, gated, limit, _, triton, exchange, after, of_up, of_down = options
        gathering_dy = after.start_gather(dy.reshape(-1, dy.shape[-1]))
        du = None
        recomputed_z = None
        needs_z = of_down.needs_input(down) and z is None
        # overlaps the products until `up` needs it
        gathering = None if x is None else exchange.start_gather(x)
        if gathering is not None and u is None and (ctx.needs_du or needs_z):
            u = of_up.forward(gathering, up, ctx.up_bias)
        flat: list[Any] = [None if saved is None else saved.flatten(0, -2) for saved in (u, z)]
        u, z = flat
        if ctx.needs_du:
            dz = of_down.input_gradient(gathering_dy, down)
            du, recomputed_z = activate_backward(dz, u, activation, gated, needs_z, triton, limit)
            del dz
        elif needs_z:
            recomputed_z = options.activate(u)
        flat_dy = complete(gathering_dy)
        z = recomputed_z if needs_z else z
        of_down.add_gradients(down, ctx.down_bias, flat_dy, z)
        del recomputed_z, z
        others = (None,) * (5 + len(of_up.adapters) + len(of_down.adapters))
        if du is None:
            return None, *others
        dx = None
        if ctx.needs_input_grad[0]:
            dx = exchange.start_reduce(of_up.input_gradient(du, up))
        rows = None
        if gathering is not None and of_up.needs_input(up):
            rows = complete(gathering).flatten(0, -2)
        of_up.add_gradients(up, ctx.up_bias, du, rows)
        return None if dx is None else complete(dx).view(ctx.shape), *others


def mlp(
    x: Tensor,
    up: Parameter,
    up_bias: Bias,
    down: Parameter,
    down_bias: Bias,
    activation: str,
    gated: bool,
    recompute_level: str = "none",
    triton: bool = False,
    exchange: Exchange = NO_EXCHANGE,
    products: tuple[Products, Products] = (PLAIN, PLAIN),
    after: Exchange | None = None,
    limit: float = 0.0,
) -> Tensor:
    """Compute x (..., h) -> y (..., h), with up (f, h) or, if gated, (2 f, h), the gate first, and
    down (h, f).

    activation: a name in `FUNCTIONS`. recompute_level: "none", "activation" or "full". exchange: of
    x and y, if f is split over ranks. products: of `up` and `down`. after: other collectives of y.
    limit: see `activate`.
    """
    return _MLP.apply(
        x,
        up,
        up_bias,
        down,
        down_bias,
        _Options(
            *(activation, gated, limit, recompute_level, triton, exchange),
            exchange if after is None else after,
            *products,
        ),
        *products[0].adapters,
        *products[1].adapters,
    )
