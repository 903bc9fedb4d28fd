"""Linear layer: y = x W^T + b.

    dx = dy W        W.main_grad += dy^T x        b.main_grad += sum over tokens of dy

The input is kept for the backward pass only if the weight is trained. Frozen parameters cost no computation.

The first gradient of an accumulation overwrites `main_grad` and later ones add to it, so no buffer is zeroed first. A
product of bf16 or fp16 matrices is summed in fp32 inside the matrix multiplication. Whether the sum reaches an fp32
`main_grad` without rounding depends on the device and on PyTorch; `product_accumulation` finds out once:

    "by the product itself"       mm and addmm with `out_dtype` and `out` write or add in fp32
    "through an fp32 temporary"   mm with `out_dtype`, then an addition
    "through a bf16 temporary"    (or fp16) rounded once: on a CPU a product has the dtype of its factors

PyTorch sends fp32 products on a CPU to its BLAS (MKL). oneDNN is faster where MKL does not use the processor's widest
instructions: 5 to 20 percent on AMD Zen 4, more on Zen 5. Setting `torch.backends.mkldnn.matmul.fp32_precision` to
"bf16" sends every plain product through oneDNN, in-place additions and transposed operands included. The setting
permits rounding the factors to bf16, but without matrix units (AMX) oneDNN computes in fp32 throughout and only the
order of the sums differs; `onednn_is_exact` checks that with a product whose exact value is known. The setting belongs
to the process and slows small products down (attention's blocks take 1.5 times as long), so it is set for one large
product at a time and then restored.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from megatron_lite.parameter import Parameter

# Multiplications from which oneDNN repays the 15 microseconds that its call costs.
SMALLEST_ONEDNN_PRODUCT = 2**24
# Elements of a narrow temporary on a CPU: few enough to be still in the cache when they are added.
TEMPORARY_ELEMENTS = 2**21
NAMES = {torch.float32: "an fp32", torch.bfloat16: "a bf16", torch.float16: "an fp16"}


# -- fp32 products on a CPU ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def through_onednn(factor: Tensor, columns: int) -> Iterator[None]:
    """Send a large fp32 product on a CPU through oneDNN if oneDNN is exact.

    Args:
        factor: one operand of the product.
        columns: the dimension of the product that this operand does not have.
    """
    if factor.numel() * columns < SMALLEST_ONEDNN_PRODUCT or not goes_through_onednn(factor.device, factor.dtype):
        yield
        return
    switch = _onednn_switch()
    before, switch.fp32_precision = switch.fp32_precision, "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before


def goes_through_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether large products of tensors in `dtype` on `device` go through oneDNN."""
    return device.type == "cpu" and dtype == torch.float32 and onednn_is_exact()


@functools.cache
def onednn_is_exact() -> bool:
    """Whether PyTorch has the oneDNN setting and products stay in fp32 on this processor."""
    switch = _onednn_switch()
    if switch is None or not torch.backends.mkldnn.is_available():
        return False
    fine = 1 + 2.0**-23  # not representable in bf16
    before, switch.fp32_precision = switch.fp32_precision, "bf16"
    try:
        result = torch.full((64, 64), fine) @ torch.eye(64)
    finally:
        switch.fp32_precision = before
    return bool((result == fine).all())


def _onednn_switch() -> Any:
    """Return the object with the `fp32_precision` setting; None if this PyTorch has none."""
    return getattr(torch.backends.mkldnn, "matmul", None)


# -- adding gradients to main_grad -----------------------------------------------------------------------------------


def accumulate(parameter: Parameter, gradient: Tensor) -> None:
    """Write the first gradient of an accumulation to `main_grad`, add later ones. Dtypes may differ."""
    if parameter.begin_gradient():
        parameter.main_grad.copy_(gradient)
    else:
        parameter.main_grad.add_(gradient)


def accumulate_bias(bias: Parameter | None, dy: Tensor) -> None:
    """Add the sum over tokens of dy (t, o) to the gradient of a trained bias."""
    if bias is not None and bias.requires_grad:
        accumulate(bias, dy.sum(dim=0, dtype=bias.main_grad.dtype))


def accumulate_product(weight: Parameter, dy: Tensor, x: Tensor) -> None:
    """Add dy (t, o)^T x (t, i) to the weight's gradient, in the gradient's dtype."""
    add_product(weight.main_grad, dy.t(), x, weight.begin_gradient())


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    """Add a (m, k) b (k, n) to total (m, n), in the total's dtype; overwrite the total if this product is the first."""
    method = product_accumulation(a.device, a.dtype, total.dtype)
    with through_onednn(a, b.shape[1]):
        method.run(total, a, b, first)


