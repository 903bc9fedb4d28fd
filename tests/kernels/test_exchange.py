"""Exchanges of hidden states: each is the backward pass of the other, and a group of one has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.distributed.rank_group import alone
from megatron_lite.kernels.exchange import INSIDE, Exchange, Replicated, TokenSplit, exchange_over, split_seed
from megatron_lite.model.layer import dropout
from megatron_lite.parameter import Initializer, ParameterSpec, declare
from tests.support.thread_ranks import ThreadRank, on_threads

B, S, H = 2, 12, 5
RANKS = [2, 3, 4]
BIAS = declare(ParameterSpec("bias", (H,), Initializer("constant", 0.0)))


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def split_pass(ranks: ThreadRank) -> tuple[Tensor, ...]:
    """Return a residual stream, its gather, parts of a sum, and their reduction."""
    exchange = exchange_over(ranks.tensor, splits_tokens=True)
    residual = randn(ranks.rank, 1, B * S // ranks.world_size, H)
    parts = randn(10 + ranks.rank, B, S, H)
    return residual, exchange.gather(residual), parts, exchange.reduce(parts.clone())


@pytest.mark.parametrize("ranks", RANKS)
def test_gather_and_reduce_of_split_tokens_are_adjoint(ranks: int) -> None:
    """Over all ranks, <gather(x), y> = <x, reduce(y)>; a gather has the tokens in order, a reduction the sums."""
    found = on_threads(1, ranks, split_pass)
    tokens = torch.cat([residual for residual, *_ in found], dim=1)
    total = sum(parts for _, _, parts, _ in found).view(1, B * S, H)
    runs = total.split(B * S // ranks, dim=1)
    for (_, gathered, _, reduced), run in zip(found, runs, strict=True):
        assert torch.equal(gathered, tokens)
        torch.testing.assert_close(reduced, run)
    left = sum(float((gathered.view(B, S, H) * parts).sum()) for _, gathered, parts, _ in found)
    right = sum(float((residual * reduced).sum()) for residual, _, _, reduced in found)
    assert left == pytest.approx(right, rel=1e-12)


def replicated_pass(ranks: ThreadRank) -> tuple[Tensor, Tensor, bool]:
    exchange = exchange_over(ranks.tensor, splits_tokens=False)
    parts, residual = randn(ranks.rank, B, S, H), randn(7, B, S, H)
    return parts, exchange.reduce(parts.clone()), exchange.gather(residual) is residual


@pytest.mark.parametrize("ranks", RANKS)
def test_replicated_tokens_are_summed_to_the_same_bits(ranks: int) -> None:
    """A sum has the gradient of each part that the sum has: a gather that does nothing."""
    found = on_threads(1, ranks, replicated_pass)
    total = sum(parts for parts, _, _ in found)
    for _, reduced, is_same in found:
        torch.testing.assert_close(reduced, total)
        assert torch.equal(reduced, found[0][1]) and is_same


def others_of_split(ranks: ThreadRank) -> tuple[Any, ...]:
    exchange = exchange_over(ranks.tensor, splits_tokens=True)
    labels = torch.arange(B * S).view(B, S)
    loss = torch.tensor(float(ranks.rank + 1), dtype=torch.float64)
    return exchange.own(labels), exchange.total(loss), loss, exchange.bias(BIAS) is BIAS, exchange.seed(5)


@pytest.mark.parametrize("ranks", RANKS)
def test_runs_of_tokens_totals_biases_and_seeds(ranks: int) -> None:
    """Runs are those of the residual stream; one rank adds a bias; the loss itself is not changed."""
    found = on_threads(1, ranks, others_of_split)
    owns, totals, losses, adds, seeds = zip(*found, strict=True)
    assert torch.equal(torch.cat(owns, dim=1), torch.arange(B * S)[None])
    assert [float(total) for total in totals] == [ranks * (ranks + 1) / 2] * ranks
    assert [float(loss) for loss in losses] == list(range(1, ranks + 1))
    assert adds == (True, *[False] * (ranks - 1))
    assert len(set(seeds)) == ranks and seeds[0] == 5


def seeds_of(ranks: ThreadRank, seed: int | None) -> tuple[int | None, int | None, int | None]:
    tensor = ranks.tensor
    exchanges = (Replicated(tensor), TokenSplit(tensor))  # type: ignore[arg-type]
    return *(exchange.seed(seed) for exchange in exchanges), split_seed(seed, tensor.rank)  # type: ignore[return-value]


def test_dropout_masks_are_equal_where_values_are() -> None:
    """Masks of replicated tokens are those of one rank. Those of split tokens and heads differ, and agree in as many
    places as chance wants; without a seed there is none."""
    p, size = 0.3, 20_000
    found = on_threads(1, 4, seeds_of, 1234)
    assert [replicated for replicated, _, _ in found] == [1234] * 4
    for column in (1, 2):
        masks = [dropout(torch.ones(size), p, rank[column]) != 0 for rank in found]
        assert torch.equal(masks[0], dropout(torch.ones(size), p, 1234) != 0)
        for first in range(4):
            assert abs(float(masks[first].float().mean()) - (1 - p)) < 0.02
            for second in range(first):
                chance = p * p + (1 - p) * (1 - p)
                assert abs(float((masks[first] == masks[second]).float().mean()) - chance) < 0.02
    assert on_threads(1, 2, seeds_of, None) == [(None, None, None)] * 2


@pytest.mark.parametrize("splits_tokens", [False, True])
def test_a_group_of_one_exchanges_nothing(splits_tokens: bool) -> None:
    exchange: Exchange = exchange_over(alone(torch.device("cpu")), splits_tokens)
    values = randn(0, B, S, H)
    assert exchange is INSIDE and not exchange.splits_tokens
    for result in (exchange.gather(values), exchange.start_gather(values).wait(), exchange.reduce(values)):
        assert result is values
    assert exchange.own(values) is values and exchange.total(values) is values and exchange.bias(BIAS) is BIAS
    assert exchange.seed(3) == split_seed(3, 0) == 3
