"""Every operation against its formula in float64 through autograd: outputs, input gradients, weight gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megatron_lite.kernels.dropout import dropout
from megatron_lite.kernels.embedding import add_positions, embedding
from megatron_lite.kernels.linear import linear
from tests.support.kernel_checks import compare, dtypes, randn


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


def test_dropout() -> None:
    x = torch.ones(100, 100, requires_grad=True)
    y = dropout(x, 0.25, seed=3)
    y.sum().backward()
    assert set(y.detach().unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))} and torch.equal(x.grad, y)
    assert abs(float((y == 0).float().mean()) - 0.25) < 0.02
    assert torch.equal(dropout(x, 0.25, seed=3), y) and not torch.equal(dropout(x, 0.25, seed=4), y)
    assert dropout(x, 0.25, None) is x and dropout(x, 0.0, 3) is x
