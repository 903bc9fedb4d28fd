"""The linear layer: its formula and gradients, and what it keeps for the backward pass."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from megatron_lite.kernels.linear import linear
from megatron_lite.parameter import Parameter
from tests.support.kernel_checks import compare, dtypes, empty_gradient, randn


@dtypes
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 1, 64, 33), (3, 17, 1, 1)])
def test_linear(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    b, s, i, o = shape
    compare(linear, functional.linear, [randn(b, s, i)], [randn(o, i), randn(o)], dtype)
    compare(linear, functional.linear, [randn(b, s, i)], [randn(o, i)], dtype)


@pytest.mark.parametrize("frozen", [(), ("bias",), ("weight",), ("weight", "bias")], ids=str)
def test_linear_keeps_its_input_for_a_trained_weight_only(frozen: tuple[str, ...]) -> None:
    kept: list[Tensor] = []
    weight, bias = (
        empty_gradient(randn(*shape)).requires_grad_(name not in frozen)
        for name, shape in (("weight", (4, 5)), ("bias", (4,)))
    )
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        linear(randn(3, 5).requires_grad_(), cast(Parameter, weight), cast(Parameter, bias))
    assert [tuple(tensor.shape) for tensor in kept] == ([] if "weight" in frozen else [(3, 5)])
