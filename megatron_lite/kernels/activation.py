"""MLP activations, plain z = a(u) or gated z = a(gate) * up with gate and up side by side in one tensor u.

    plain: du = dz a'(u)        gated: dgate = dz up a'(gate),   dup = dz a(gate)

The backward can make z again on its way, where the forward pass did not keep it: a(u) is at hand.
Without autograd: the MLP calls both directions itself (see `mlp.py`).

    gelu: u s(2 k (u + c u^3)), k = sqrt(2 / pi), c = 0.044715       gelu_exact: u (1 + erf(u / sqrt 2)) / 2
    silu: u s(u)        quick_gelu: u s(1.702 u)        with the sigmoid s(x) = 1 / (1 + e^-x)
    relu: max(u, 0)        squared_relu: max(u, 0)^2        tanh: tanh(u)        identity: u

(k (u + c u^3) through tanh, as it is mostly written, is the same: 1 + tanh(x) = 2 s(2 x).)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.kernels.tanh import tanh
from megatron_lite.kernels.triton_support import cdiv, jit, next_power_of_2, tl

aten = torch.ops.aten
QUICK = 1.702  # of quick_gelu: Hendrycks and Gimpel 2016, section 2

# name -> (a(u) in new memory, dz * a'(u) from (dz, u) into the memory of u)
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (
        lambda u: functional.gelu(u, approximate="tanh"),
        lambda grad, u: aten.gelu_backward.grad_input(grad, u, approximate="tanh", grad_input=u),
    ),
    "gelu_exact": (functional.gelu, lambda grad, u: aten.gelu_backward.grad_input(grad, u, grad_input=u)),
    "silu": (functional.silu, lambda grad, u: aten.silu_backward.grad_input(grad, u, grad_input=u)),
    # Its derivative is silu's at 1.702 u; that is 0 or 1 long before 100, and fp16 may have no 1.702 u.
    "quick_gelu": (
        lambda u: (u * QUICK).sigmoid_().mul_(u),
        lambda grad, u: aten.silu_backward.grad_input(grad, u.mul_(QUICK).clamp_(-100, 100), grad_input=u),
    ),
    "relu": (functional.relu, lambda grad, u: aten.threshold_backward.grad_input(grad, u, 0.0, grad_input=u)),
    "squared_relu": (lambda u: functional.relu(u).square_(), lambda grad, u: u.relu_().mul_(grad).mul_(2)),
    "tanh": (torch.tanh, lambda grad, u: aten.tanh_backward.grad_input(grad, u.tanh_(), grad_input=u)),
    "identity": (torch.clone, lambda grad, u: u.copy_(grad)),
}


def _reference_backward(
    grad_output: Tensor, input_: Tensor, name: str, gated: bool, again: bool
) -> tuple[Tensor, Tensor | None]:
    forward, backward = FUNCTIONS[name]
    if not gated:
        output = forward(input_) if again else None
        return backward(grad_output, input_), output
    gate, up = input_.chunk(2, dim=-1)
    activated = forward(gate)
    output = activated * up if again else None
    activated.mul_(grad_output)  # dup, which has to wait until up has been read
    backward(grad_output.mul_(up), gate)
    up.copy_(activated)
    return input_, output


@jit
def _function(u, NAME: tl.constexpr):
    """a(u) and a'(u) of fp32 values."""
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
    else:
        value = tl.where(u < 0.0, 0.0, u)  # NaN stays NaN
        slope = tl.where(u > 0.0, 1.0, 0.0)
        if NAME == "squared_relu":
            slope = 2.0 * value
            value = value * value
    return value, slope


@jit
def _forward_kernel(inputs, outputs, width, NAME: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """One block of channels of one row (width,) in a program."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if GATED:
        start = inputs + row * 2 * width
        z, _ = _function(tl.load(start + column, mask=inside, other=0.0).to(tl.float32), NAME)
        z *= tl.load(start + width + column, mask=inside, other=0.0).to(tl.float32)
    else:
        z, _ = _function(tl.load(inputs + row * width + column, mask=inside, other=0.0).to(tl.float32), NAME)
    tl.store(outputs + row * width + column, z.to(outputs.dtype.element_ty), mask=inside)


@jit
def _backward_kernel(
    grads, inputs, width, NAME: tl.constexpr, GATED: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr
):
    """The input's gradient goes where the input was, and the output, if it is wanted again, where its gradient was."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    grad_pointers = grads + row * width + column
    dz = tl.load(grad_pointers, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        gate_pointers = inputs + row * 2 * width + column
        up = tl.load(gate_pointers + width, mask=inside, other=0.0).to(tl.float32)
        value, slope = _function(tl.load(gate_pointers, mask=inside, other=0.0).to(tl.float32), NAME)
        tl.store(gate_pointers, (dz * up * slope).to(inputs.dtype.element_ty), mask=inside)
        tl.store(gate_pointers + width, (dz * value).to(inputs.dtype.element_ty), mask=inside)
        value *= up
    else:
        pointers = inputs + row * width + column
        value, slope = _function(tl.load(pointers, mask=inside, other=0.0).to(tl.float32), NAME)
        tl.store(pointers, (dz * slope).to(inputs.dtype.element_ty), mask=inside)
    if AGAIN:
        tl.store(grad_pointers, value.to(grads.dtype.element_ty), mask=inside)


def _grid(output: Tensor) -> tuple[tuple[int], int]:
    """Programs, and the channels of each: 8 for each of its 128 threads, which is 16 bytes in bf16."""
    width = output.shape[-1]
    block = min(next_power_of_2(width), 1024)
    return (output.numel() // width * cdiv(width, block),), block


def activate(input_: Tensor, name: str, gated: bool, triton: bool = False) -> Tensor:
    """(..., f) -> (..., f), or (..., 2 f) -> (..., f) when gated; in new memory."""
    if triton:
        input_ = input_.contiguous()
        width = input_.shape[-1] // (2 if gated else 1)
        output = input_.new_empty((*input_.shape[:-1], width))
        grid, block = _grid(output)
        _forward_kernel[grid](input_, output, width, NAME=name, GATED=gated, BLOCK=block, num_warps=4)
        return output
    forward = FUNCTIONS[name][0]
    if not gated:
        return forward(input_)
    gate, up = input_.chunk(2, dim=-1)
    return forward(gate).mul_(up)


def activate_backward(
    grad_output: Tensor, input_: Tensor, name: str, gated: bool, again: bool, triton: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The gradient of the input of `activate`, in the input's memory, and `again` the bits of its output, or None.

    Takes the memory of both tensors, which are contiguous: neither holds anything of use afterwards.
    """
    if not triton:
        return _reference_backward(grad_output, input_, name, gated, again)
    assert input_.is_contiguous() and grad_output.is_contiguous()
    grid, block = _grid(grad_output)
    _backward_kernel[grid](
        grad_output, input_, grad_output.shape[-1], NAME=name, GATED=gated, AGAIN=again, BLOCK=block, num_warps=4
    )
    return input_, grad_output if again else None
