"""MLP: y = a(x U^T + c) W^T + b, with a(.) plain or gated (see `activation.py`).

    u = x U^T + c,   z = a(u),   y = z W^T + b
    dz = dy W,   du = dz a'(u),   dx = du U        W.main_grad += dy^T z,   U.main_grad += du^T x

Kept for the backward, in elements per token: x, u and z (h + 2 f, gated h + 3 f); with level "activation" x and u
(h + f, gated h + 2 f); with level "full" x alone (h). What is missing is computed again by the same operations from the
same values, so that no level changes a bit: z on the way from dz to du, where a(u) is needed anyway.
Nothing is kept that only a frozen parameter's gradient would be made of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.kernels.activation import activate, activate_backward
from megatron_lite.kernels.linear import accumulate_bias, accumulate_product, affine, product
from megatron_lite.parameter import Parameter


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        up: Parameter,
        up_bias: Parameter | None,
        down: Parameter,
        down_bias: Parameter | None,
        activation: str,
        gated: bool,
        recompute_level: str,
        triton: bool,
    ) -> Tensor:
        ctx.up, ctx.up_bias, ctx.down, ctx.down_bias = up, up_bias, down, down_bias
        ctx.activation, ctx.gated, ctx.triton = activation, gated, triton
        before = affine(input_, up, up_bias)  # u, (..., f) or (..., 2 f)
        after = activate(before, activation, gated, triton)  # z, (..., f)
        # u leads back to the input and to the first weight; z makes the gradient of the second.
        ctx.reads_before = any(ctx.needs_input_grad[:3])
        recomputes_after = down.requires_grad and recompute_level != "none"
        needs_before = ctx.reads_before or recomputes_after
        ctx.save_for_backward(
            input_ if up.requires_grad or (needs_before and recompute_level == "full") else None,
            before if needs_before and recompute_level != "full" else None,
            after if down.requires_grad and not recomputes_after else None,
        )
        return affine(after, down, down_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        flat_or_none: list[Any] = [None if kept is None else kept.flatten(0, -2) for kept in ctx.saved_tensors]
        input_, before, after = flat_or_none
        flat, up, down = grad_output.reshape(-1, grad_output.shape[-1]), ctx.up, ctx.down
        again = down.requires_grad and after is None
        if before is None and (ctx.reads_before or again):
            before = affine(input_, up, ctx.up_bias)
        grad = None
        if ctx.reads_before:
            grad = product(flat, down.t())  # dz, and then du
            grad, remade = activate_backward(grad, before, ctx.activation, ctx.gated, again, ctx.triton)
        else:
            remade = activate(before, ctx.activation, ctx.gated, ctx.triton) if again else None
        if down.requires_grad:
            accumulate_product(down, flat, after if remade is None else remade)
        accumulate_bias(ctx.down_bias, flat)
        del remade
        if grad is None:
            return (None,) * 9
        if up.requires_grad:
            accumulate_product(up, grad, input_)
        accumulate_bias(ctx.up_bias, grad)
        grad_input = product(grad, up.t()).view(*grad_output.shape[:-1], -1) if ctx.needs_input_grad[0] else None
        return grad_input, *(None,) * 8


def mlp(
    input_: Tensor,
    up: Parameter,
    up_bias: Parameter | None,
    down: Parameter,
    down_bias: Parameter | None,
    activation: str,
    gated: bool,
    recompute_level: str = "none",
    triton: bool = False,
) -> Tensor:
    """(..., h) -> (..., h), with up (f, h) or, gated, (2 f, h), the gate first; down (h, f); a bias for each, or None.

    `activation` is a name in `activation.FUNCTIONS`, `recompute_level` "none", "activation" or "full".
    """
    return _MLP.apply(input_, up, up_bias, down, down_bias, activation, gated, recompute_level, triton)
