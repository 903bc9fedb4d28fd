"""Attention of the newest tokens to all keys so far: against the softmax in float64, and against training's."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import close, dtypes, randn
from torch import Tensor

from megatron_lite.kernels.attention import attention
from megatron_lite.kernels.attention_cached import cached_attention


def formula(q: Tensor, k: Tensor, v: Tensor, window: int | None, first: Tensor | None, scale: float | None) -> Tensor:
    """One query after the other, over the keys that it may look at and no others."""
    repeats, offset, scale = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2], scale or q.shape[3] ** -0.5
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    output = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for i in range(q.shape[2]):
            low = max(0 if window is None else offset + i - window + 1, 0 if first is None else int(first[b]))
            keys = slice(min(low, offset + i), offset + i + 1)
            scores = torch.einsum("nd,nkd->nk", q[b, :, i], k[b, :, keys]) * scale
            output[b, :, i] = torch.einsum("nk,nkd->nd", scores.softmax(-1), v[b, :, keys])
    return output


@dtypes
@pytest.mark.parametrize(
    ("n", "g", "s", "k", "window", "padded", "scale"),
    [
        (4, 2, 1, 9, None, False, None),
        (6, 6, 1, 1, None, False, None),
        (4, 1, 130, 200, None, False, 0.1),
        (3, 1, 70, 70, None, True, None),
        (4, 2, 5, 90, 7, True, None),
        (4, 2, 100, 100, 65, False, None),
        (2, 1, 1, 150, 1, False, None),
    ],
)
def test_cached_attention_equals_the_formula(
    n: int, g: int, s: int, k: int, window: int | None, padded: bool, scale: float | None, dtype: torch.dtype
) -> None:
    """Grouped heads, windows, padding on the left that is longer than the cache in part, blocks of queries."""
    query, key, value = (randn(3, heads, length, 8).to(dtype) for heads, length in ((n, s), (g, k), (g, k + 0)))
    first = torch.tensor([0, k // 2, k - 1]) if padded else None
    output = cached_attention(query, key, value, window, first, scale)
    exact = formula(query.double(), key.double(), value.double(), window, first, scale)
    assert output.dtype == dtype and output.shape == exact.shape
    close(output, exact, dtype)


@pytest.mark.parametrize("window", [None, 3])
def test_token_by_token_is_as_all_at_once(window: int | None) -> None:
    """Training's attention over 20 tokens, and the same tokens one by one and in two parts."""
    query, key, value = (randn(2, heads, 20, 8, seed=heads) for heads in (4, 2, 2))
    whole = attention(query, key, value, window, 0.0, None, backend="math", scale=0.2)
    steps = [slice(i, i + 1) for i in range(20)]
    for parts in (steps, [slice(0, 13), slice(13, 20)]):
        pieces = [
            cached_attention(query[:, :, part], key[:, :, : part.stop], value[:, :, : part.stop], window, scale=0.2)
            for part in parts
        ]
        close(torch.cat(pieces, 2), whole, torch.float32)


def test_nothing_of_the_padding_shows() -> None:
    """Whatever finite numbers stand left of its first token, the outputs of a sample are those without it."""
    query, key, value = (randn(1, heads, 6, 8, seed=heads) for heads in (2, 1, 1))
    plain = cached_attention(query[:, :, 2:], key[:, :, 2:], value[:, :, 2:])
    key[:, :, :2] = 1e6
    padded = cached_attention(query, key, value, first=torch.tensor([2]))
    assert torch.isfinite(padded).all()
    torch.testing.assert_close(padded[:, :, 2:], plain)
