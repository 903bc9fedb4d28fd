"""Rows of the vocabulary on several ranks: look-ups, labels, and sums that extreme logits do not
spoil."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_lite.kernels.cross_entropy import linear_cross_entropy
from megatron_lite.kernels.embedding import embedding
from megatron_lite.kernels.tensor_collectives import (
    SplitVocabulary,
    Vocabulary,
    collectives_over,
    vocabulary_over,
)
from megatron_lite.parameter import Parameter
from tests.support.thread_ranks import ThreadRank, on_threads

INF = float("inf")
# (ranks, vocabulary, rows of each rank)
SIZES = [(2, 10, 5), (2, 9, 5), (3, 61, 24), (4, 61, 16), (4, 13, 4), (2, 17, 16)]


def vocabulary_of(
    ranks: ThreadRank, size: int, rows: int, splits_tokens: bool = False
) -> Vocabulary:
    return vocabulary_over(ranks.tensor, collectives_over(ranks.tensor, splits_tokens), size, rows)


def local(whole: Tensor, rank: int, rows: int) -> Tensor:
    return whole[rank * rows : (rank + 1) * rows].clone()


def rows_and_labels(ranks: ThreadRank, size: int, rows: int) -> tuple[Any, ...]:
    vocabulary = vocabulary_of(ranks, size, rows)
    tokens = torch.arange(size).view(1, -1)
    found, absent = vocabulary.rows(tokens)
    return (
        found,
        absent,
        vocabulary.labels(torch.cat([tokens, torch.full_like(tokens, -1)])),
        vocabulary.is_split,
    )


@pytest.mark.parametrize(("ranks", "size", "rows"), SIZES)
def test_each_token_is_on_one_rank(ranks: int, size: int, rows: int) -> None:
    """Rows stay inside the table without its padding; labels of others are beyond it, masked ones
    below zero."""
    found = on_threads(1, ranks, rows_and_labels, size, rows)
    present = torch.stack([~absent for _, absent, _, _ in found])
    assert bool((present.sum(dim=0) == 1).all())
    for rank, (looked_up, absent, labels, is_split) in enumerate(found):
        held = min(rows, size - rank * rows)
        assert is_split and int(looked_up.min()) >= 0 and int(looked_up.max()) < held
        assert torch.equal((looked_up + rank * rows)[~absent], torch.arange(size)[~absent[0]])
        inside, masked = labels[:size], labels[size:]
        assert torch.equal(inside[~absent[0]], looked_up[~absent]) and bool(
            (inside[absent[0]] >= held).all()
        )
        assert bool((masked < 0).all())


def test_a_group_of_one_has_the_whole_vocabulary() -> None:
    (found,) = on_threads(1, 1, lambda ranks: vocabulary_of(ranks, 10, 12))
    assert type(found) is Vocabulary


# Sums over the entries of each of two ranks -> over all, and logits of the label (0 where another
# rank has it).
JOINS: dict[str, tuple[list[float], float]] = {
    "equal": ([1.0, 1.0], 1.0 + 0.6931471805599453),
    "one has next to nothing": ([3.0, -3.0e38], 3.0),
    "one has nothing": ([-INF, 2.0], 2.0),
    "huge": ([3.0e38, 3.0e38], 3.0e38),
    "huge and small": ([3.0e38, -3.0e38], 3.0e38),
    "overflow stays": ([INF, 0.0], INF),
    "small": ([-3.0e38, -3.0e38], -3.0e38),
    "close": ([0.0, -16.0], 1.1253516838e-07),
}


def join(ranks: ThreadRank, order: int) -> tuple[Tensor, Tensor]:
    values = [parts[::order][ranks.rank] for parts, _ in JOINS.values()]
    lse = torch.tensor([*values, float("nan") if ranks.rank else 0.0])
    at_label = torch.arange(len(lse), dtype=torch.float32) * (ranks.rank == 1)
    SplitVocabulary(collectives_over(ranks.tensor, False), ranks.tensor, 10, 5).join(lse, at_label)  # type: ignore[arg-type]
    return lse, at_label


@pytest.mark.parametrize("order", [1, -1])
def test_sums_are_joined_whatever_their_size(order: int) -> None:
    """To the bit on all ranks; not-a-number stays."""
    (lse, at_label), other = on_threads(1, 2, join, order)
    assert torch.equal(lse[:-1], other[0][:-1]) and torch.equal(at_label, other[1])
    torch.testing.assert_close(
        lse[:-1], torch.tensor([total for _, total in JOINS.values()]), rtol=1e-6, atol=1e-7
    )
    assert bool(lse[-1].isnan()) and torch.equal(
        at_label, torch.arange(len(lse), dtype=torch.float32)
    )


# -- embedding and head
# -----------------------------------------------------------------------------------------------


def parameter(values: Tensor) -> Parameter:
    """Return a parameter whose gradient buffer holds garbage."""
    made = cast(Parameter, Parameter(values))
    made.main_grad, made.gradient_is_empty = torch.full_like(values, float("nan")), True
    return made


def look_up(
    ranks: ThreadRank, weight: Tensor, tokens: Tensor, dy: Tensor, rows: int, split: bool
) -> tuple[Tensor, ...]:
    vocabulary = vocabulary_of(ranks, len(weight), rows, split)
    table = parameter(local(weight, ranks.rank, rows))
    hidden = embedding(table, tokens, vocabulary=vocabulary)
    own = collectives_over(ranks.tensor, split).own(dy) if split else dy
    hidden.backward(own.view_as(hidden))
    return hidden.detach(), table.main_grad


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("ranks", "size", "rows"), SIZES)
def test_embeddings_and_their_gradients_are_those_of_one_table(
    ranks: int, size: int, rows: int, split: bool
) -> None:
    """To the bit: each token is on one rank only, and its gradients are added in the order of the
    tokens."""
    generator = torch.Generator().manual_seed(size)
    weight = torch.randn(size, 6, generator=generator)
    tokens = torch.randint(size, (4, 12), generator=generator)
    dy = torch.randn(4, 12, 6, generator=generator)
    found = on_threads(1, ranks, look_up, weight, tokens, dy, rows, split)
    expected = weight[tokens]
    dweight = torch.zeros_like(weight).index_add_(0, tokens.flatten(), dy.flatten(0, 1))
    for rank, (hidden, gradient) in enumerate(found):
        whole = expected.view(ranks, 1, -1, 6)[rank] if split else expected
        assert torch.equal(hidden, whole) and torch.equal(gradient, local(dweight, rank, rows))


def head(
    ranks: ThreadRank,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: int,
    options: dict[str, Any],
) -> tuple[Tensor, ...]:
    table, x = parameter(local(weight, ranks.rank, rows)), hidden.clone().requires_grad_()
    vocabulary = vocabulary_of(ranks, len(weight), rows)
    scale = torch.tensor(0.25)
    loss = linear_cross_entropy(
        x, table, labels, scale, vocabulary=vocabulary, **{"chunk_tokens": 5, **options}
    )
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad, table.main_grad


EXTREMES: dict[str, tuple[float, dict[str, Any]]] = {  # size of the logits
    "usual": (1.0, {}),
    "blocks": (1.0, {"block_size": 3, "z_loss": 0.1}),
    "soft cap": (5.0, {"soft_cap": 2.0}),
    "large": (1e4, {}),
    "large, blocks": (1e4, {"block_size": 4, "chunk_tokens": 100}),
    "huge": (1e18, {}),
    "one rank far below": (-1e6, {}),
}


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize(("ranks", "size", "rows"), SIZES[1:3])
def test_losses_and_gradients_are_those_of_one_table(
    ranks: int, size: int, rows: int, extreme: str
) -> None:
    """Against torch in float64, with labels on one rank only, masked ones, and logits that no
    exponential holds."""
    largest, options = EXTREMES[extreme]
    generator = torch.Generator().manual_seed(size)
    hidden = torch.randn(24, 8, generator=generator)
    weight = torch.randn(size, 8, generator=generator)
    labels = torch.randint(size, (24,), generator=generator)
    labels[3], labels[4:12] = -1, labels[4:12] % rows  # all of the first rank
    if largest < 0:  # hidden states point away from all entries but those of the last rank
        weight[: (ranks - 1) * rows, 0], weight[(ranks - 1) * rows :, 0] = largest, 0.0
        hidden[:, 0] = 1.0
        labels.clamp_(min=(ranks - 1) * rows)
    else:
        weight *= largest
    x, w = (value.double().requires_grad_() for value in (hidden, weight))
    logits = x @ w.t()
    if cap := options.get("soft_cap"):
        logits = cap * (logits / cap).tanh()
    kept = labels >= 0
    loss = functional.cross_entropy(logits[kept], labels[kept], reduction="sum")
    loss = loss + options.get("z_loss", 0.0) * logits[kept].logsumexp(-1).square().sum()
    loss.backward()
    assert x.grad is not None and w.grad is not None
    for rank, (found, dx, dw) in enumerate(
        on_threads(1, ranks, head, hidden, weight, labels, rows, options)
    ):
        torch.testing.assert_close(found.double(), loss.detach(), rtol=2e-6, atol=1e-4)
        for value, exact in ((dx, x.grad), (dw, local(w.grad, rank, rows))):
            size_of = max(float(exact.abs().max()), float(w.grad.abs().max()) * 1e-3)
            assert float((value.double() - 0.25 * exact).abs().max()) <= 2e-5 * size_of
