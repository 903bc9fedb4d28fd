"""The embedding and its gradient; the Triton kernel adds in one fixed order, over sorted
positions."""

from typing import cast

import pytest
import torch
from torch import Tensor

from megatron_lite.kernels.embedding import add_positions, embedding
from megatron_lite.parameter import Parameter
from tests.support.kernel_checks import DEVICE, compare, dtypes, empty_gradient, needs_triton, randn

V = 50
TOKENS = {
    "few of each": lambda t: torch.arange(t) * 7 % V,
    "one token": lambda t: torch.full((t,), 3),
    "runs and the ends": lambda t: torch.cat(
        [torch.zeros(t // 2), torch.full((t - t // 2,), V - 1)]
    ),
    "random": lambda t: torch.randint(V, (t,), generator=torch.Generator().manual_seed(t)),
}


@dtypes
def test_embedding_accumulate_repeated_tokens(dtype: torch.dtype) -> None:
    tokens = torch.tensor([[1, 1, 4], [0, 1, 6]])
    compare(lambda w: embedding(w, tokens), lambda w: w[tokens], [], [randn(7, 5)], dtype)
    compare(add_positions, lambda x, w: x + w[:3], [randn(2, 3, 5)], [randn(9, 5)], dtype)


def gradient(tokens: Tensor, grad: Tensor, grad_dtype: torch.dtype) -> Tensor:
    """Return the gradient of two accumulations into a buffer full of NaN, by the kernel."""
    weight = empty_gradient(
        torch.randn(V, grad.shape[-1], device=DEVICE).to(grad.dtype), grad_dtype
    )
    for _ in range(2):
        output = embedding(weight, tokens, triton=True)
        output.backward(grad)
    assert torch.equal(output, weight[tokens])
    return weight.main_grad


@needs_triton
@pytest.mark.parametrize(
    ("kind", "s", "h"),
    [
        ("few of each", 1, 1),
        ("few of each", 9, 20),
        ("one token", 9, 20),
        ("runs and the ends", 9, 20),
        ("random", 9, 20),
        ("runs and the ends", 4, 520),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_triton_gradient_is_the_formula(
    kind: str, s: int, h: int, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    """Compare with fp64: in fp32 buffers no summand is rounded."""
    tokens = TOKENS[kind](2 * s).view(2, s).long().to(DEVICE)
    grad = torch.randn(2, s, h, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    exact = torch.zeros(V, h, dtype=torch.float64, device=DEVICE)
    exact.index_add_(0, tokens.flatten(), grad.double().flatten(0, 1))
    result = gradient(tokens, grad, grad_dtype)
    tolerance = 1e-6 if grad_dtype == torch.float32 else 1e-2
    assert float((result.double() - 2 * exact).abs().max()) <= tolerance * float(
        2 * exact.abs().max()
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_same_bits_every_time() -> None:
    """With thousands of positions and few tokens, unordered atomic additions would change the last
    bits."""
    tokens = torch.randint(V, (4, 2048), device=DEVICE)
    grad = torch.randn(4, 2048, 768, device=DEVICE, dtype=torch.bfloat16)
    first, *others = (gradient(tokens, grad, torch.float32) for _ in range(5))
    assert all(torch.equal(first, other) for other in others)


@needs_triton
def test_a_gradient_that_is_not_contiguous() -> None:
    """The gradient of a sum is one element expanded."""
    tokens = torch.tensor([[1, 1, 4], [0, 1, 6]], device=DEVICE)
    weight = cast(Parameter, Parameter(torch.randn(V, 5, device=DEVICE)))
    weight.main_grad, weight.gradient_is_empty = torch.empty_like(weight), True
    embedding(weight, tokens, triton=True).sum().backward()
    assert (
        weight.main_grad[:7, 0].tolist() == [1, 3, 0, 0, 1, 0, 1] and not weight.main_grad[7:].any()
    )
