"""Weight gradients of every operation: the first overwrites, later ones add up, frozen parameters
get none."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.kernels.cross_entropy import linear_cross_entropy
from megatron_lite.kernels.embedding import add_positions, embedding
from megatron_lite.kernels.linear import linear
from megatron_lite.kernels.normalization import Kind, add_norm
from megatron_lite.parameter import Parameter
from tests.support.kernel_checks import empty_gradient, randn

# (training dtype, dtype of the gradient buffer) -> tolerance, of the largest value
DTYPES = {
    (torch.float32, torch.float32): 2e-5,
    (torch.bfloat16, torch.float32): 3e-2,
    (torch.bfloat16, torch.bfloat16): 3e-2,
}
TOKENS = torch.tensor([[1, 1, 4], [0, 1, 6]])
SCALE = 0.37


@dataclass(frozen=True)
class Operation:
    """A function of activations and parameters, ours and as plain torch."""

    ours: Callable[..., Tensor]
    formula: Callable[..., Tensor]
    activations: Sequence[tuple[int, ...]]
    parameters: Sequence[tuple[int, ...]]


def _loss(x: Tensor, w: Tensor) -> Tensor:
    return (
        functional.cross_entropy(x @ w.t(), torch.arange(len(x)) % len(w), reduction="sum") * SCALE
    )


def _our_loss(x: Tensor, w: Tensor) -> Tensor:
    """In three chunks of tokens: the first may write, the others add. Another test checks the loss
    itself."""
    labels = torch.arange(len(x)) % len(w)
    return linear_cross_entropy(x, cast(Parameter, w), labels, torch.tensor(SCALE), -(-len(x) // 3))


OPERATIONS = {
    "linear": Operation(linear, functional.linear, [(2, 3, 5)], [(4, 5), (4,)]),
    # many rows take another product
    "long linear": Operation(linear, functional.linear, [(2, 150, 5)], [(4, 5)]),
    "sum and layer norm": Operation(
        lambda x, y, w, b: torch.cat(add_norm(x, y * 1, w, b, Kind(1e-5, True))),
        lambda x, y, w, b: torch.cat([x + y, functional.layer_norm(x + y, (5,), w, b, 1e-5)]),
        [(2, 3, 5), (2, 3, 5)],
        [(5,), (5,)],
    ),
    "sum and rms norm": Operation(
        lambda x, y, w: torch.cat(add_norm(x, y * 1, w, None, Kind(1e-5, False))),
        lambda x, y, w: torch.cat([x + y, functional.rms_norm(x + y, (5,), w, 1e-5)]),
        [(2, 3, 5), (2, 3, 5)],
        [(5,)],
    ),
    "embedding": Operation(lambda w: embedding(w, TOKENS), lambda w: w[TOKENS], [], [(9, 5)]),
    "positions": Operation(add_positions, lambda x, w: x + w[:3], [(2, 3, 5)], [(7, 5)]),
    "cross-entropy": Operation(_our_loss, _loss, [(11, 5)], [(7, 5)]),
    "long cross-entropy": Operation(_our_loss, _loss, [(800, 5)], [(7, 5)]),
}
operations = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=list(OPERATIONS))


def requirements(operation: Operation) -> Iterator[tuple[tuple[bool, ...], tuple[bool, ...]]]:
    """Yield every choice of activations and parameters that need a gradient, except the empty
    one."""
    for choice in itertools.product(
        (True, False), repeat=len(operation.activations) + len(operation.parameters)
    ):
        if any(choice):
            yield choice[: len(operation.activations)], choice[len(operation.activations) :]


def close(ours: Tensor, exact: Tensor, tolerance: float) -> None:
    assert ours.shape == exact.shape
    assert float((ours.detach().double() - exact.detach()).abs().max()) <= tolerance * float(
        exact.abs().max()
    )


@operations
@pytest.mark.parametrize(
    "dtypes", DTYPES, ids=lambda pair: f"{pair[0]}, {pair[1]}".replace("torch.", "")
)
def test_first_gradient_overwrites_and_frozen_parameters_get_none(
    operation: Operation, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Compare with autograd in fp64, from a buffer full of NaN, for every choice of tensors that
    need a gradient."""
    tolerance = DTYPES[dtypes]
    activations = [
        randn(*shape, seed=seed).to(dtypes[0]) for seed, shape in enumerate(operation.activations)
    ]
    weights = [
        randn(*shape, seed=seed + 10).to(dtypes[0])
        for seed, shape in enumerate(operation.parameters)
    ]
    exact = [tensor.double().requires_grad_() for tensor in (*activations, *weights)]
    reference = operation.formula(*exact)
    grad = torch.ones((), dtype=torch.float64)
    if reference.dim():
        grad = randn(*reference.shape, seed=20).to(dtypes[0])
    reference.backward(grad.double())
    for activation_choice, weight_choice in requirements(operation):
        inputs = [
            x.clone().requires_grad_(needed)
            for x, needed in zip(activations, activation_choice, strict=True)
        ]
        parameters = [
            empty_gradient(w, dtypes[1], trained=needed)
            for w, needed in zip(weights, weight_choice, strict=True)
        ]
        for count in (1, 2):
            operation.ours(*inputs, *parameters).backward(grad)
            for index, tensor in enumerate((*inputs, *parameters)):
                ours = (
                    tensor.main_grad
                    if isinstance(tensor, Parameter) and tensor.requires_grad
                    else tensor.grad
                )
                if tensor.requires_grad:
                    assert ours is not None
                    close(ours, count * cast(Tensor, exact[index].grad), tolerance)
                else:
                    assert ours is None and not hasattr(tensor, "main_grad")
        assert not any(parameter.gradient_is_empty for parameter in parameters)


@operations
def test_nothing_is_computed_for_an_operation_that_is_frozen(operation: Operation) -> None:
    """Inference and frozen stages build no graph."""
    inputs = [randn(*shape) for shape in operation.activations]
    parameters = [
        Parameter(randn(*shape, seed=1), requires_grad=False) for shape in operation.parameters
    ]
    output = operation.ours(*inputs, *parameters)
    assert not output.requires_grad


def test_tied_weight_takes_its_first_gradient_from_the_head() -> None:
    """The head writes in the forward pass and the embedding adds in the backward pass, over
    garbage."""
    weight = empty_gradient(randn(7, 5))
    _our_loss(embedding(weight, TOKENS).flatten(0, 1), weight).backward()
    exact = weight.detach().double().requires_grad_()
    _loss(exact[TOKENS].flatten(0, 1), exact).backward()
    close(weight.main_grad, cast(Tensor, exact.grad), 2e-5)
