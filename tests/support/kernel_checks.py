"""Checks of an operation against its formula in float64: outputs, input gradients and weight
gradients."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_lite.kernels import matmul_library, products
from megatron_lite.kernels.converted_products import HALVES
from megatron_lite.kernels.rotary import Table, angle_table, wavelengths
from megatron_lite.kernels.triton_support import runs_on
from megatron_lite.parameter import Parameter

# Triton kernels run here, in the interpreter if there is no GPU.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# Of the largest value, or of 0.1.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}
needs_triton = pytest.mark.skipif(not runs_on(DEVICE), reason="Triton is not installed")
# Triton kernels, if Triton is installed, and references.
IMPLEMENTATIONS = (False, True) if runs_on(DEVICE) else (False,)
implementations = pytest.mark.parametrize(
    "triton",
    [pytest.param(False, id="reference"), pytest.param(True, id="triton", marks=needs_triton)],
)


def parameter(values: Tensor, dtype: torch.dtype) -> Parameter:
    """Return a parameter whose fp32 gradient buffer holds ones, so that gradients must be added."""
    made = cast(Parameter, Parameter(values.to(dtype)))
    made.main_grad = torch.ones_like(values, dtype=torch.float32)
    return made


def empty_gradient(
    values: Tensor, grad_dtype: torch.dtype = torch.float32, trained: bool = True
) -> Parameter:
    """Return a parameter with garbage in its gradient buffer, or a frozen one without a buffer."""
    made = cast(Parameter, Parameter(values, requires_grad=trained))
    if trained:
        made.main_grad = torch.full(values.shape, torch.nan, dtype=grad_dtype, device=values.device)
        made.gradient_is_empty = True
    return made


@contextlib.contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    """Collect the tensors that operations save for their backward passes."""
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        yield saved


@contextlib.contextmanager
def calls_of_onednn() -> Iterator[list[Any]]:
    """Collect the operands of products that would go through oneDNN where it is exact, whatever
    their size."""
    calls: list[Any] = []

    def record(operation: Callable[..., Any], *operands: Any, **options: Any) -> Any:
        calls.append(operands)
        return operation(*operands, **options)

    chosen = {"SMALLEST_ONEDNN_PRODUCT": 1, "goes_through_onednn": lambda *_: True}
    matmul_library.in_its_library.cache_clear()
    try:
        with patch.multiple(matmul_library, through_onednn=record, **chosen):
            yield calls
    finally:
        matmul_library.in_its_library.cache_clear()


@contextlib.contextmanager
def products_in_fp32(in_fp32: bool) -> Iterator[None]:
    """Compute products of halves on a CPU from fp32 copies, or as torch does, whatever this
    processor can do."""

    def decide(device: torch.device, dtype: torch.dtype) -> bool:
        return in_fp32 and device.type == "cpu" and dtype in HALVES

    products.product_accumulation.cache_clear()
    try:
        with patch.object(products, "computes_in_fp32", decide):
            yield
    finally:
        products.product_accumulation.cache_clear()


def compare(
    ours: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    inputs: list[Tensor],
    weights: list[Tensor],
    dtype: torch.dtype,
) -> None:
    """Compare `ours` in dtype with `formula` in float64 on the same rounded values, over two
    backward passes."""
    inputs, weights = ([tensor.to(dtype) for tensor in tensors] for tensors in (inputs, weights))
    our_inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    our_weights = [parameter(tensor, dtype) for tensor in weights]
    exact_inputs, exact_weights = (
        [t.double().requires_grad_() for t in tensors] for tensors in (inputs, weights)
    )
    exact = formula(*exact_inputs, *exact_weights)
    grad = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(
        exact.device, dtype
    )
    exact.backward(grad.double())
    for _ in range(2):
        output = ours(*our_inputs, *our_weights)
        assert output.dtype == dtype and output.shape == exact.shape
        output.backward(grad)
    close(output, exact, dtype)
    for mine, reference in zip(our_inputs, exact_inputs, strict=True):
        close(mine.grad, 2 * reference.grad, dtype)
    for mine, reference in zip(our_weights, exact_weights, strict=True):
        assert mine.grad is None, "the gradient belongs only in main_grad"
        close(mine.main_grad - 1, 2 * reference.grad, dtype)


def close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Check that the largest difference, relative to the largest value, is within the dtype's
    tolerance."""
    exact = exact.detach()
    largest = max(float(exact.abs().max()), 0.1)  # exact zeros are met up to rounding
    assert (
        float((ours.detach().to(exact.device).double() - exact).abs().max())
        <= TOLERANCE[dtype] * largest
    )


def rotary_table(length: int, channels: int, base: float, device: torch.device) -> Table:
    """The table of the plain frequencies base^(-2 j / r)."""
    return angle_table(1.0 / wavelengths(channels, base, device), length)


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Return the same random values every time, on the CPU."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def covering(*axes: Sequence[Any]) -> list[Any]:
    """Return all combinations of the axes' values as parameters, most of them slow.

    The others hold every value of an axis with every value of the last axis, and values of other
    axes in many pairs.
    """
    last = len(axes) - 1
    rows = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = {row: set(itertools.combinations(enumerate(row), 2)) for row in rows}
    missing = set[Any]().union(*pairs.values())
    needed = {pair for pair in missing if pair[1][0] == last}
    chosen = set()
    while needed & missing:
        row = max(
            rows, key=lambda row: (len(pairs[row] & needed & missing), len(pairs[row] & missing))
        )
        missing -= pairs[row]
        chosen.add(row)
    found = []
    for row in rows:
        values = [axis[i] for axis, i in zip(axes, row, strict=True)]
        marks = [] if row in chosen else [pytest.mark.slow]
        found.append(pytest.param(*values, marks=marks, id="-".join(map(str, values))))
    return found
