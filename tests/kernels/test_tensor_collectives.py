"""Collectives of hidden states: each is the backward pass of the other, products begin early, one
rank needs none."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.distributed.rank_group import alone
from megatron_lite.distributed.traffic import FirstWait, Handle
from megatron_lite.kernels import linear
from megatron_lite.kernels import tensor_collectives as module
from megatron_lite.kernels.linear import complete
from megatron_lite.kernels.products import affine, product
from megatron_lite.kernels.tensor_collectives import (
    ONE_RANK,
    Collectives,
    Replicated,
    SequenceParallel,
    collectives_over,
    split_seed,
)
from megatron_lite.model.layer import dropout
from tests.support.engine_runs import LateGroup
from tests.support.thread_ranks import ThreadRank, on_threads

B = 2
S = 12
H = 5
RANKS = [2, 3, 4]
TOKENS, SLOW_RANKS = 3, 4  # tokens of each rank


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def split_pass(ranks: ThreadRank) -> tuple[Tensor, ...]:
    """Return a residual stream, its gather, parts of a sum, and their reduction."""
    collectives = collectives_over(ranks.tensor, splits_tokens=True)
    residual = randn(ranks.rank, 1, B * S // ranks.world_size, H)
    parts = randn(10 + ranks.rank, B, S, H)
    return (
        residual,
        complete(collectives.start_gather(residual)),
        parts,
        complete(collectives.start_reduce(parts.clone())),
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_gather_and_reduce_of_split_tokens_are_adjoint(ranks: int) -> None:
    """Over all ranks, <gather(x), y> = <x, reduce(y)>; a gather has the tokens in order, a
    reduction the sums."""
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
    collectives = collectives_over(ranks.tensor, splits_tokens=False)
    parts, residual = randn(ranks.rank, B, S, H), randn(7, B, S, H)
    return (
        parts,
        complete(collectives.start_reduce(parts.clone())),
        collectives.start_gather(residual) is residual,
    )


@pytest.mark.parametrize("ranks", RANKS)
def test_replicated_tokens_are_summed_to_the_same_bits(ranks: int) -> None:
    """A sum has the gradient of each part that the sum has: a gather that does nothing."""
    found = on_threads(1, ranks, replicated_pass)
    total = sum(parts for parts, _, _ in found)
    for _, reduced, is_same in found:
        torch.testing.assert_close(reduced, total)
        assert torch.equal(reduced, found[0][1]) and is_same


def others_of_split(ranks: ThreadRank) -> tuple[Any, ...]:
    collectives = collectives_over(ranks.tensor, splits_tokens=True)
    labels = torch.arange(B * S).view(B, S)
    loss = torch.tensor(float(ranks.rank + 1), dtype=torch.float64)
    return collectives.own(labels), collectives.total(loss), loss, collectives.seed(5)


@pytest.mark.parametrize("ranks", RANKS)
def test_runs_of_tokens_totals_and_seeds(ranks: int) -> None:
    """Runs are those of the residual stream; the loss itself is not changed."""
    found = on_threads(1, ranks, others_of_split)
    owns, totals, losses, seeds = zip(*found, strict=True)
    assert torch.equal(torch.cat(owns, dim=1), torch.arange(B * S)[None])
    assert [float(total) for total in totals] == [ranks * (ranks + 1) / 2] * ranks
    assert [float(loss) for loss in losses] == list(range(1, ranks + 1))
    assert len(set(seeds)) == ranks and seeds[0] == 5


def seeds_of(ranks: ThreadRank, seed: int | None) -> tuple[int | None, int | None, int | None]:
    tensor = ranks.tensor
    both = (Replicated(tensor), SequenceParallel(tensor))  # type: ignore[arg-type]
    return *(collectives.seed(seed) for collectives in both), split_seed(seed, tensor.rank)  # type: ignore[return-value]


def test_dropout_masks_are_equal_where_values_are() -> None:
    """Masks of replicated tokens are those of one rank. Those of split tokens and heads differ, and
    agree in as many places as chance wants; without a seed there is none."""
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


class SlowGroup:
    """A rank whose gathers bring the others' tokens when it waits; until then their places hold
    NaN."""

    world_size = SLOW_RANKS

    def __init__(self, rank: int, everything: Tensor, events: list[str]) -> None:
        self.rank = rank
        self._everything = everything
        self._events = events

    def all_gather(self, buffer: Tensor, kind: str) -> SlowGroup:
        self._buffer, slices = buffer, buffer.view(SLOW_RANKS, -1)
        for other in range(SLOW_RANKS):
            if other != self.rank:
                slices[other] = float("nan")
        return self

    def wait(self) -> None:
        self._events.append("wait")
        self._buffer.view(SLOW_RANKS, -1).copy_(self._everything.view(SLOW_RANKS, -1))


@pytest.mark.parametrize("rank", range(SLOW_RANKS))
@pytest.mark.parametrize("biased", [False, True])
def test_own_tokens_come_first(rank: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One product before the only wait, and all rows are those of the whole product."""
    generator = torch.Generator().manual_seed(rank)
    x, weight = (torch.randn(rows, 8, generator=generator) for rows in (SLOW_RANKS * TOKENS, 5))
    bias = torch.randn(5, generator=generator) if biased else None
    events: list[str] = []
    for name in ("affine", "product"):
        original = getattr(linear, name)
        monkeypatch.setattr(
            linear, name, lambda *given, run=original: (events.append("multiply"), run(*given))[1]
        )
    collectives = collectives_over(SlowGroup(rank, x, events), splits_tokens=True)  # type: ignore[arg-type]
    own = x[rank * TOKENS : (rank + 1) * TOKENS]

    found = linear.multiply(collectives.start_gather(own.unsqueeze(0)), weight, bias)
    assert found.shape == (1, SLOW_RANKS * TOKENS, 5)
    torch.testing.assert_close(found[0], affine(x, weight, bias), rtol=1e-5, atol=1e-6)
    assert events[:2] == ["multiply", "wait"] and events.count("wait") == 1
    assert events.count("multiply") == (2 if rank in (0, SLOW_RANKS - 1) else 3)

    events.clear()
    gathering = collectives.start_gather(own)
    torch.testing.assert_close(
        linear.multiply_back(gathering, weight.t()), product(x, weight), rtol=1e-5, atol=1e-6
    )
    assert (
        torch.equal(complete(gathering), x)
        and events[:2] == ["multiply", "wait"]
        and events.count("wait") == 1
    )


