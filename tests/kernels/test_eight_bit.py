"""Products of factors in 8 bits, against float64 arithmetic on numbers that this file rounds
itself."""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_lite.distributed.rank_group import alone
from megatron_lite.kernels import eight_bit as module
from megatron_lite.kernels.eight_bit import (
    E4M3,
    E5M2,
    RECIPES,
    EightBit,
    Rounded,
    multiply,
    round_values,
    units_of,
)
from megatron_lite.kernels.linear import linear
from megatron_lite.kernels.tensor_collectives import ONE_RANK, collectives_over
from megatron_lite.parameter import Initializer, Parameter, ParameterSpec
from megatron_lite.tiles import Block, Split
from tests.support.kernel_checks import DEVICE, empty_gradient, needs_triton, randn
from tests.support.thread_ranks import on_threads

CPU = torch.device("cpu")
T, I, O = 48, 64, 32  # noqa: E741
recipes = pytest.mark.parametrize("name", RECIPES)
Numbers = NDArray[np.float64]


class Format(NamedTuple):
    """A format of 8 bits: explicit bits of the mantissa, the exponent of the smallest normal
    number, the largest."""

    mantissa: int
    exponent: int
    largest: float


FORMATS = {E4M3: Format(3, -6, 448.0), E5M2: Format(2, -14, 57344.0)}


def nearest(values: Numbers, dtype: torch.dtype) -> Numbers:
    """Round to the nearest number of a format, ties to even (numpy.rint), beyond the largest to the
    largest."""
    if dtype == torch.int8:
        return np.clip(np.rint(values), -127, 127)
    mantissa, smallest, largest = FORMATS[dtype]
    exponents = np.maximum(np.frexp(values)[1] - 1, smallest)
    step = np.exp2(exponents - mantissa)
    return np.clip(np.rint(values / step) * step, -largest, largest)


def scales(values: Numbers, dtype: torch.dtype, by_row: bool) -> Numbers:
    """fp32 scales: of the rows, or of the whole."""
    largest = np.abs(values).max(axis=1 if by_row else None, keepdims=True)
    return (largest.astype(np.float32) / np.float32(module.LARGEST[dtype])).astype(np.float64)


def dequantized(values: Tensor, dtype: torch.dtype, by_row: bool) -> Numbers:
    exact = values.detach().double().numpy()
    scale = scales(exact, dtype, by_row)
    return (
        nearest((exact.astype(np.float32) / scale.astype(np.float32)).astype(np.float64), dtype)
        * scale
    )


def weight_of(values: Tensor, name: str = "layer.weight") -> Parameter:
    weight = empty_gradient(values)
    weight.spec = ParameterSpec(name, tuple(values.shape), Initializer("constant", 0.0))
    weight.casts = {}
    return weight


def close(found: Tensor, expected: Numbers, tolerance: float = 1e-5) -> None:
    difference = np.linalg.norm(found.detach().double().numpy() - expected) / np.linalg.norm(
        expected
    )
    assert difference <= tolerance, difference


