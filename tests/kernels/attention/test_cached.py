"""Attention of one new token to all keys so far: against the explicit softmax and against training's attention."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.kernels.attention.attention import attention, cached_attention
from tests.support.kernel_checks import close, dtypes, randn


@dtypes
@pytest.mark.parametrize(
    ("n", "g", "k", "scale"), [(4, 2, 9, None), (6, 6, 1, None), (4, 1, 200, 0.1), (9, 3, 70, None)]
)
def test_cached_attention_equals_the_formula(n: int, g: int, k: int, scale: float | None, dtype: torch.dtype) -> None:
    """Grouped heads, one and many keys, another scale."""
    query, key, value = (randn(3, heads, length, 8).to(dtype) for heads, length in ((n, 1), (g, k), (g, k)))
    output = cached_attention(query, key, value, scale)
    keys, values = (heads.double().repeat_interleave(n // g, 1) for heads in (key, value))
    exact = (query.double() @ keys.transpose(2, 3) * (scale or 8**-0.5)).softmax(-1) @ values
    assert output.dtype == dtype and output.shape == exact.shape
    close(output, exact, dtype)


@pytest.mark.parametrize("window", [None, 3])
def test_token_by_token_equals_all_at_once(window: int | None) -> None:
    """Training's attention over 20 tokens equals attention token by token over the keys that each may look at."""
    query, key, value = (randn(2, heads, 20, 8, seed=heads) for heads in (4, 2, 2))
    whole = attention(query, key, value, window, 0.0, None, backend="math", scale=0.2)
    for i in range(20):
        seen = slice(max(0, i + 1 - (window or 20)), i + 1)
        one = cached_attention(query[:, :, i : i + 1], key[:, :, seen], value[:, :, seen], 0.2)
        close(one, whole[:, :, i : i + 1], torch.float32)
