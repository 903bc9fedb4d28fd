"""MLP: y = a(x U^T + c) W^T + b, with a(.) plain or gated (see `activation.py`).

    u = x U^T + c,   z = a(u),   y = z W^T + b
    dz = dy W,   du = dz a'(u),   dx = du U        W.main_grad += dy^T z,   U.main_grad += du^T x

Kept for the backward, in elements per token: x, u and z (h + 2 f, gated h + 3 f); with level "activation" x and u
(h + f, gated h + 2 f); with level "full" x alone (h). What is missing is computed again by the same operations from the
same values, so that no level changes a bit. Nothing is kept that only a frozen parameter's gradient would be made of.
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
        ctx: Any, input_: Tensor, up: Parameter, up_bias: Parameter | None, down: Parameter,
        down_bias: Parameter | None, activation: str, gated: bool, recompute_level: str,
    ) -> Tensor:  # fmt: skip
        ctx.up, ctx.up_bias, ctx.down, ctx.down_bias = up, up_bias, down, down_bias
        ctx.activation, ctx.gated = activation, gated
        before = affine(input_, up, up_bias)  # u, (..., f) or (..., 2 f)
        after = activate(before, activation, gated)  # z, (..., f)
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
        input_, before, after = ctx.saved_tensors
        flat = grad_output.reshape(-1, grad_output.shape[-1])
        if before is None and (ctx.reads_before or (ctx.down.requires_grad and after is None)):
            before = affine(input_, ctx.up, ctx.up_bias)
        if ctx.down.requires_grad:
            after = activate(before, ctx.activation, ctx.gated) if after is None else after
            accumulate_product(ctx.down, flat, after.reshape(-1, after.shape[-1]))
            del after
        accumulate_bias(ctx.down_bias, flat)
        grad_input = None
        if ctx.reads_before:
            grad = product(flat, ctx.down.t())
            grad = activate_backward(grad, before.reshape(-1, before.shape[-1]), ctx.activation, ctx.gated)
            if ctx.up.requires_grad:
                accumulate_product(ctx.up, grad, input_.reshape(-1, input_.shape[-1]))
            accumulate_bias(ctx.up_bias, grad)
            if ctx.needs_input_grad[0]:
                grad_input = product(grad, ctx.up.t()).view(*grad_output.shape[:-1], -1)
        return grad_input, None, None, None, None, None, None, None


def mlp(
    input_: Tensor, up: Parameter, up_bias: Parameter | None, down: Parameter, down_bias: Parameter | None,
    activation: str, gated: bool, recompute_level: str = "none",
) -> Tensor:  # fmt: skip
    """(..., h) -> (..., h), with up (f, h) or, gated, (2 f, h), the gate first; down (h, f); a bias for each, or None.

    `activation` is a name in `activation.FUNCTIONS`, `recompute_level` "none", "activation" or "full".
    """
    return _MLP.apply(input_, up, up_bias, down, down_bias, activation, gated, recompute_level)
