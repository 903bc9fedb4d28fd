"""The MLP against its formula; a recomputation level changes memory and never a bit."""

import itertools
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.kernels.mlp import mlp
from megatron_lite.parameter import Parameter
from tests.support.kernel_checks import (
    DEVICE,
    DTYPES,
    covering,
    empty_gradient,
    needs_triton,
    saved_tensors,
)

# 300 tokens: takes the products for many rows
B = 2
S = 150
H = 8
F = 12
LEVELS = ("none", "activation", "full")
GRAD = torch.randn((B, S, H), generator=torch.Generator().manual_seed(1))
NAMES = ("input", "up", "up_bias", "down", "down_bias")
levels = pytest.mark.parametrize("level", LEVELS)
shapes = pytest.mark.parametrize(
    ("gated", "biases"), list(itertools.product((False, True), repeat=2))
)


def make(gated: bool, biases: bool, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return values for the input and the parameters."""
    width = 2 * F if gated else F
    shapes = {
        "input": (B, S, H),
        "up": (width, H),
        "up_bias": (width,),
        "down": (H, F),
        "down_bias": (H,),
    }
    generator = torch.Generator().manual_seed(0)
    values = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }
    return {name: value for name, value in values.items() if biases or "bias" not in name}


def run(
    values: dict[str, Tensor],
    trained: tuple[str, ...],
    gated: bool,
    level: str,
    activation: str = "silu",
    triton: bool = False,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return output and gradients of trained tensors, from buffers full of NaN, and the tensors
    kept for backward."""
    tensors: dict[str, Tensor | None] = dict.fromkeys(NAMES)
    for name, value in values.items():
        if name == "input":
            tensors[name] = value.clone().requires_grad_(name in trained)
        else:
            tensors[name] = empty_gradient(value.clone(), trained=name in trained)
    with saved_tensors() as kept:
        output = mlp(*tensors.values(), activation, gated, level, triton)  # type: ignore[arg-type]
    results = {"output": output.detach().clone()}
    output.backward(GRAD[:, : output.shape[1]].to(output))
    for name in trained:
        tensor = tensors[name]
        gradient = tensor.main_grad if isinstance(tensor, Parameter) else cast(Tensor, tensor).grad
        results[name] = cast(Tensor, gradient)
    return results, kept


def exact(values: dict[str, Tensor], gated: bool) -> dict[str, Tensor]:
    """Compute the same with torch.nn.functional and autograd in fp64."""
    leaves = {name: value.double().requires_grad_() for name, value in values.items()}
    hidden = functional.linear(leaves["input"], leaves["up"], leaves.get("up_bias"))
    gate = functional.silu(hidden[..., :F])
    hidden = gate * hidden[..., F:] if gated else gate
    output = functional.linear(hidden, leaves["down"], leaves.get("down_bias"))
    output.backward(GRAD[:, : output.shape[1]].to(values["input"]).double())
    return {"output": output.detach()} | {
        name: cast(Tensor, leaf.grad) for name, leaf in leaves.items()
    }


@levels
@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mlp_equals_its_formula(gated: bool, biases: bool, level: str, dtype: torch.dtype) -> None:
    values = make(gated, biases, dtype)
    reference = exact(values, gated)
    for name, ours in run(values, tuple(values), gated, level)[0].items():
        error = (ours.double() - reference[name]).abs().max() / reference[name].abs().max()
        assert error < (2e-6 if dtype == torch.float32 else 2e-2), name


@needs_triton
@pytest.mark.parametrize(
    ("gated", "dtype", "biases"), covering([False, True], DTYPES[:2], [False, True])
)
def test_mlp_by_kernels_equals_its_formula(gated: bool, biases: bool, dtype: torch.dtype) -> None:
    """A few tokens; every level gives the bits of level "none", whatever is frozen."""
    values = {name: value.to(DEVICE) for name, value in make(gated, biases, dtype).items()}
    values["input"] = values["input"][:, :2]
    reference = exact(values, gated)
    first = run(values, tuple(values), gated, "none", triton=True)[0]
    for name, ours in first.items():
        error = (ours.double() - reference[name]).abs().max() / reference[name].abs().max()
        assert error < (2e-6 if dtype == torch.float32 else 2e-2), name
    for trained, level in (
        (tuple(values), "activation"),
        (tuple(values), "full"),
        (("input",), "activation"),
        (("down",), "full"),
    ):
        results = run(values, trained, gated, level, triton=True)[0]
        assert all(torch.equal(ours, first[name]) for name, ours in results.items()), (
            trained,
            level,
        )


@pytest.mark.parametrize(
    "activation", ["silu", "gelu", "squared_relu", "quick_gelu", "tanh", "identity"]
)
@shapes
def test_no_level_and_no_freezing_changes_a_bit(gated: bool, biases: bool, activation: str) -> None:
    """Every level with every choice of trained tensors gives the bits of level "none" with
    everything trained."""
    values = make(gated, biases)
    reference = run(values, tuple(values), gated, "none", activation)[0]
    for count in range(1, len(values) + 1):
        for trained, level in itertools.product(itertools.combinations(values, count), LEVELS):
            results = run(values, trained, gated, level, activation)[0]
            assert results.keys() == {"output", *trained}
            for name, ours in results.items():
                assert torch.equal(ours, reference[name]), (name, trained, level)


@shapes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_level_keeps_exactly_the_documented_bytes(
    gated: bool, biases: bool, dtype: torch.dtype
) -> None:
    """Level "activation" keeps tokens x f elements fewer than "none"; "full" twice as many fewer,
    gated three times."""
    values = make(gated, biases, dtype)
    kept = {
        level: sum(tensor.nbytes for tensor in run(values, tuple(values), gated, level)[1])
        for level in LEVELS
    }
    activation_bytes = B * S * F * dtype.itemsize
    assert kept["none"] - kept["activation"] == activation_bytes
    assert kept["none"] - kept["full"] == (3 if gated else 2) * activation_bytes
    assert kept["full"] == B * S * H * dtype.itemsize


def test_frozen_weights_keep_only_what_other_gradients_need() -> None:
    """Name kept tensors by their width per token: x, u, z."""
    widths = {H: "x", 2 * F: "u", F: "z"}

    def kept(trained: tuple[str, ...], level: str) -> set[str]:
        return {
            widths[tensor.shape[-1]] for tensor in run(make(True, True), trained, True, level)[1]
        }

    assert kept(("input",), "none") == kept(("input", "up_bias", "down_bias"), "none") == {"u"}
    assert kept(("input", "down"), "none") == {"u", "z"}
    assert kept(("input", "up"), "none") == {"x", "u"}
    assert kept(("down",), "none") == {"z"} and kept(("down_bias",), "none") == set()
    assert (
        kept(("input",), "full") == kept(("down",), "full") == {"x"}
        and kept(("down_bias",), "full") == set()
    )
