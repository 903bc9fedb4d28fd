"""Where weight gradients go: the first one overwrites, later ones add up, frozen parameters get none."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from megatron_lite.kernels import gradients
from megatron_lite.kernels.embedding import add_positions, embedding
from megatron_lite.kernels.gradients import ProductAccumulation, product_accumulation
from megatron_lite.kernels.linear import accumulate_product, linear
from megatron_lite.kernels.linear_cross_entropy import linear_cross_entropy
from megatron_lite.kernels.normalization import Kind, add_norm, layer_norm, rms_norm
from megatron_lite.parameter import Parameter

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
    return functional.cross_entropy(x @ w.t(), torch.arange(len(x)) % len(w), reduction="sum") * SCALE


def _our_loss(x: Tensor, w: Tensor) -> Tensor:
    """Three chunks of tokens: the first may write, the others add. Its value is checked elsewhere."""
    labels = torch.arange(len(x)) % len(w)
    return linear_cross_entropy(x, cast(Parameter, w), labels, torch.tensor(SCALE), -(-len(x) // 3))


OPERATIONS = {
    "linear": Operation(linear, functional.linear, [(2, 3, 5)], [(4, 5), (4,)]),
    "long linear": Operation(linear, functional.linear, [(2, 150, 5)], [(4, 5)]),  # more rows: another product
    "layer norm": Operation(
        lambda x, w, b: layer_norm(x, w, b, 1e-5),
        lambda x, w, b: functional.layer_norm(x, (5,), w, b, 1e-5),
        [(2, 3, 5)],
        [(5,), (5,)],
    ),
    "rms norm": Operation(
        lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: functional.rms_norm(x, (5,), w, 1e-5), [(2, 3, 5)], [(5,)]
    ),
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


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_parameter(values: Tensor, grad_dtype: torch.dtype) -> Parameter:
    """A trainable parameter as its stage hands it out: garbage where the gradient will be."""
    made = cast(Parameter, Parameter(values))
    made.main_grad = torch.full(values.shape, torch.nan, dtype=grad_dtype)
    made.gradient_is_empty = True
    return made


def requirements(operation: Operation) -> Iterator[tuple[tuple[bool, ...], tuple[bool, ...]]]:
    """Every choice of activations and parameters that need a gradient, but for none at all."""
    for choice in itertools.product((True, False), repeat=len(operation.activations) + len(operation.parameters)):
        if any(choice):
            yield choice[: len(operation.activations)], choice[len(operation.activations) :]


def close(ours: Tensor, exact: Tensor, tolerance: float) -> None:
    assert ours.shape == exact.shape
    assert float((ours.detach().double() - exact.detach()).abs().max()) <= tolerance * float(exact.abs().max())


@operations
@pytest.mark.parametrize("dtypes", DTYPES, ids=lambda pair: f"{pair[0]}, {pair[1]}".replace("torch.", ""))
def test_first_gradient_overwrites_and_frozen_parameters_get_none(
    operation: Operation, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """Against autograd in fp64, from a buffer full of NaN, for every combination of what needs a gradient."""
    tolerance = DTYPES[dtypes]
    activations = [draw(shape, seed).to(dtypes[0]) for seed, shape in enumerate(operation.activations)]
    weights = [draw(shape, seed + 10).to(dtypes[0]) for seed, shape in enumerate(operation.parameters)]
    exact = [tensor.double().requires_grad_() for tensor in (*activations, *weights)]
    reference = operation.formula(*exact)
    grad = torch.ones((), dtype=torch.float64)
    if reference.dim():
        grad = draw(tuple(reference.shape), 20).to(dtypes[0])
    reference.backward(grad.double())
    for activation_choice, weight_choice in requirements(operation):
        inputs = [x.clone().requires_grad_(needed) for x, needed in zip(activations, activation_choice, strict=True)]
        parameters = [
            make_parameter(w, dtypes[1]) if needed else cast(Parameter, Parameter(w, requires_grad=False))
            for w, needed in zip(weights, weight_choice, strict=True)
        ]
        for count in (1, 2):
            operation.ours(*inputs, *parameters).backward(grad)
            for index, tensor in enumerate((*inputs, *parameters)):
                ours = tensor.main_grad if isinstance(tensor, Parameter) and tensor.requires_grad else tensor.grad
                if tensor.requires_grad:
                    assert ours is not None
                    close(ours, count * cast(Tensor, exact[index].grad), tolerance)
                else:
                    assert ours is None and not hasattr(tensor, "main_grad")
        assert not any(parameter.gradient_is_empty for parameter in parameters)


@operations
def test_nothing_is_computed_for_an_operation_that_is_frozen(operation: Operation) -> None:
    """Inference and frozen stages: no graph, whatever the operation would keep."""
    inputs = [draw(shape, 0) for shape in operation.activations]
    parameters = [Parameter(draw(shape, 1), requires_grad=False) for shape in operation.parameters]
    output = operation.ours(*inputs, *parameters)
    assert not output.requires_grad


def test_tied_weight_takes_its_first_gradient_from_the_head() -> None:
    """The head writes in the forward pass, the embedding adds in the backward: the sum of both, whatever was there."""
    weight = make_parameter(draw((7, 5), 0), torch.float32)
    _our_loss(embedding(weight, TOKENS).flatten(0, 1), weight).backward()
    exact = weight.detach().double().requires_grad_()
    _loss(exact[TOKENS].flatten(0, 1), exact).backward()
    close(weight.main_grad, cast(Tensor, exact.grad), 2e-5)


@pytest.mark.parametrize("frozen", [(), ("bias",), ("weight",), ("weight", "bias")], ids=str)
def test_linear_keeps_its_input_for_a_trained_weight_only(frozen: tuple[str, ...]) -> None:
    kept: list[Tensor] = []
    weight, bias = (
        make_parameter(draw(shape, 0), torch.float32).requires_grad_(name not in frozen)
        for name, shape in (("weight", (4, 5)), ("bias", (4,)))
    )
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        linear(draw((3, 5), 1).requires_grad_(), cast(Parameter, weight), cast(Parameter, bias))
    assert [tuple(tensor.shape) for tensor in kept] == ([] if "weight" in frozen else [(3, 5)])


def test_a_way_that_does_not_add_or_rounds_is_passed_over() -> None:
    """What the choice of a product's way into fp32 tests it with."""
    device = torch.device("cpu")

    def wide(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
        total.copy_(a.float() @ b.float() + (0 if first else total))

    def writes(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
        total.copy_(a.float() @ b.float())

    def adds(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
        total.add_(a.float() @ b.float())

    def rounds(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
        total.copy_((a @ b) + (0 if first else total))

    def is_exact(run: Callable[..., None], dtype: torch.dtype) -> bool:
        return gradients._is_exact(ProductAccumulation("", run), device, dtype, torch.float32)

    for dtype in (torch.bfloat16, torch.float16):
        assert is_exact(wide, dtype)
        assert not any(is_exact(run, dtype) for run in (writes, adds, rounds))
        assert product_accumulation(device, dtype, torch.float32).name == f"through {gradients.NAMES[dtype]} temporary"
    assert product_accumulation(device, torch.float32, torch.float32).name == "by the product itself"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_are_added_in_fp32_on_a_gpu(dtype: torch.dtype) -> None:
    """PyTorch 2.11 lets the product write and add in fp32, without a temporary: nearer to fp64 than one rounded first.

    Also through views of a flat buffer, with inputs that are not contiguous.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    way = product_accumulation(device, dtype, torch.float32)
    assert way.name == "by the product itself"
    for t, o, i in ((1024, 384, 640), (1000, 96, 40), (77, 51, 33)):
        generator = torch.Generator(device).manual_seed(t)
        grad = torch.randn(t, o + 8, device=device, generator=generator).to(dtype)[:, :o]
        input_ = torch.randn(i, t, device=device, generator=generator).to(dtype).t()
        weight = make_parameter(torch.empty(o, i, dtype=dtype, device=device), torch.float32)
        flat = torch.full((3 * o * i,), torch.nan, device=device)
        weight.main_grad = flat[o * i : 2 * o * i].view(o, i)
        exact, narrow = grad.double().t() @ input_.double(), torch.zeros(o, i, device=device)
        accumulate_product(weight, grad, input_)
        contiguous = grad.contiguous(), input_.contiguous()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(3):
            accumulate_product(weight, *contiguous)
        assert torch.cuda.max_memory_allocated() == before
        for _ in range(4):
            narrow.add_(grad.t() @ input_)
        error, rounded = ((total.double() - 4 * exact).abs().max() for total in (weight.main_grad, narrow))
        assert error < 8e-5 * exact.abs().max() and error < rounded / 4
        assert flat[: o * i].isnan().all() and flat[2 * o * i :].isnan().all()


def test_large_narrow_temporaries_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU rows are made and added a few at a time: the values are those of one product, written and added."""
    monkeypatch.setattr(gradients, "TEMPORARY_ELEMENTS", 50)  # 7 rows of 7
    grad, input_ = draw((5, 24), 0).bfloat16(), draw((5, 7), 1).bfloat16()
    weight = make_parameter(torch.empty(24, 7, dtype=torch.bfloat16), torch.float32)
    once = (grad.t() @ input_).float()
    for count in (1, 2):
        accumulate_product(weight, grad, input_)
        close(weight.main_grad, count * once.double(), 1e-6)
