"""Collectives of tensor-parallel ranks: nothing is computed with before it has arrived.

Collectives are late: nothing is sent before somebody waits, and then the input must still be what
it was. Until then the places of others hold NaN. Ranks are threads.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

from megatron_lite.distributed.traffic import Handle
from megatron_lite.kernels import tensor_collectives
from tests.support.engine_runs import Engine, Late, LateGroup, Outcome, simulated_tensor_ranks
from tests.support.tensor_cases import CASES, LLAMA, QWEN3, CaseEngine, Layout, Options
from tests.support.thread_ranks import on_threads

READ = "written while a collective still reads it"
ZERO_3: Options = {
    "zero_stage": 3,
    "breadth_first_micro_batches": 2,
    "batch_size": None,
    "micro_batch_size": 2,
}
# Together they wait for every collective of a training.
RUNS: list[tuple[Options, Layout]] = [
    (
        {**QWEN3, "zero_stage": 3, "mlp_recompute_level": "full", "overlap_tensor_reduce": True},
        (1, 2, True),
    ),
    (
        {**CASES["whole embeddings, tied"], "recompute_layers": 1, "hidden_dropout": 0.1},
        (1, 2, True),
    ),
    (
        {**LLAMA, "head_groups": 1, "cross_entropy_splits": 2, "cross_entropy_block_size": 9},
        (1, 2, False),
    ),
    ({**CASES["gpt2"], **ZERO_3, "overlap_tensor_reduce": True}, (2, 2, False)),
]
Site = tuple[str, str, int, str]  # file, function, line, kind of collective


class LateTensorGroup(LateGroup):
    """Late collectives of ranks that share each layer, whose handles say what they are."""

    def all_gather(self, buffer: Tensor, kind: str = "gather") -> Handle:
        slices = buffer.view(self.world_size, -1)
        for rank in range(self.world_size):
            if rank != self.rank:
                slices[rank] = float("nan")
        return self._named(kind, super().all_gather(buffer, kind))

    def reduce_scatter(self, buffer: Tensor, kind: str = "reduce") -> Handle:
        return self._named(kind, super().reduce_scatter(buffer, kind))

    def all_reduce(self, buffer: Tensor, kind: str) -> Handle:
        return self._named(kind, super().all_reduce(buffer, kind))

    def _named(self, kind: str, late: Any) -> Handle:
        late.kind = kind
        return late  # type: ignore[no-any-return]


class LateRank:
    """A rank all of whose collectives are late."""

    def __init__(self, inner: Any) -> None:
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.device = inner.device
        self.sum_in_rank_order, self.inner = inner.sum_in_rank_order, inner
        self.data, self.tensor = LateGroup(inner.data), LateTensorGroup(inner.tensor)
        self.shard, self.replicate = self.data, inner.replicate
        self.expert = inner.expert
        self.layers, self.pipeline = self, inner.pipeline


def run_rank(ranks: Any, options: Options, late: bool, steps: int) -> Outcome | str:
    try:
        return CaseEngine(LateRank(ranks) if late else ranks, options).run(steps, evaluate_every=2)
    except AssertionError as error:
        return str(error)


def outcomes(place: int, late: bool, steps: int) -> list[Outcome | str]:
    options, (data, ranks, tokens) = RUNS[place]
    options = {**options, "tensor_parallel": ranks, "sequence_tensor_parallel": tokens}
    with mock.patch.object(tensor_collectives, "FEWEST_TOKENS", 2):
        return on_threads(data, ranks, run_rank, options, late, steps)


@functools.cache
def right(place: int, steps: int) -> list[Outcome | str]:
    return outcomes(place, False, steps)


# Functions that wait on behalf of their caller.
PASSING = (
    *("wait", "complete", "affine", "multiply", "times", "multiply_back", "_multiplied"),
    *("reduced_product", "<listcomp>"),
    *("gather", "reduce", "embedded", "of_residual"),
)


class removed_wait:  # noqa: N801 - reads as a statement
    """Nobody waits at one site any more. `seen`: sites that wait for a tensor-parallel
    collective."""

    def __init__(self, site: Site | None = None) -> None:
        self.site, self.seen = site, set[Site]()
        wait = Late.wait

        def wait_unless_removed(late: Any) -> None:
            frame = sys._getframe(1)
            while frame.f_code.co_name in PASSING and frame.f_back is not None:
                frame = frame.f_back
            if (kind := getattr(late, "kind", None)) is not None:
                code = frame.f_code
                found = (Path(code.co_filename).name, code.co_name, frame.f_lineno, kind)
                self.seen.add(found)
                if found == self.site:
                    return
            wait(late)

        self._patch = mock.patch.object(Late, "wait", wait_unless_removed)

    def __enter__(self) -> removed_wait:
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


# Functions that wait for a collective.
WAITING = {
    ("linear.py", "forward"),
    ("linear.py", "backward"),
    ("mlp.py", "forward"),
    ("mlp.py", "backward"),
    ("embedding.py", "forward"),
    ("embedding.py", "backward"),
    ("cross_entropy.py", "forward"),
    ("cross_entropy.py", "backward"),
    ("tensor_collectives.py", "join"),
    ("tensor_collectives.py", "total"),
    ("replicas.py", "sum_gradients"),
    ("replicas.py", "whole_parameter"),
}


@functools.cache
def late_runs() -> list[tuple[list[Outcome | str], set[Site]]]:
    found = []
    for place in range(len(RUNS)):
        with removed_wait() as watched:
            found.append((outcomes(place, True, 2), watched.seen))
    return found


@pytest.mark.parametrize("place", range(len(RUNS)))
def test_late_collectives_change_no_bit(place: int) -> None:
    """Two steps, an evaluation and an export: late data and tensor collectives together."""
    found, _ = late_runs()[place]
    assert found == right(place, 2)
    assert not isinstance(found[0], str) and found[0].losses[0] != found[0].losses[1], (
        "nothing is trained"
    )


def test_these_functions_wait() -> None:
    assert {site[:2] for _, sites in late_runs() for site in sites} == WAITING


def test_each_missing_wait_is_noticed() -> None:
    """Without any one of the waits, numbers change or a buffer is written while it is being
    sent."""
    runs = late_runs()
    for site in sorted({site for _, sites in runs for site in sites}):
        with removed_wait(site):
            places = (place for place in range(len(RUNS)) if site in runs[place][1])
            assert any(outcomes(place, True, 1) != right(place, 1) for place in places), site


# -- ranks that are simulated, as tests/test_gpu.py does on a CUDA stream
# ---------------------------------------------

SIMULATED: list[Options] = [
    {
        **QWEN3,
        "tensor_parallel": 2,
        "sequence_tensor_parallel": tokens,
        "batch_size": 4,
        "vocab_size": 62,
        **halves,
    }
    for tokens in (False, True)
    for halves in ({}, {"overlap_tensor_reduce": True, "sequence_length": 128})
]


@pytest.mark.parametrize("options", SIMULATED)
def test_simulated_ranks_can_be_late_too(options: Options) -> None:
    ranks, late = simulated_tensor_ranks(), simulated_tensor_ranks()
    late.tensor = LateGroup(late.tensor)  # type: ignore[assignment]
    found = Engine(ranks, options).run(2, evaluate_every=2)
    assert Engine(late, options).run(2, evaluate_every=2) == found and len(set(found.losses)) == 2
