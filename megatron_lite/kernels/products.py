"""Matrix products, in the one module that knows how the hardware computes them.

Products of bf16 or fp16 matrices are accumulated in fp32. Whether the result reaches an fp32
`main_grad` without rounding depends on the device and on PyTorch; `product_accumulation` finds out
once:

    "by the product itself"       mm and addmm with `out_dtype` and `out` write or add in fp32
    "through a bf16 temporary"    (or fp16) rounded once: on a CPU a product has the dtype of its factors
    "from fp32 copies of the factors"    on CPUs without instructions for the dtype: see `converted_products.py`

`matmul_library.py` chooses the library for large fp32 products on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.kernels.converted_products import (
    computes_in_fp32,
    multiply_in_fp32,
    temporary_rows,
)
from megatron_lite.kernels.matmul_library import goes_through_onednn, in_its_library

# Rows (tokens) from which converting a weight pays off; with fewer, reading it takes as long as
# multiplying. One token of generation takes 5 times as long with a converted weight, 8 tokens take
# 0.8 of the time (AVX2, one thread).
FEWEST_ROWS = 8
NAMES = {torch.float32: "an fp32", torch.bfloat16: "a bf16", torch.float16: "an fp16"}


def _converts(a: Tensor) -> bool:
    """Return whether a product whose first factor is a (..., k) is computed from fp32 copies."""
    return computes_in_fp32(a.device, a.dtype) and a.shape[:-1].numel() >= FEWEST_ROWS


# -- products
# --------------------------------------------------------------------------------------------------------


def affine(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    blas: bool = False,
) -> Tensor:
    """Compute x (..., i), weight (o, i), bias (o,) -> (..., o), without autograd; in `out` (t, o)
    if given. blas: see `matmul_library.py`."""
    if _converts(x):
        rows = x.reshape(-1, x.shape[-1])
        memory = x.new_empty(rows.shape[0], weight.shape[0]) if out is None else out
        return multiply_in_fp32(memory, rows, weight.t(), bias).view(*x.shape[:-1], -1)
    cost = x.device, x.dtype, 0 if blas else x.numel() * weight.shape[0]
    if out is None:
        return in_its_library(functional.linear, *cost)(x, weight, bias)
    if x.dim() == 3 and not x.is_contiguous():  # reshaping would copy the rows
        places, matrices = out.view(len(x), -1, len(weight)), weight.t().expand(len(x), -1, -1)
        return (
            torch.bmm(x, matrices, out=places)
            if bias is None
            else torch.baddbmm(bias, x, matrices, out=places)
        )
    rows = x.reshape(-1, x.shape[-1])
    if bias is None:
        return in_its_library(torch.mm, *cost)(rows, weight.t(), out=out)
    return in_its_library(torch.addmm, *cost)(bias, rows, weight.t(), out=out)


def product(a: Tensor, b: Tensor, out: Tensor | None = None, blas: bool = False) -> Tensor:
    """Return a (m, k) b (n, k)^T, (m, n), in the memory of `out` if given. blas: see
    `matmul_library.py`."""
    if _converts(a):
        return multiply_in_fp32(
            a.new_empty(a.shape[0], b.shape[0]) if out is None else out, a, b.t()
        )
    multiplications = 0 if blas else a.numel() * b.shape[0]
    return in_its_library(torch.mm, a.device, a.dtype, multiplications)(a, b.t(), out=out)


def scaled_product(addend: Tensor, a: Tensor, b: Tensor, beta: float, alpha: float) -> Tensor:
    """Return beta addend (m, n) + alpha a (m, k) b (k, n)."""
    if _converts(a):
        return multiply_in_fp32(torch.empty_like(addend), a, b, addend, beta, alpha)
    return torch.addmm(addend, a, b, beta=beta, alpha=alpha)


# -- adding products to totals
# ---------------------------------------------------------------------------------------


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool, blas: bool = False) -> None:
    """Add a (m, k) b (k, n) to total (m, n), in the total's dtype; the first product overwrites the
    total. blas: see `matmul_library.py`."""
    method = product_accumulation(a.device, a.dtype, total.dtype)
    multiplications = 0 if blas else a.numel() * b.shape[1]
    in_its_library(method.run, a.device, a.dtype, multiplications)(total, a, b, first)


class ProductAccumulation(NamedTuple):
    """A way to accumulate products: `run(total, a, b, first)` does total = a b if `first`, else
    total += a b."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor, bool], object]


def _in_the_product(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    options: dict[str, Any] = {} if a.dtype == total.dtype else {"out_dtype": total.dtype}
    if first:
        torch.mm(a, b, **options, out=total)
    else:  # input and output must be the same tensor object, or torch copies the total first
        torch.addmm(total, a, b, **options, out=total)


def _narrow_temporary(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    step = temporary_rows(total.shape[1]) if total.device.type == "cpu" else total.shape[0]
    for start in range(0, total.shape[0], step):
        rows = slice(start, start + step)
        temporary = torch.mm(a[rows], b)
        if first:
            total[rows].copy_(temporary)
        else:
            total[rows].add_(temporary)
        del temporary  # before the next one is allocated


@functools.cache
def product_accumulation(
    device: torch.device, dtype: torch.dtype, total_dtype: torch.dtype
) -> ProductAccumulation:
    """Choose the device's best method of adding products of `dtype` matrices to a total in
    `total_dtype`.

    Runs small products on the device and waits for their results.
    """
    if computes_in_fp32(device, dtype):
        return ProductAccumulation(
            "from fp32 copies of the factors",
            lambda total, a, b, first: multiply_in_fp32(total, a, b, None if first else total),
        )
    in_the_product = ProductAccumulation("by the product itself", _in_the_product)
    if dtype == total_dtype:
        return in_the_product
    if device.type == "cuda" and _is_exact(in_the_product, device, dtype, total_dtype):
        return in_the_product
    return ProductAccumulation(f"through {NAMES[dtype]} temporary", _narrow_temporary)


def _is_exact(
    method: ProductAccumulation, device: torch.device, dtype: torch.dtype, total_dtype: torch.dtype
) -> bool:
    """Return whether a method exactly writes and adds integers that `dtype` cannot represent.

    The operands resemble a weight gradient's: the first one is transposed, and all dimensions
    differ. Assumed in a plan, whose tensors have no values.
    """
    a = (
        torch.arange(64 * 16, device=device, dtype=torch.float64)
        .remainder(13)
        .view(64, 16)
        .to(dtype)
    )
    b = (
        torch.arange(64 * 24, device=device, dtype=torch.float64)
        .remainder(17)
        .view(64, 24)
        .to(dtype)
    )
    total = torch.full((16, 24), torch.nan, dtype=total_dtype, device=device)
    if total.is_meta:
        return True
    exact = (a.double().t() @ b.double()).to(total_dtype)
    try:
        method.run(total, a.t(), b, True)
        written = torch.equal(total, exact)
        method.run(total, a.t(), b, False)
        return written and torch.equal(total, 2 * exact)
    except (RuntimeError, TypeError):  # not supported by this PyTorch or device
        return False


def describe_products(device: torch.device, dtype: torch.dtype, grad_dtype: torch.dtype) -> str:
    """Describe for the log how products of matrices in `dtype` are added to gradients in
    `grad_dtype`."""
    factors = torch.float32 if computes_in_fp32(device, dtype) else dtype
    library = "; large products use oneDNN" if goes_through_onednn(device, factors) else ""
    return f"weight gradients are accumulated {product_accumulation(device, dtype, grad_dtype).name}{library}"