@dataclass(frozen=True)
class ProductAccumulation:
    """A method of accumulating products. `run(total, a, b, first)` does total = a b if `first`, else total += a b."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor, bool], None]


def _same_dtype(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    if first:
        torch.mm(a, b, out=total)
    else:
        total.addmm_(a, b)


def _in_the_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    if first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:  # input and output must be the same tensor object, or torch copies the total first
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _wide_temporary(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    if first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(torch.mm(a, b, out_dtype=total.dtype))


def _narrow_temporary(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    step = temporary_rows(total.shape[1]) if total.device.type == "cpu" else total.shape[0]
    for start in range(0, total.shape[0], step):
        rows = slice(start, start + step)
        temporary = torch.mm(a[rows], b)
        if first:
            total[rows].copy_(temporary)
        else:
            total[rows].add_(temporary)
        del temporary  # or it would live beside the next one


def temporary_rows(columns: int) -> int:
    """Return the number of rows that a narrow temporary on a CPU has at a time."""
    return max(1, TEMPORARY_ELEMENTS // columns)


@functools.cache
def product_accumulation(device: torch.device, dtype: torch.dtype, total_dtype: torch.dtype) -> ProductAccumulation:
    """Choose the best method on a device to add products of matrices in `dtype` to a total in `total_dtype`.

    Runs small products on the device and waits for their result.
    """
    if dtype == total_dtype:
        return ProductAccumulation("by the product itself", _same_dtype)
    for method in (
        ProductAccumulation("by the product itself", _in_the_product),
        ProductAccumulation(f"through {NAMES[total_dtype]} temporary", _wide_temporary),
    ):
        if device.type == "cuda" and _is_exact(method, device, dtype, total_dtype):
            return method
    return ProductAccumulation(f"through {NAMES[dtype]} temporary", _narrow_temporary)


def _is_exact(method: ProductAccumulation, device: torch.device, dtype: torch.dtype, total_dtype: torch.dtype) -> bool:
    """Whether a method writes and adds whole numbers that `dtype` cannot hold.

    The operands look like those of a weight gradient: the first one is transposed, and all dimensions differ.
    """
    a = torch.arange(64 * 16, device=device, dtype=torch.float64).remainder(13).view(64, 16).to(dtype)
    b = torch.arange(64 * 24, device=device, dtype=torch.float64).remainder(17).view(64, 24).to(dtype)
    total = torch.full((16, 24), torch.nan, dtype=total_dtype, device=device)
    exact = (a.double().t() @ b.double()).to(total_dtype)
    try:
        method.run(total, a.t(), b, True)
        written = torch.equal(total, exact)
        method.run(total, a.t(), b, False)
        return written and torch.equal(total, 2 * exact)
    except (RuntimeError, TypeError):  # this PyTorch or this device does not have the method
        return False


def describe_products(device: torch.device, dtype: torch.dtype, grad_dtype: torch.dtype) -> str:
    """Describe for the log how products of matrices in `dtype` are added to gradients in `grad_dtype`."""
    library = "; large products use oneDNN" if goes_through_onednn(device, dtype) else ""
    return f"weight gradients are accumulated {product_accumulation(device, dtype, grad_dtype).name}{library}"


# -- the layer -------------------------------------------------------------------------------------------------------


def affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x (..., i), weight (o, i), bias (o,) -> (..., o), without autograd."""
    with through_onednn(x, weight.shape[0]):
        return functional.linear(x, weight, bias)


def product(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return a (m, k) b (n, k)^T, (m, n), in the memory of `out` if given."""
    with through_onednn(a, b.shape[0]):
        return torch.mm(a, b.t(), out=out)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Parameter, bias: Parameter | None) -> Tensor:
        if weight.requires_grad:
            ctx.save_for_backward(x)
        ctx.weight, ctx.bias = weight, bias
        return affine(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        weight, flat_dy = ctx.weight, dy.reshape(-1, dy.shape[-1])
        if weight.requires_grad:
            (x,) = ctx.saved_tensors
            accumulate_product(weight, flat_dy, x.reshape(-1, x.shape[-1]))
        accumulate_bias(ctx.bias, flat_dy)
        dx = product(flat_dy, weight.t()).view(*dy.shape[:-1], -1) if ctx.needs_input_grad[0] else None
        return dx, None, None


def linear(x: Tensor, weight: Parameter, bias: Parameter | None = None) -> Tensor:
    """x (..., i), weight (o, i), bias (o,) -> (..., o)."""
    return _Linear.apply(x, weight, bias)
