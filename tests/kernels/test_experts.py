"""Experts against their formula in float64, for loads from even to one expert; no level of
recomputation changes a bit."""

from typing import cast

import pytest
import torch
from torch import Tensor

from megatron_lite.kernels import experts as module
from megatron_lite.kernels.experts import ExpertAdapter, ExpertMap, Rows, dispatched, experts
from megatron_lite.kernels.products import product
from megatron_lite.parameter import Parameter
from tests.support.kernel_checks import (
    DEVICE,
    TOLERANCE,
    calls_of_onednn,
    empty_gradient,
    implementations,
)

T, H, F, E, K = 37, 12, 10, 5, 2
RANK, FACTOR = 3, 0.7  # of adapters
LEVELS = ("none", "activation", "full")
NAMES = ("x", "scores", "up", "up_bias", "down", "down_bias")
Values = dict[str, Tensor]


def make(gated: bool, biases: bool, dtype: torch.dtype, width: int = F) -> Values:
    """Return random values for all tensors, scores in fp32."""
    generator = torch.Generator().manual_seed(0)
    rows = E * width * (2 if gated else 1)
    shapes = {"x": (T, H), "scores": (T, K), "up": (rows, H), "up_bias": (rows,)}
    shapes |= {"down": (E * H, width), "down_bias": (E * H,)}
    values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        name: value.to(DEVICE, torch.float32 if name == "scores" else dtype)
        for name, value in values.items()
        if biases or "bias" not in name
    }


def choices(kind: str) -> Tensor:
    """Return each token's experts, (T, K): of random ones, all but some, or the same ones; and the
    imbalances that DeepSpeed and Megatron-LM test: one hot expert, a power law, alternating."""
    generator = torch.Generator().manual_seed(1)
    if kind == "power law":  # the e-th expert with weight 1 / e^1.5
        weights = torch.arange(1.0, E + 1).pow(-1.5).expand(T, E)
        return torch.multinomial(weights, K, generator=generator).sort(1)[0].to(DEVICE)
    tokens = torch.arange(T)[:, None]
    if kind == "one hot":
        return torch.cat([0 * tokens, 1 + tokens % (E - 1)], 1).to(DEVICE)
    if kind == "alternating":
        return (torch.tensor([0, 2]) + tokens % 2).to(DEVICE)
    fewer = {"even": E, "two idle": E - 2, "one pair": K}[kind]
    order = torch.rand((T, fewer), generator=generator).argsort(1)[:, :K]
    return order.sort(1)[0].to(DEVICE)


def run(
    values: Values, chosen: Tensor, gated: bool, level: str = "none", **options: bool
) -> Values:
    """Return output and gradients, which overwrite garbage."""
    tensors: dict[str, Tensor | None] = dict.fromkeys(NAMES)  # and adapters', if any
    for name, value in values.items():
        inner = name in ("x", "scores")
        tensors[name] = value.clone().requires_grad_() if inner else empty_gradient(value.clone())
    x, scores, up, up_bias, down, down_bias, *factors = (
        cast(Parameter, t) for t in tensors.values()
    )
    adapters = [
        ExpertAdapter(a, b, FACTOR) for a, b in zip(factors[::2], factors[1::2], strict=True)
    ]
    maps = ExpertMap(up, up_bias, *adapters[:1]), ExpertMap(down, down_bias, *adapters[1:])
    output = experts(x, scores, dispatched(x, chosen, E), *maps, "silu", gated, level, **options)  # type: ignore[arg-type]
    result = {"output": output.detach().clone()}
    output.backward(torch.linspace(-1, 1, output.numel(), device=DEVICE).view_as(output).to(output))
    for name in values:
        tensor = tensors[name]
        grad = tensor.main_grad if isinstance(tensor, Parameter) else cast(Tensor, tensor).grad
        result[name] = cast(Tensor, grad)
    return result


