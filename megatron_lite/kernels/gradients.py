"""How a weight gradient reaches `main_grad`: the first of an accumulation is written, later ones are added.

A buffer that is taken over from another stage or step is therefore never zeroed first.

A product of bf16 or fp16 matrices is summed up in fp32 inside of the matrix multiplication; whether it gets into an
fp32 `main_grad` unrounded depends on the device and on PyTorch, and is found out once (`product_accumulation`):

    "by the product itself"       mm and addmm with `out_dtype` and `out` write or add, in fp32
    "through an fp32 temporary"   mm with `out_dtype`, then an addition
    "through a bf16 temporary"    (or fp16) rounded once: on a CPU no product has another dtype than its factors
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.parameter import Parameter

NAMES = {torch.float32: "an fp32", torch.bfloat16: "a bf16", torch.float16: "an fp16"}
TEMPORARY_ELEMENTS = 2**21


def accumulate(parameter: Parameter, gradient: Tensor) -> None:
    """main_grad = gradient, the first time; main_grad += gradient afterwards. Dtypes may differ."""
    if parameter.begin_gradient():
        parameter.main_grad.copy_(gradient)
    else:
        parameter.main_grad.add_(gradient)


@dataclass(frozen=True)
class ProductAccumulation:
    """`run(total, a, b, first)`: total (m, n) = a (m, k) b (k, n), or += where it is not the first."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor, bool], None]


def _in_the_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    if first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:  # the same tensor object as input and output: otherwise it would be copied first
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
        (total[rows].copy_ if first else total[rows].add_)(torch.mm(a[rows], b))


def temporary_rows(columns: int) -> int:
    """Rows of a temporary on a CPU: so many that the cache still holds them when they are added."""
    return max(1, TEMPORARY_ELEMENTS // columns)


def _same_dtype(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    if first:
        torch.mm(a, b, out=total)
    else:
        total.addmm_(a, b)


@functools.cache
def product_accumulation(device: torch.device, dtype: torch.dtype, total_dtype: torch.dtype) -> ProductAccumulation:
    """The best way on a device to add products of matrices in `dtype` to a total in `total_dtype`; reads the device."""
    if dtype == total_dtype:
        return ProductAccumulation("by the product itself", _same_dtype)
    for way in (
        ProductAccumulation("by the product itself", _in_the_product),
        ProductAccumulation(f"through {NAMES[total_dtype]} temporary", _wide_temporary),
    ):
        if device.type == "cuda" and _is_exact(way, device, dtype, total_dtype):
            return way
    return ProductAccumulation(f"through {NAMES[dtype]} temporary", _narrow_temporary)


def _is_exact(way: ProductAccumulation, device: torch.device, dtype: torch.dtype, total_dtype: torch.dtype) -> bool:
    """Whether a small product comes out as whole numbers that `dtype` cannot hold, and is added to what is there.

    The operands are those of a weight gradient: the first one transposed, no dimension equal to another.
    """
    a = torch.arange(64 * 16, device=device, dtype=torch.float64).remainder(13).view(64, 16).to(dtype)
    b = torch.arange(64 * 24, device=device, dtype=torch.float64).remainder(17).view(64, 24).to(dtype)
    total = torch.full((16, 24), torch.nan, dtype=total_dtype, device=device)
    exact = (a.double().t() @ b.double()).to(total_dtype)
    try:
        way.run(total, a.t(), b, True)
        written = torch.equal(total, exact)
        way.run(total, a.t(), b, False)
        return written and torch.equal(total, 2 * exact)
    except (RuntimeError, TypeError):  # not in this PyTorch, or not for this device
        return False
