"""Every operation against its formula in float64 through autograd: outputs, input gradients, weight gradients."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import compare, dtypes, parameter, randn
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from megatron_lite.kernels.attention import attention
from megatron_lite.kernels.dropout import dropout
from megatron_lite.kernels.embedding import add_positions, embedding
from megatron_lite.kernels.linear import linear
from megatron_lite.kernels.rotary import rotary_table, split_heads


@dtypes
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (1, 1, 64, 33), (3, 17, 1, 1)])
def test_linear(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    b, s, i, o = shape
    compare(linear, functional.linear, [randn(b, s, i)], [randn(o, i), randn(o)], dtype)
    compare(linear, functional.linear, [randn(b, s, i)], [randn(o, i)], dtype)


@dtypes
def test_embedding_adds_up_repeated_tokens(dtype: torch.dtype) -> None:
    tokens = torch.tensor([[1, 1, 4], [0, 1, 6]])
    compare(lambda w: embedding(w, tokens), lambda w: w[tokens], [], [randn(7, 5)], dtype)
    compare(add_positions, lambda x, w: x + w[:3], [randn(2, 3, 5)], [randn(9, 5)], dtype)


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
