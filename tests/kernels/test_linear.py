"""The linear layer: its formula and gradients, and what it keeps for the backward pass."""

from typing import Any, cast

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.kernels.linear import PLAIN, linear
from megatron_lite.parameter import Parameter
from tests.support.kernel_checks import compare, dtypes, empty_gradient, randn, saved_tensors


@dtypes
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 1, 64, 33), (3, 17, 1, 1)])
def test_linear(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    b, s, i, o = shape
    compare(linear, functional.linear, [randn(b, s, i)], [randn(o, i), randn(o)], dtype)
    compare(linear, functional.linear, [randn(b, s, i)], [randn(o, i)], dtype)


@pytest.mark.parametrize("frozen", [(), ("bias",), ("weight",), ("weight", "bias")], ids=str)
def test_linear_keeps_its_input_for_a_trained_weight_only(frozen: tuple[str, ...]) -> None:
    weight, bias = (
        empty_gradient(randn(*shape), trained=name not in frozen)
        for name, shape in (("weight", (4, 5)), ("bias", (4,)))
    )
    with saved_tensors() as kept:
        linear(randn(3, 5).requires_grad_(), cast(Parameter, weight), cast(Parameter, bias))
    assert [tuple(tensor.shape) for tensor in kept] == ([] if "weight" in frozen else [(3, 5)])


class Operations(TorchDispatchMode):
    """The names of all operations, which are kernels on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@dtypes
def test_the_first_gradient_of_a_bias_is_one_operation(dtype: torch.dtype) -> None:
    """Later ones add. The numbers are those of a sum that is copied."""
    weight, bias = (cast(Parameter, empty_gradient(randn(*shape))) for shape in ((33, 5), (33,)))
    dy = randn(17, 33).to(dtype)
    expected = dy.sum(0, dtype=bias.main_grad.dtype)
    with Operations() as first:
        PLAIN.add_gradients(weight, bias, dy, None)
    assert first.names == ["sum"] and torch.equal(bias.main_grad, expected)
    with Operations() as second:
        PLAIN.add_gradients(weight, bias, dy, None)
    assert second.names == ["sum", "add_"] and torch.equal(bias.main_grad, expected + expected)