# -- products that are reduced in two halves
# --------------------------------------------------------------------------


class Seen(threading.local):
    """What a rank does: "multiply", "wait", and the bytes of the collectives that it starts."""

    def __init__(self) -> None:
        self.events: list[str | int] = []


class Watched(LateGroup):
    """Late reductions: until somebody waits, every rank has its own summands."""

    def __init__(self, inner: Any, seen: Seen) -> None:
        super().__init__(inner)
        self._seen = seen

    def reduce_scatter(self, buffer: Tensor, kind: str = "reduce") -> Any:
        return self._watched(buffer, super().reduce_scatter(buffer, kind))

    def all_reduce(self, buffer: Tensor, kind: str) -> Any:
        return self._watched(buffer, super().all_reduce(buffer, kind))

    def _watched(self, buffer: Tensor, late: Handle) -> Handle:
        self._seen.events.append(buffer.nbytes)
        return FirstWait(late, lambda: (self._seen.events.append("wait"), late.wait())[1])


def reduced_product(
    ranks: ThreadRank,
    seen: Seen,
    splits_tokens: bool,
    tokens: int,
    dtype: torch.dtype,
    biased: bool,
) -> tuple[Any, ...]:
    """Return a rank's product, its part of the sums, and what it has done."""
    group, generator = Watched(ranks.tensor, seen), torch.Generator().manual_seed(ranks.rank)
    collectives = collectives_over(group, splits_tokens, in_halves=True)  # type: ignore[arg-type]
    x, weight = (
        torch.randint(-2, 3, shape, generator=generator).to(dtype)
        for shape in ((1, tokens, 8), (H, 8))
    )
    bias = torch.arange(H).to(dtype) if biased else None
    reduced = collectives.reduced_product(linear.multiply, x, weight, bias)
    return affine(x, weight, bias if ranks.rank == 0 else None), reduced, seen.events


@pytest.mark.parametrize("splits_tokens", [False, True])
@pytest.mark.parametrize(("ranks", "tokens"), [(2, 2), (2, 18), (3, 21), (4, 36)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_halves_are_summed_while_the_others_are_multiplied(
    ranks: int,
    tokens: int,
    splits_tokens: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sums of integers are exact; twice as many collectives send as many bytes; one rank adds the
    bias."""
    seen = Seen()
    for place in (module, linear):
        monkeypatch.setattr(
            place, "affine", lambda *given: (seen.events.append("multiply"), affine(*given))[1]
        )
    for fewest, halves in ((tokens, 2), (tokens + 1, 1)):
        monkeypatch.setattr(module, "FEWEST_TOKENS", fewest)
        for biased in (False, True):
            found = on_threads(
                1, ranks, reduced_product, seen, splits_tokens, tokens, dtype, biased
            )
            total = torch.stack([product for product, *_ in found]).sum(dim=0)
            parts = total.chunk(ranks, dim=1) if splits_tokens else [total] * ranks
            for (_, reduced, events), part in zip(found, parts, strict=True):
                assert torch.equal(reduced, part)
                sizes = [event for event in events if isinstance(event, int)]
                assert len(sizes) == halves and sum(sizes) == total.nbytes
                assert events == [
                    *(event for size in sizes for event in ("multiply", size)),
                    *["wait"] * halves,
                ]


@pytest.mark.parametrize("splits_tokens", [False, True])
def test_a_group_of_one_does_not_communicate(splits_tokens: bool) -> None:
    collectives: Collectives = collectives_over(alone(torch.device("cpu")), splits_tokens)
    values = randn(0, B, S, H)
    assert collectives is ONE_RANK
    assert collectives.start_gather(values) is collectives.start_reduce(values) is values
    assert collectives.own(values) is values and collectives.total(values) is values
    assert collectives.seed(3) == split_seed(3, 0) == 3
    weight, bias = randn(1, 4, H), randn(2, 4)
    assert torch.equal(
        collectives.reduced_product(linear.multiply, values, weight, bias),
        affine(values, weight, bias),
    )
