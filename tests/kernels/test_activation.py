"""MLP activations against their formulas; the backward pass recomputes the output of the forward
pass bit for bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_lite.config.model import ACTIVATIONS
from megatron_lite.kernels.mlp import FUNCTIONS, PIECE_NUMEL, activate, activate_backward
from tests.support.kernel_checks import (
    DEVICE,
    DTYPES,
    IMPLEMENTATIONS,
    close,
    covering,
    implementations,
    randn,
)

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "gelu_exact": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "silu": lambda x: x * torch.sigmoid(x),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": lambda x: x.clamp(min=0),
    "squared_relu": lambda x: x.clamp(min=0) ** 2,
    "tanh": torch.tanh,
    "identity": lambda x: x * 1,
}
names = pytest.mark.parametrize("name", FUNCTIONS)


def test_the_functions_are_the_choices_of_the_flag() -> None:
    assert set(FUNCTIONS) == set(ACTIVATIONS) == set(FORMULAS)


@implementations
@pytest.mark.parametrize("gated", [False, True])
def test_an_activation_without_a_formula_is_refused(gated: bool, triton: bool) -> None:
    """A name that the kernel or its reference lacks computes nothing, rather than another
    activation.

    Compiled for a GPU, the message names the line and the reason is the error's cause.
    """
    said = "no branch|_value_and_slope" if triton else "new"
    x, grad = randn(2, 8).to(DEVICE), randn(2, 4 if gated else 8).to(DEVICE)
    with pytest.raises(Exception, match=said):
        activate(x, "new", gated, triton)
    with pytest.raises(Exception, match=said):
        activate_backward(grad, x, "new", gated, True, triton)


@pytest.mark.parametrize(
    ("name", "gated", "dtype", "triton"),
    covering(list(FUNCTIONS), [False, True], DTYPES, IMPLEMENTATIONS),
)
def test_activations(name: str, gated: bool, dtype: torch.dtype, triton: bool) -> None:
    """Check output and gradient; recomputing the output gives the same bits and changes no bit of
    the gradient."""
    width = 7
    x = (3 * randn(2, 5, 2 * width if gated else width)).to(DEVICE, dtype)
    grad = randn(2, 5, width, seed=1).to(DEVICE, dtype)
    exact = x.double().requires_grad_()
    output = FORMULAS[name](exact[..., :width]) * (exact[..., width:] if gated else 1)
    output.backward(grad.double())
    ours = activate(x, name, gated, triton)
    assert ours.dtype == dtype and ours.data_ptr() != x.data_ptr(), (
        "the MLP keeps input and output separately"
    )
    close(ours, output, dtype)
    gradient, nothing = activate_backward(grad.clone(), x.clone(), name, gated, False, triton)
    assert nothing is None and gradient.shape == x.shape and exact.grad is not None
    close(gradient, exact.grad, dtype)
    same, again = activate_backward(grad.clone(), x.clone(), name, gated, True, triton)
    assert torch.equal(same, gradient) and again is not None and torch.equal(again, ours)


@implementations
@pytest.mark.parametrize("gated", [False, True])
def test_rows_of_several_blocks(gated: bool, triton: bool) -> None:
    """Rows wider than one program takes, with a partial last block; the gradient overwrites the
    input."""
    width = 1500
    x = randn(3, 2 * width if gated else width).to(DEVICE)
    exact, grad = x.double().requires_grad_(), randn(3, width, seed=1).to(DEVICE)
    output = FORMULAS["silu"](exact[:, :width]) * (exact[:, width:] if gated else 1)
    output.backward(grad.double())
    close(activate(x, "silu", gated, triton), output, torch.float32)
    gradient, again = activate_backward(grad, x, "silu", gated, True, triton)
    assert gradient is x and again is not None and exact.grad is not None
    close(gradient, exact.grad, torch.float32)
    close(again, output, torch.float32)


@pytest.mark.parametrize(
    ("name", "dtype", "triton"), covering(["quick_gelu", "silu"], DTYPES, IMPLEMENTATIONS)
)
def test_a_limit_cuts_gates_above_and_factors_on_both_sides(
    name: str, dtype: torch.dtype, triton: bool
) -> None:
    """As written for gpt-oss, with values at the limit, whose gradient is kept, and NaN, which
    stays."""
    limit, width = 1.5, 9
    x = (3 * randn(2, 5, 2 * width)).to(DEVICE, dtype)
    x[0, 0, [0, width]] = limit
    x[0, 1, width] = -limit
    grad = randn(2, 5, width, seed=1).to(DEVICE, dtype)
    exact = x.double().requires_grad_()
    # torch 2.14's clamp passes no gradient at the limit; 2.13's does
    gate, up = exact[..., :width], exact[..., width:]
    gate, up = gate.where(~(gate > limit), limit), up.where(~(up.abs() > limit), limit * up.sign())
    output = FORMULAS[name](gate) * (up + 1)
    output.backward(grad.double())
    close(activate(x, name, True, triton, limit), output, dtype)
    gradient, nothing = activate_backward(grad.clone(), x.clone(), name, True, False, triton, limit)
    assert nothing is None and exact.grad is not None
    close(gradient, exact.grad, dtype)
    assert torch.equal(gradient == 0, exact.grad == 0)
    same, again = activate_backward(grad.clone(), x.clone(), name, True, True, triton, limit)
    assert torch.equal(same, gradient) and again is not None
    assert torch.equal(again, activate(x, name, True, triton, limit))
    x[0, 0, 0], x[0, 1, width] = torch.nan, torch.nan
    assert activate(x, name, True, triton, limit)[0, :2, 0].isnan().all()


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # a GPU would not warn
@implementations
@names
def test_non_finite_values_stay_non_finite(name: str, triton: bool) -> None:
    """A broken value must reach the loss: no activation turns NaN into a number or large values
    into NaN."""
    x = torch.tensor([[float("nan"), 1e4, -1e4, 80.0, -80.0]], device=DEVICE)
    output = activate(x, name, False, triton)
    gradient, _ = activate_backward(torch.ones_like(x), x.clone(), name, False, False, triton)
    assert (
        output[0, 0].isnan() and output[0, 1:].isfinite().all() and gradient[0, 1:].isfinite().all()
    )
    close(output[:, 1:], FORMULAS[name](x[:, 1:].double()), torch.float32)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@implementations
def test_quick_gelu_of_the_largest_numbers_in_fp16(triton: bool) -> None:
    """1.702 u overflows fp16."""
    x = torch.tensor([[65504.0, -65504.0]], device=DEVICE, dtype=torch.float16)
    gradient, output = activate_backward(
        torch.ones_like(x), x.clone(), "quick_gelu", False, True, triton
    )
    assert (
        output is not None
        and output.tolist() == [[65504.0, 0.0]]
        and gradient.tolist() == [[1.0, 0.0]]
    )


@implementations
def test_an_input_that_is_not_contiguous(triton: bool) -> None:
    """The input is some columns of a wider tensor."""
    x = randn(3, 20).to(DEVICE)[:, 4:14]
    assert torch.equal(
        activate(x, "gelu", True, triton), activate(x.contiguous(), "gelu", True, triton)
    )


@pytest.mark.parametrize("gated", [False, True])
def test_gelu_in_pieces_is_the_formula(gated: bool) -> None:
    """Rows of several pieces, the last one short; a gate is a half of each row, so not
    contiguous."""
    u = 4 * randn(2 * PIECE_NUMEL // 384 + 3, 384 * (2 if gated else 1))
    gate = u.chunk(2, dim=-1)[0] if gated else u
    exact = torch.nn.functional.gelu(gate.double(), approximate="tanh")
    before = gate.clone()
    z = FUNCTIONS["gelu"][0](gate)
    assert z.is_contiguous() and torch.equal(gate, before)
    torch.testing.assert_close(z.double(), exact, atol=2e-6, rtol=2e-6)
    # an element's value does not depend on its piece
    assert torch.equal(z[:2], FUNCTIONS["gelu"][0](gate[:2]))