def exact(values: Values, chosen: Tensor, gated: bool) -> Values:
    """Return output and gradients of the formula, expert by expert in float64."""
    leaves = {name: value.double().requires_grad_() for name, value in values.items()}
    total = of_formula(leaves, chosen, gated)
    total.backward(torch.linspace(-1, 1, total.numel(), device=DEVICE).view_as(total).to(total))
    return {"output": total.detach()} | {
        name: cast(Tensor, leaf.grad) for name, leaf in leaves.items()
    }


def of_formula(leaves: Values, chosen: Tensor, gated: bool = True) -> Tensor:
    """The output, expert by expert."""
    x, scores = leaves["x"], leaves["scores"]
    total = torch.zeros_like(x)
    for expert in range(E):
        up, down = (
            leaves[name].view(E, -1, leaves[name].shape[1])[expert] for name in ("up", "down")
        )
        biases = [
            leaves[name].view(E, -1)[expert] if name in leaves else 0.0
            for name in ("up_bias", "down_bias")
        ]
        u = x @ up.t() + biases[0]
        gate, factor = u.chunk(2, 1) if gated else (u, 1.0)
        y = (gate * gate.sigmoid() * factor) @ down.t() + biases[1]
        total = total + y * (scores * (chosen == expert)).sum(1, keepdim=True)
    return total


def check(found: Values, wanted: Values, tolerance: float) -> None:
    """Compare in units of the largest value."""
    for name, value in wanted.items():
        error = (found[name].double() - value).abs().max() / value.abs().max()
        assert error <= tolerance, (name, float(error))


@implementations
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(
    "kind", ["even", "two idle", "one pair", "one hot", "power law", "alternating"]
)
def test_against_the_formula(kind: str, gated: bool, triton: bool) -> None:
    """Odd sizes, experts without tokens, all tokens to the same experts; with biases."""
    values, chosen = make(gated, True, torch.float32), choices(kind)
    found = run(values, chosen, gated, triton=triton)
    check(found, exact(values, chosen, gated), TOLERANCE[torch.float32])
    idle = sorted({*range(E)} - {*chosen.flatten().tolist()})
    for name in ("up", "up_bias", "down", "down_bias"):
        assert not found[name].view(E, -1)[idle].any(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_in_16_bits(dtype: torch.dtype) -> None:
    values, chosen = make(True, True, dtype), choices("two idle")
    check(run(values, chosen, True), exact(values, chosen, True), TOLERANCE[dtype])


@pytest.mark.parametrize("biases", [False, True])
def test_levels_change_no_bit(biases: bool) -> None:
    values, chosen = make(True, biases, torch.float32), choices("two idle")
    first, *others = (run(values, chosen, True, level) for level in LEVELS)
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())