@functools.cache
def problem() -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and gradient whose rows and columns differ in size by some orders of
    magnitude."""
    x = randn(T, I, seed=1)
    weight = 0.1 * randn(O, I, seed=2)
    dy = randn(T, O, seed=3)
    spread = torch.logspace(-2, 1, I)
    return x * spread, weight / spread, dy * torch.logspace(-4, 2, T)[:, None]


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8], ids=str)
def test_every_number_is_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    """Subnormal numbers, ties and what is beyond the largest included."""
    largest = module.LARGEST[dtype]
    exponents = torch.linspace(-20, math.log2(largest) + 1, 20_001, dtype=torch.float64)
    values = torch.cat([exponents.exp2(), torch.arange(-300, 300) / 2]).float()
    found = round_values(values, torch.ones(()), dtype)
    assert np.array_equal(found.double().numpy(), nearest(values.double().numpy(), dtype))


@needs_triton
@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8], ids=str)
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("narrow", [False, True], ids=["fp32", "bf16"])
def test_the_kernel_rounds_as_the_reference(
    dtype: torch.dtype, by_row: bool, transposed: bool, narrow: bool
) -> None:
    """From subnormal numbers to some that are clipped; odd sizes, and both orders in memory."""
    values = randn(70, 130, seed=5) * torch.logspace(-7, 2, 130)
    values = (values.bfloat16() if narrow else values).to(DEVICE)
    values = values.t() if transposed else values
    scale = (
        torch.logspace(-3, 1, len(values), device=DEVICE)[:, None]
        if by_row
        else torch.full((1, 1), 0.37).to(DEVICE)
    )
    found, expected = (
        round_values(values, scale, dtype, triton=triton) for triton in (True, False)
    )
    # zeros may have another sign
    assert found.is_contiguous() and torch.equal(found.float(), expected.float())


def skip_without_units() -> None:
    """With ONEDNN_MAX_CPU_ISA below AMX on a CPU that has it, torch asks oneDNN for what it may not
    do."""
    a, one = torch.ones(32, 32).to(torch.float8_e4m3fn), torch.ones(())
    try:
        torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.float32)
    except RuntimeError:
        pytest.skip("no 8-bit products on this CPU")


@recipes
@pytest.mark.parametrize("units", [(), (torch.float32, torch.bfloat16)], ids=["reference", "units"])
def test_products_and_gradients_are_those_of_float64(
    name: str, units: tuple[torch.dtype, ...]
) -> None:
    """Forward, input gradient and weight gradient, written and added; scales to the bit.

    The units are those of torch for a CPU. "delayed" without a history is "tensorwise". Gradients
    in int8 are rounded at random: each is one of the two numbers around the exact one, and their
    mean over seeds is exact.
    """
    recipe, (x, values, dy) = RECIPES[name], problem()
    by_row = recipe.by_row
    weight = weight_of(values)
    bias = randn(O, seed=4)
    if units and name == "rowwise" and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 has no 8-bit product by row for a CPU")
    if units and name != "int8":
        skip_without_units()
    largest = torch.full((32, 32), 127, dtype=torch.int8)
    if units and name == "int8" and torch._int_mm(largest, largest)[0, 0] != 32 * 127**2:
        pytest.skip("wrong integers on this CPU: findings/integer_products_without_vnni.sh")
    eight_bit, source = EightBit(recipe, weight.spec, alone(CPU), units), x.clone().requires_grad_()
    y = linear(source, weight, Parameter(bias, requires_grad=False), products=eight_bit.at(7))
    q_x, q_w = dequantized(x, recipe.values, by_row), dequantized(values, recipe.values, by_row)
    close(y, q_x @ q_w.T + bias.double().numpy())
    assert np.array_equal(
        weight.casts["layer"][0].scale, scales(values.double().numpy(), recipe.values, by_row)
    )

    y.backward(dy)
    assert source.grad is not None
    columns = dequantized(values.t(), recipe.values, by_row).T
    if name == "int8":
        close(weight.main_grad, dy.double().numpy().T @ x.double().numpy(), 1e-6)  # not rounded
        means = [linear(source, weight, products=eight_bit.at(seed)) for seed in range(60)]
        source.grad = None
        torch.stack(means).sum(0).backward(dy)  # another seed each
        close(source.grad / 60, dy.double().numpy() @ columns, 0.01)
        return
    close(source.grad, dequantized(dy, recipe.gradients, by_row) @ columns)
    expected = (
        dequantized(dy.t(), recipe.gradients, by_row) @ dequantized(x.t(), recipe.values, by_row).T
    )
    close(weight.main_grad, expected)
    linear(source, weight, products=eight_bit.at(7)).backward(dy)
    close(weight.main_grad, 2 * expected)


def test_integers_are_rounded_up_or_down_at_random_and_without_bias() -> None:
    """By the seed alone."""
    values, scale = torch.linspace(-130, 130, 1001).expand(400, -1).contiguous(), torch.ones(1, 1)
    found = round_values(values, scale, torch.int8, seed=3)
    assert torch.equal(found, round_values(values, scale, torch.int8, seed=3))
    assert not torch.equal(found, round_values(values, scale, torch.int8, seed=4))
    clipped = values.clamp(-127, 127)
    assert float((found - clipped).abs().max()) <= 1
    # The standard deviation of the mean of 400 roundings is at most 0.025.
    assert float((found.double().mean(0) - clipped[0]).abs().max()) < 5 * 0.025


@recipes
def test_zeros_and_numbers_that_are_not_finite(name: str) -> None:
    """A row of zeros stays zero; NaN and infinity are not hidden."""
    recipe = RECIPES[name]
    spec = ParameterSpec("layer.weight", (O, I), Initializer("constant", 0.0))
    for bad in (0.0, math.nan, math.inf):
        x, weight = torch.zeros(T, I), weight_of(randn(O, I))
        x[3, 5] = bad
        y = linear(x, weight, products=EightBit(recipe, spec, alone(CPU), ()).at(None))
        assert bool(y[3].isnan().all() if bad else (y == 0).all()), (bad, y[3])


def test_sizes_that_the_units_refuse_take_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, torch's product of 8 bits refuses sums over, and columns of, what is no multiple of
    16."""
    a, b = (
        Rounded(round_values(randn(rows, 40), torch.ones(1, 1), E4M3), torch.ones(1, 1))
        for rows in (5, 24)
    )
    monkeypatch.setattr(torch, "_scaled_mm", None)
    with_units = multiply(a, b, torch.float32, (torch.float32,))
    assert torch.equal(with_units, multiply(a, b, torch.float32))


