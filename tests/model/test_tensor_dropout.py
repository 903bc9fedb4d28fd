"""Dropout on tensor-parallel ranks: equal masks where values are equal, other masks where each rank
has its own."""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from megatron_lite.model import block, embedding_and_head
from tests.support.tensor_cases import LLAMA, CaseEngine, Options, run_case
from tests.support.thread_ranks import ThreadRank, on_threads

RESIDUAL: Options = {
    **LLAMA,
    "hidden_dropout": 0.3,
    "attention_dropout": 0.0,
    "embedding_dropout": 0.2,
}
ALL: Options = {**RESIDUAL, "attention_dropout": 0.25}


def test_masks_of_a_whole_residual_stream_are_those_of_one_rank() -> None:
    one, four = run_case(RESIDUAL), run_case(RESIDUAL, (1, 4, False))
    plain = run_case(LLAMA)
    assert abs(one.losses[0] / plain.losses[0] - 1) > 1e-4, "nothing is dropped"
    np.testing.assert_allclose(four.losses, one.losses, rtol=1e-6)
    for name, gradient in one.gradients.items():
        assert float((four.gradients[name] - gradient).abs().max()) <= 5e-6 * float(
            gradient.abs().max()
        ), name


@pytest.mark.parametrize("splits_tokens", [False, True])
def test_copies_stay_equal(splits_tokens: bool) -> None:
    """Training with all kinds of dropout; `run_case` compares the copies of each parameter to the
    bit."""
    result = run_case(ALL, (1, 2, splits_tokens), 4)
    assert np.isfinite(result.losses).all() and len(set(result.losses)) == 4
    assert result.losses != run_case(ALL, (1, 1, False), 4).losses, "heads have masks of their own"
    assert run_case(ALL, (1, 2, splits_tokens), 4).losses == result.losses, (
        "masks depend on seeds alone"
    )


class Seeds:
    """The seeds that each rank drops with: of attention, and of the residual stream."""

    def __init__(self) -> None:
        self.of_threads: dict[int, list[tuple[str, int]]] = defaultdict(list)

    def watched(self, kind: str, function: Callable[..., Any], place: int) -> Any:
        def watch(*args: Any, **kwargs: Any) -> Any:
            if args[place] is not None:
                self.of_threads[threading.get_ident()].append((kind, args[place]))
            return function(*args, **kwargs)

        return watch


def seeds_of(ranks: int, splits_tokens: bool) -> list[list[tuple[str, int]]]:
    seeds = Seeds()

    def run(rank: ThreadRank) -> list[tuple[str, int]]:
        options = {**ALL, "tensor_parallel": ranks, "sequence_tensor_parallel": splits_tokens}
        engine = CaseEngine(rank, options)
        engine.gradients(1)
        engine.model.finish()
        return seeds.of_threads[threading.get_ident()]

    with (
        mock.patch.object(block, "attention", seeds.watched("attention", block.attention, 5)),
        mock.patch.object(block, "dropout", seeds.watched("residual", block.dropout, 2)),
        mock.patch.object(
            embedding_and_head, "dropout", seeds.watched("residual", embedding_and_head.dropout, 2)
        ),
    ):
        return on_threads(1, ranks, run)


@pytest.mark.parametrize("splits_tokens", [False, True])
def test_every_site_has_its_seed(splits_tokens: bool) -> None:
    """Rank 0 has the seeds of one rank; others have the same only for values that they have in
    common."""
    ((*one,),) = seeds_of(1, False)
    assert [kind for kind, _ in one] == ["residual", *["attention", "residual", "residual"] * 2]
    assert len({seed for _, seed in one}) == len(one), "two sites share a mask"
    first, *others = seeds_of(4, splits_tokens)
    assert first == one
    for place, (kind, seed) in enumerate(one):
        found = [rank[place] for rank in others]
        if kind == "residual" and not splits_tokens:
            assert found == [(kind, seed)] * 3
        else:
            assert len({seed, *(other for _, other in found)}) == 4 and {
                name for name, _ in found
            } == {kind}
