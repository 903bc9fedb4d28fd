"""Every operation against its formula in float64 through autograd: outputs, input gradients, weight gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from megatron_lite.kernels.activation import FUNCTIONS, activate, activate_backward
from megatron_lite.kernels.attention import attention
from megatron_lite.kernels.dropout import dropout
from megatron_lite.kernels.embedding import add_positions, embedding
from megatron_lite.kernels.linear import linear
from megatron_lite.kernels.normalization import layer_norm, rms_norm
from megatron_lite.kernels.rotary import rotary_table, split_heads
from megatron_lite.parameter import Parameter

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}  # of the largest value, or of 0.1
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)


def parameter(values: Tensor, dtype: torch.dtype) -> Parameter:
    """A parameter whose gradient buffer already holds ones: gradients must be added, in fp32."""
    made = cast(Parameter, Parameter(values.to(dtype)))
    made.main_grad = torch.ones(values.shape, dtype=torch.float32)
    return made


def compare(
    ours: Callable[..., Tensor], formula: Callable[..., Tensor], inputs: list[Tensor], weights: list[Tensor],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """`ours` in dtype and `formula` in float64 on the same (rounded) values; two backwards add up."""
    inputs, weights = ([tensor.to(dtype) for tensor in tensors] for tensors in (inputs, weights))
    our_inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    our_weights = [parameter(tensor, dtype) for tensor in weights]
    exact_inputs, exact_weights = ([t.double().requires_grad_() for t in tensors] for tensors in (inputs, weights))
    exact = formula(*exact_inputs, *exact_weights)
    grad = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact.backward(grad.double())
    for _ in range(2):
        output = ours(*our_inputs, *our_weights)
        assert output.dtype == dtype and output.shape == exact.shape
        output.backward(grad)
    close(output, exact, dtype)
    for mine, reference in zip(our_inputs, exact_inputs, strict=True):
        close(mine.grad, 2 * reference.grad, dtype)
    for mine, reference in zip(our_weights, exact_weights, strict=True):
        assert mine.grad is None, "the gradient belongs in main_grad alone"
        close(mine.main_grad - 1, 2 * reference.grad, dtype)


def close(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    exact = exact.detach()
    largest = max(float(exact.abs().max()), 0.1)  # gradients that are exactly zero are met to rounding
    assert float((ours.detach().double() - exact).abs().max()) <= TOLERANCE[dtype] * largest


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@dtypes
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 1, 64, 33), (3, 17, 1, 1)])
def test_linear(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    b, s, i, o = shape
    compare(linear, functional.linear, [randn(b, s, i)], [randn(o, i), randn(o)], dtype)
    compare(linear, functional.linear, [randn(b, s, i)], [randn(o, i)], dtype)


@dtypes
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 7, 128), (4, 1, 33)])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    h = shape[-1]
    weights = [randn(h, seed=3), randn(h, seed=4)]
    compare(
        lambda x, w, b: layer_norm(x, w, b, 1e-5),
        lambda x, w, b: functional.layer_norm(x, (h,), w, b, 1e-5), [randn(*shape)], weights, dtype,
    )  # fmt: skip
    compare(
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w, [randn(*shape)], weights[:1], dtype,
    )  # fmt: skip


def test_norm_weights_of_zero_keep_their_gradient() -> None:
    """A weight of exactly zero must still learn (an implementation that divides the output by it would not)."""
    compare(
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w,
        [randn(4, 6)], [torch.zeros(6)], torch.float32,
    )  # fmt: skip


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "gelu_exact": lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)),
    "silu": lambda x: x * torch.sigmoid(x),
    "relu": lambda x: x.clamp(min=0),
    "squared_relu": lambda x: x.clamp(min=0) ** 2,
    "identity": lambda x: x * 1,
}


@dtypes
@pytest.mark.parametrize("name", FUNCTIONS)
def test_activations(name: str, dtype: torch.dtype) -> None:
    formula = FORMULAS[name]
    gated_formula = lambda x: formula(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]  # noqa: E731
    for gated, exact, width in ((False, formula, 7), (True, gated_formula, 14)):
        x, grad = randn(2, 5, width).to(dtype), randn(2, 5, 7, seed=1).to(dtype)
        exact_x = x.double().requires_grad_()
        output = exact(exact_x)
        output.backward(grad.double())
        ours = activate(x, name, gated)
        assert ours.dtype == dtype and ours.data_ptr() != x.data_ptr(), "the MLP keeps input and output apart"
        close(ours, output, dtype)
        close(activate_backward(grad, x.clone(), name, gated), exact_x.grad, dtype)


@dtypes
def test_embedding_adds_up_repeated_tokens(dtype: torch.dtype) -> None:
    tokens = torch.tensor([[1, 1, 4], [0, 1, 6]])
    compare(lambda w: embedding(w, tokens), lambda w: w[tokens], [], [randn(7, 5)], dtype)
    compare(add_positions, lambda x, w: x + w[:3], [randn(2, 3, 5)], [randn(9, 5)], dtype)


@dtypes
@pytest.mark.parametrize(("n", "g", "d"), [(4, 4, 6), (6, 2, 8), (3, 1, 2)])
def test_split_heads_rotates_queries_and_keys(n: int, g: int, d: int, dtype: torch.dtype) -> None:
    """Against complex multiplication; backward puts the three gradients side by side again."""
    b, s = 2, 5
    angles = torch.arange(s)[:, None] * 100.0 ** (-torch.arange(0, d, 2) / d)

    def formula(x: Tensor) -> Tensor:
        heads = x.view(b, s, n + 2 * g, d)
        turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)[:, None]
        turned = torch.complex(heads[:, :, : n + g, : d // 2], heads[:, :, : n + g, d // 2 :]) * turn
        return torch.cat([torch.cat([turned.real, turned.imag], -1), heads[:, :, n + g :]], 2).flatten(2)

    def ours(x: Tensor) -> Tensor:
        parts = split_heads(x * 1, n, g, rotary_table(9, d, 100.0, x.device))
        assert [part.shape[1] for part in parts] == [n, g, g]
        return torch.cat(parts, dim=1).transpose(1, 2).flatten(2)

    compare(ours, formula, [randn(b, s, (n + 2 * g) * d)], [], dtype)
    unrotated = split_heads(randn(b, s, (n + 2 * g) * d), n, g, None)
    assert torch.equal(torch.cat(unrotated, 1).transpose(1, 2).flatten(2), randn(b, s, (n + 2 * g) * d))


@pytest.mark.parametrize("rotary", [True, False])
def test_attention_keeps_one_copy_of_query_key_and_value(rotary: bool) -> None:
    """What the backward keeps of (n + 2 g) d values per token is one memory: no projection beside rotated heads."""
    b, s, n, d = 2, 7, 4, 8
    kept: list[Tensor] = []
    weight = parameter(randn(3 * n * d, 5), torch.float32)
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        table = rotary_table(s, d, 100.0, torch.device("cpu")) if rotary else None
        query, key, value = split_heads(linear(randn(b, s, 5), weight), n, n, table)
        output = attention(query, key, value, None, 0.0, None)
    memories = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    projection, context, rows = b * s * 3 * n * d, b * s * n * d, b * s * n
    assert query.untyped_storage().data_ptr() in memories
    assert sum(memories.values()) == 4 * (b * s * 5 + projection + context + rows)
    output.sum().backward()
    assert torch.isfinite(weight.main_grad).all()


@dtypes
@pytest.mark.parametrize("window", [None, 1, 3, 150, 1000])
@pytest.mark.parametrize(("n", "g", "s"), [(4, 4, 9), (6, 2, 5), (2, 1, 300)])
def test_attention(n: int, g: int, s: int, window: int | None, dtype: torch.dtype) -> None:
    """Against the softmax written out; windows shorter, equal and longer than the sequence, over block borders."""
    d = 8

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(n // g, 1), v.repeat_interleave(n // g, 1)
        distance = torch.arange(s)[:, None] - torch.arange(s)
        allowed = (distance >= 0) & (distance < (window or s))
        return (q @ k.transpose(-1, -2) / d**0.5).masked_fill(~allowed, float("-inf")).softmax(-1) @ v

    inputs = [randn(1, n, s, d), randn(1, g, s, d, seed=1), randn(1, g, s, d, seed=2)]
    compare(lambda q, k, v: attention(q, k, v, window, 0.0, None), formula, inputs, [], dtype)


def test_attention_dropout_drops_probabilities() -> None:
    """With p -> 0 it equals attention without; the same seed gives the same result, another seed another."""
    q, k, v = randn(1, 4, 9, 8), randn(1, 2, 9, 8), randn(1, 2, 9, 8, seed=1)
    exact = attention(q, k, v, 4, 0.0, None)
    torch.testing.assert_close(attention(q, k, v, 4, 1e-9, 1), exact)
    assert torch.equal(attention(q, k, v, 4, 0.5, 1), attention(q, k, v, 4, 0.5, 1))
    assert not torch.equal(attention(q, k, v, 4, 0.5, 1), attention(q, k, v, 4, 0.5, 2))
    assert torch.equal(attention(q, k, v, 4, 0.5, None), exact), "evaluation drops nothing"


def test_dropout() -> None:
    x = torch.ones(100, 100, requires_grad=True)
    y = dropout(x, 0.25, seed=3)
    y.sum().backward()
    assert set(y.detach().unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))} and torch.equal(x.grad, y)
    assert abs(float((y == 0).float().mean()) - 0.25) < 0.02
    assert torch.equal(dropout(x, 0.25, seed=3), y) and not torch.equal(dropout(x, 0.25, seed=4), y)
    assert dropout(x, 0.25, None) is x and dropout(x, 0.0, 3) is x