def test_what_the_units_do_not_write_goes_through_16_bits() -> None:
    """As products by row on GPUs whose units write bf16 alone."""
    skip_without_units()
    a, b = (
        Rounded(round_values(randn(rows, 64), torch.ones(1, 1), E4M3), torch.ones(1, 1))
        for rows in (32, 48)
    )
    found, exact = multiply(a, b, torch.float32, (torch.bfloat16,)), multiply(a, b, torch.float32)
    assert found.dtype == torch.float32 and torch.equal(found, exact.bfloat16().float())


def test_units_are_tried_before_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU counts as having none; a device whose products are wrong or raise has none for that
    dtype."""
    assert units_of(CPU, RECIPES["tensorwise"]) == ()
    right = torch._scaled_mm

    def product(*factors: Tensor, out_dtype: torch.dtype) -> Tensor:
        if out_dtype == torch.float16:
            raise RuntimeError("not supported")
        return right(*factors, out_dtype=out_dtype) * (1.1 if out_dtype == torch.float32 else 1.0)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    device: Any = type(
        "StandIn",
        (),
        {"type": "cuda", "__hash__": lambda self: 0, "__eq__": lambda self, other: True},
    )()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Generator", lambda device, made=torch.Generator: made())
        patch.setattr(
            torch,
            "randn",
            lambda *size, device, generator, made=torch.randn: made(*size, generator=generator),
        )
        assert units_of.__wrapped__(device, RECIPES["tensorwise"]) == (torch.bfloat16,)


# -- tensor parallelism
# ------------------------------------------------------------------------------------------------


def scales_of(rank: Any, name: str, dim: int, splits_tokens: bool) -> list[Tensor]:
    """Return the scales of both factors of a layer's three products on one rank, as parts of whole
    ones.

    dim: 0, outputs are split over the ranks; 1, inputs.
    """
    x, values, dy = problem()
    group = rank.tensor
    recipe = RECIPES[name]
    seen = list[Tensor]()
    ranks, place = group.world_size, group.rank
    tokens = slice(place * T // ranks, (place + 1) * T // ranks) if splits_tokens else slice(None)
    channels = [slice(place * size // ranks, (place + 1) * size // ranks) for size in (O, I)]
    own = values[channels[0]] if dim == 0 else values[:, channels[1]]
    weight, collectives = weight_of(own.contiguous()), collectives_over(group, splits_tokens)
    split = Split(ranks, place, dim, (Block.of(values.shape[dim], ranks),))
    spec = ParameterSpec("layer.weight", (O, I), Initializer("constant", 0.0), split=split)
    eight_bit = EightBit(recipe, spec, group, ())
    scale_for = eight_bit._round

    def recorded(values: Tensor, kind: int, over: str) -> Rounded:
        rounded = scale_for(values, kind, over)
        along = {
            "ti": "t" if over == "i" else "i",
            "oi": "o" if over == "i" else "i",
            "to": "t" if over == "o" else "o",
        }
        rows = along[module.DIMENSIONS[kind]]
        is_part = recipe.by_row and rows == "oi"[dim] and ranks > 1
        gathered = (
            group.largest(_placed(rounded.scale, place, ranks), "test")
            if is_part
            else rounded.scale
        )
        seen.append(gathered)
        return rounded

    eight_bit._round = recorded  # type: ignore[method-assign]
    if dim == 0:
        source = x[tokens].clone().requires_grad_()
        y = linear(source.unsqueeze(0), weight, before=collectives, products=eight_bit.at(1))
        y.backward(dy[:, channels[0]].unsqueeze(0))
    else:
        source = x[:, channels[1]].clone().requires_grad_()
        y = linear(source.unsqueeze(0), weight, after=collectives, products=eight_bit.at(1))
        y.backward(dy[tokens].unsqueeze(0))
    return seen


def _placed(part: Tensor, place: int, ranks: int) -> Tensor:
    whole = part.new_zeros(ranks, *part.shape)
    whole[place] = part
    return whole.flatten(0, 1)


@recipes
@pytest.mark.parametrize("dim", [0, 1], ids=["outputs", "inputs"])
def test_tensor_parallel_ranks_have_the_scales_of_one_rank(name: str, dim: int) -> None:
    """To the bit, of every factor, with and without sequence parallelism."""
    (one,) = on_threads(1, 1, scales_of, name, dim, False)
    assert len(one) == (4 if name == "int8" else 6)
    for splits_tokens in (False, True):
        for found in on_threads(1, 2, scales_of, name, dim, splits_tokens):
            assert len(found) == len(one)
            for part, whole in zip(found, one, strict=True):
                assert torch.equal(part, whole), (splits_tokens, part.shape, whole.shape)


def test_a_weight_is_rounded_once_per_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward passes of two micro-batches round it twice: as it is and transposed."""
    x, values, dy = problem()
    weight, rounded = weight_of(values), list[Any]()
    original = module.round_values
    monkeypatch.setattr(
        module, "round_values", lambda *given: (rounded.append(given[0].shape), original(*given))[1]
    )
    eight_bit = EightBit(RECIPES["rowwise"], weight.spec, alone(CPU), ())
    for seed in (1, 2):
        linear(
            x.clone().requires_grad_(), weight, None, ONE_RANK, ONE_RANK, eight_bit.at(seed)
        ).backward(dy)
    assert rounded.count((O, I)) == rounded.count((I, O)) == 1
    weight.casts.clear()  # as the next gather does
    linear(x, weight, None, ONE_RANK, ONE_RANK, eight_bit.at(None))
    assert rounded.count((O, I)) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@recipes
