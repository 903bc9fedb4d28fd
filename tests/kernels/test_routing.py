"""Routing against transformers' formulas and float64."""

import math

import pytest
import torch
from torch import Tensor

from megatron_lite.kernels.routing import (
    Choice,
    Losses,
    Sums,
    best,
    router_logits,
    sinkhorn,
    summarized,
    with_losses,
)
from tests.support.kernel_checks import empty_gradient

T, H, E, K = 40, 6, 8, 3


def random_logits(seed: int = 0) -> Tensor:
    return torch.randn(T, E, generator=torch.Generator().manual_seed(seed))


def test_ties_go_to_the_lowest_index() -> None:
    """torch.topk, which transformers uses, takes neither the lowest nor the highest."""
    equal = torch.zeros(3, 8)
    assert best(equal, 2).tolist() == [[0, 1]] * 3
    assert equal.topk(2).indices[0].tolist() == [6, 5]
    assert best(torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0]]), 3).tolist() == [[1, 3, 4]]


def test_softmax_over_the_chosen_logits_is_normalization() -> None:
    """As granite and gpt-oss choose and score."""
    logits, choice = random_logits(), Choice(K)
    p = choice.probabilities(logits)
    chosen = choice.experts(p)
    values, indices = logits.topk(K)
    assert torch.equal(chosen, indices)
    torch.testing.assert_close(choice.scores(p, chosen), values.softmax(1))
    assert torch.equal(Choice(K, normalized=False).scores(p, chosen), p.gather(1, chosen))


@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (4, 2)])
def test_deepseek_router(groups: tuple[int, int]) -> None:
    """Sigmoid, groups, a bias for the choice alone, and the factor after normalization: the formula
    of glm4_moe."""
    logits, bias = random_logits(), torch.linspace(-0.5, 0.5, E)
    count, kept = groups
    choice = Choice(2, "sigmoid", True, 2.5, count, kept)
    s = logits.sigmoid()
    b = s + bias
    if count > 1:
        group = b.view(T, count, E // count).topk(2, -1).values.sum(-1)
        keep = torch.zeros(T, count, dtype=torch.bool)
        keep = keep.scatter_(1, group.topk(kept).indices, True).repeat_interleave(E // count, 1)
        b = b.masked_fill(~keep, -math.inf)
    i = b.topk(2).indices
    w = s.gather(1, i)
    w = w / (w.sum(-1, keepdim=True) + 1e-20) * 2.5
    p = choice.probabilities(logits)
    chosen = choice.experts(p + bias)
    assert torch.equal(chosen, i) and torch.equal(choice.scores(p, chosen), w)


def test_sinkhorn_is_the_plain_algorithm() -> None:
    """Rows and columns scaled in turn, in float64; the load becomes even, as far as choices can."""
    logits = random_logits() + torch.linspace(0, 3, E)  # skewed
    scaled = logits.double().exp()
    for _ in range(30):
        scaled /= scaled.sum(1, keepdim=True)
        scaled /= scaled.sum(0, keepdim=True)
    torch.testing.assert_close(sinkhorn(logits).double().exp(), scaled, rtol=1e-4, atol=1e-7)
    assert torch.equal(best(sinkhorn(logits), 1), best(scaled, 1))
    loads = [best(values, 1).flatten().bincount(minlength=E).max() for values in (logits, scaled)]
    assert loads[1] < loads[0] / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_are_fp32(dtype: torch.dtype) -> None:
    """The product of 16-bit factors is computed in fp32, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, H, generator=generator).to(dtype).requires_grad_()
    weight = empty_gradient(torch.randn(E, H, generator=generator).to(dtype))
    bias = empty_gradient(torch.randn(E, generator=generator).to(dtype))
    logits = router_logits(x, weight, bias)
    leaves = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    wanted = torch.nn.functional.linear(*leaves)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), wanted, rtol=1e-5, atol=1e-5)
    for result in (logits, wanted):
        result.square().sum().backward()
    for found, leaf in zip((x.grad, weight.main_grad, bias.main_grad), leaves, strict=True):
        rounding = 1e-2 if found is x.grad and dtype == torch.bfloat16 else 1e-5
        assert found is not None and leaf.grad is not None
        torch.testing.assert_close(found.double(), leaf.grad, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses(score: str) -> None:
    """Gradients and sums of both losses equal autograd's in float64; padding has no part."""
    logits = random_logits().requires_grad_()
    choice, real, coefficients = Choice(K, score), T - 7, (0.3, 0.05)
    p = choice.probabilities(logits)
    shares = p / p.sum(1, keepdim=True)
    chosen = choice.experts(p.detach()).sort(1)[0]
    sums = torch.zeros(2 * E + 3, dtype=torch.float64)
    loads = torch.rand(E)
    losses = Losses(real, torch.tensor(0.5), *coefficients, lambda _: loads, Sums(sums))
    scores = with_losses(choice.scores(p, chosen), logits, shares, chosen, losses)
    scores.sum().backward(torch.tensor(0.0))
    exact = logits.detach().double().requires_grad_()
    q = choice.probabilities(exact)
    q = (q / q.sum(1, keepdim=True))[:real]
    z = exact[:real].logsumexp(1).square().sum()
    (0.5 * (0.3 * E * (loads * q).sum() + 0.05 * z)).backward()
    assert logits.grad is not None and exact.grad is not None
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-7)
    counts = chosen[:real].flatten().bincount(minlength=E)
    q = q.detach()
    entropy = torch.distributions.Categorical(q).entropy().sum()
    others = torch.stack([z.detach(), entropy, torch.tensor(real)])
    wanted = torch.cat([counts, q.sum(0), others])
    torch.testing.assert_close(sums, wanted.double())
    assert torch.equal(sums[:E], counts.double())
    load, mean_entropy, dead = summarized(sums[None])[0].tolist()
    assert load == pytest.approx(float(counts.max()) * E / (K * real)) and dead == int(
        (counts == 0).sum()
    )
    assert mean_entropy == pytest.approx(float(entropy) / real)
