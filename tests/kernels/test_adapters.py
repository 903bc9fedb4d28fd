"""Linear layers with adapters against their formula in float64: outputs and gradients, with
dropout, in the layer and in the MLP, and what a pass keeps."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.kernels.adapters import AdapterPass
from megatron_lite.kernels.linear import PLAIN, Products, linear
from megatron_lite.kernels.mlp import mlp
from megatron_lite.parameter import Parameter
from tests.support.kernel_checks import (
    calls_of_onednn,
    compare,
    dtypes,
    empty_gradient,
    randn,
    saved_tensors,
)

FACTOR = 0.7
SEED = 3
INPUTS, RANK = 5, 2
ROWS = ((0, 4), (6, 7))  # of two maps, with another one between
OUTPUTS = 7


def frozen(weight: Tensor, dtype: torch.dtype) -> Parameter:
    return cast(Parameter, Parameter(weight.to(dtype), requires_grad=False))


def products(a: Any, b: Any, rows: Any = ROWS, p: float = 0.0) -> Products:
    return AdapterPass(a, b, rows, FACTOR, p, SEED, PLAIN).products()


def dropped(x: Tensor, p: float, dtype: torch.dtype) -> Tensor:
    """x with the mask that the seed draws."""
    mask = torch.empty(x.shape, dtype=dtype)
    mask.bernoulli_(1 - p, generator=torch.Generator().manual_seed(SEED))
    return x * (mask.to(torch.float32) / (1 - p)).to(dtype).double()


def formula(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, p: float, dtype: Any) -> Tensor:
    y = functional.linear(x, weight.to(dtype).double())
    inner = FACTOR * (dropped(x, p, dtype) if p else x)
    first = functional.linear(functional.linear(inner, a[:RANK]), b[:4])
    second = functional.linear(functional.linear(inner, a[RANK:]), b[4:])
    return y + torch.cat([first, torch.zeros_like(y[..., 4:6]), second], -1)


@dtypes
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_two_maps_of_a_weight(p: float, dtype: torch.dtype) -> None:
    weight = randn(OUTPUTS, INPUTS)
    compare(
        lambda x, a, b: linear(x, frozen(weight, dtype), products=products(a, b, ROWS, p)),
        lambda x, a, b: formula(x, weight, a, b, p, dtype),
        [randn(2, 9, INPUTS)],
        [randn(2 * RANK, INPUTS), randn(5, RANK)],
        dtype,
    )


@pytest.mark.parametrize("level", ["none", "full"])
@pytest.mark.parametrize("gated", [False, True])
def test_mlp(gated: bool, level: str) -> None:
    """The last weights' input is computed again from what the activation needs."""
    up, down = randn(8, INPUTS), randn(INPUTS, 4 if gated else 8)
    rows = ((0, 8),)

    def ours(x: Tensor, *weights: Tensor) -> Tensor:
        of_up, of_down = products(*weights[:2], rows=rows), products(*weights[2:], rows=((0, 5),))
        each = frozen(up, x.dtype), None, frozen(down, x.dtype), None
        return mlp(x, *each, "silu", gated, level, products=(of_up, of_down))

    def exact(x: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        u = functional.linear(x, up.double() + FACTOR * b @ a)
        gate, value = u.chunk(2, -1) if gated else (u, 1)
        return functional.linear(functional.silu(gate) * value, down.double() + FACTOR * d @ c)

    weights = [randn(RANK, INPUTS), randn(8, RANK), randn(RANK, down.shape[1]), randn(5, RANK)]
    compare(ours, exact, [randn(3, INPUTS)], weights, torch.float32)


def test_onednn_adds_no_product_of_low_rank() -> None:
    """It takes longer than the BLAS to add one, not to write one."""
    a, b = (empty_gradient(randn(*shape)) for shape in ((2 * RANK, INPUTS), (5, RANK)))
    weight = frozen(randn(OUTPUTS, INPUTS), torch.float32)
    with calls_of_onednn() as calls:
        x = randn(3, INPUTS).requires_grad_()
        linear(x, weight, products=products(a, b)).sum().backward()
    added = [operands[-1] is False for operands in calls]  # whether a product is the first one
    assert added and not any(added)


def test_a_pass_keeps_inputs_and_no_gradient_of_the_weight() -> None:
    a, b = (empty_gradient(randn(*shape)) for shape in ((2 * RANK, INPUTS), (5, RANK)))
    weight = frozen(randn(OUTPUTS, INPUTS), torch.float32)
    with saved_tensors() as kept:
        y = linear(randn(3, INPUTS), weight, products=products(a, b))  # no gradient of the input
    y.sum().backward()
    assert [tuple(tensor.shape) for tensor in kept] == [(3, INPUTS)]
    assert a.main_grad.isfinite().all() and b.main_grad.isfinite().all()
    assert weight.grad is None and not hasattr(weight, "main_grad")