@pytest.mark.parametrize("kind", ["even", "two idle", "one hot"])
def test_parts_of_the_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each expert's rows by themselves are right, too, at each level to the bit; gradients that are
    not the first ones are added."""
    monkeypatch.setattr(module, "PART_ROWS", 1)
    values, chosen = make(True, True, torch.float32), choices(kind)
    first, *others = (run(values, chosen, True, level) for level in LEVELS)
    check(first, exact(values, chosen, True), TOLERANCE[torch.float32])
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())
    weight = empty_gradient(values["down"].clone())
    for _ in range(2):
        x, scores = (values[name].clone().requires_grad_() for name in ("x", "scores"))
        up = empty_gradient(values["up"].clone())
        dispatch = dispatched(x, chosen, E)
        maps = ExpertMap(up, None), ExpertMap(weight, None)
        experts(x, scores, dispatch, *maps, "silu", True).sum().backward()
    once = weight.main_grad.clone()
    weight.gradient_is_empty = True
    dispatch = dispatched(x, chosen, E)
    experts(x, scores, dispatch, *maps, "silu", True).sum().backward()
    torch.testing.assert_close(once, 2 * weight.main_grad)


def test_no_shape_of_an_experts_rows_reaches_onednn() -> None:
    """oneDNN would compile and keep code for each number of rows, which are new ones in each step;
    other products of these sizes go through it."""
    values, chosen = make(True, True, torch.float32), choices("two idle")
    with calls_of_onednn() as calls:
        check(run(values, chosen, True), exact(values, chosen, True), TOLERANCE[torch.float32])
        assert not calls
        product(values["x"], values["up"])
        assert len(calls) == 1


def test_grouped_products_are_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU multiplies at once, on a CPU: equal to rounding."""
    values, chosen = make(True, True, torch.float32, 16), choices("two idle")
    wanted = run(values, chosen, True)
    monkeypatch.setattr(module, "_can_group", lambda *_: True)
    check(run(values, chosen, True), {name: value.double() for name, value in wanted.items()}, 1e-6)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_adapters(biases: bool, grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of frozen experts, against W + c B A in float64; at each level to the bit."""
    rank = 8 if grouped else RANK
    values, chosen = make(True, biases, torch.float32, 16), choices("two idle")
    generator = torch.Generator().manual_seed(2)
    for name in ("up", "down"):
        rows, inputs = values[name].shape
        for end, shape in (("a", (E * rank, inputs)), ("b", (rows, rank))):
            values[f"{name}_{end}"] = torch.randn(shape, generator=generator).to(DEVICE)
    wanted = {name: value.double().requires_grad_() for name, value in values.items()}
    merged = dict(wanted)
    for name in ("up", "down"):
        a, b = (merged.pop(f"{name}_{end}").unflatten(0, (E, -1)) for end in "ab")
        merged[name] = merged[name] + FACTOR * (b @ a).flatten(0, 1)
    output = of_formula(merged, chosen)
    weight = torch.linspace(-1, 1, output.numel(), device=DEVICE).view_as(output)
    output.backward(weight.to(output))
    gradients = {name: cast(Tensor, leaf.grad) for name, leaf in wanted.items()}
    monkeypatch.setattr(module, "_can_group", lambda *_: grouped)
    monkeypatch.setattr(module, "PART_ROWS", 8)
    first, *others = (run(values, chosen, True, level) for level in LEVELS)
    check(first, gradients | {"output": output.detach()}, TOLERANCE[torch.float32])
    for other in others:
        assert all(torch.equal(other[name], value) for name, value in first.items())


def test_one_rank_adds_the_bias() -> None:
    """Ranks with parts of the channels add up: outputs, inputs' gradients and scores'."""
    values, chosen = make(False, True, torch.float32), choices("even")
    whole, parts = run(values, chosen, False), []
    for rank in range(2):
        half = slice(rank * F // 2, (rank + 1) * F // 2)
        own = values | {
            "up": values["up"].view(E, F, H)[:, half].reshape(-1, H),
            "up_bias": values["up_bias"].view(E, F)[:, half].flatten(),
            "down": values["down"][:, half].contiguous(),
        }
        parts.append(run(own, chosen, False, adds_bias=rank == 0))
    for name in ("output", "x", "scores"):
        torch.testing.assert_close(
            parts[0][name] + parts[1][name], whole[name], rtol=1e-5, atol=1e-5
        )
    for part in parts:
        torch.testing.assert_close(part["down_bias"], whole["down_bias"])


def test_rows_are_sorted_by_expert_then_token() -> None:
    """Each expert's rows are consecutive, whatever the order of execution."""
    rows = Rows(torch.tensor([[1, 2], [0, 2], [1, 2]]), 4)
    assert rows.experts.tolist() == [0, 1, 1, 2, 2, 2]
    assert rows.tokens.tolist() == [1, 0, 2, 0, 1, 2]
    assert [(span.start, span.stop) for span in rows.spans] == [(0, 1), (1, 3), (3, 6), (6, 6)]
    values = torch.arange(6.0)
    assert torch.equal(rows.by_choice(rows.of(values.view(3, 2)).squeeze(1)).flatten(), values)