def test_a_gpu_multiplies_the_numbers_of_a_cpu(name: str) -> None:
    """Scales and rounded numbers to the bit, products within 1e-3, in fp32 and bf16; from Ada on,
    by its units."""
    device, recipe, (x, values, dy) = torch.device("cuda"), RECIPES[name], problem()
    units = units_of(device, recipe)
    assert torch.bfloat16 in units or torch.cuda.get_device_capability(device) < (8, 9)
    for dtype in (torch.float32, torch.bfloat16):
        made = {}
        for place, found in ((CPU, ()), (device, units)):
            weight = weight_of(values.to(dtype).to(place))
            source = x.to(dtype).to(place).detach().requires_grad_()
            y = linear(
                source, weight, products=EightBit(recipe, weight.spec, alone(place), found).at(7)
            )
            y.backward(dy.to(dtype).to(place))
            assert source.grad is not None
            gradients = (weight.main_grad,) if name == "int8" else (source.grad, weight.main_grad)
            made[place.type] = (
                [value.detach().cpu().double().numpy() for value in (y, *gradients)],
                weight.casts["layer"],
            )
        for found_cast, cast in zip(made["cuda"][1], made["cpu"][1], strict=True):
            assert torch.equal(found_cast.scale.cpu(), cast.scale)
            assert torch.equal(found_cast.numbers.cpu().float(), cast.numbers.float())
        for on_gpu, expected in zip(made["cuda"][0], made["cpu"][0], strict=True):
            close(torch.from_numpy(on_gpu), expected, 1e-3 if dtype == torch.float32 else 4e-3)
