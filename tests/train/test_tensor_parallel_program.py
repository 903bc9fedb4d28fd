"""Tensor parallelism by the program itself: its step, data and evaluation on gloo ranks against one
rank."""

import copy
import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lite.config import DistributedConfig
from megatron_lite.distributed.grid import divide
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.outputs.evaluation import evaluate
from megatron_lite.train import train_step
from tests.support.harness import (
    Trajectory,
    run_distributed,
    same_weights,
    start_run,
    tiny_config,
    train_tiny,
)
from tests.support.tensor_cases import CASES, QWEN3, Layout, Options, result_of, run_case, run_rank
from tests.support.token_files import write_documents

PROGRAM: Options = {
    **QWEN3,
    "vocab_size": 61,
    "logit_z_loss": 1e-2,
    "batch_size": 4,
    "lr": 1e-3,
    "clip_grad": 0.5,
}
PROGRAM_LAYOUTS: dict[int, Options] = {
    2: {"sequence_tensor_parallel": True, "zero_stage": 2},
    4: {"zero_stage": 3},
}
# Cases whose collectives have every form: of hidden states, logits, losses, embeddings and
# gradients.
SAME_BITS: list[tuple[str, Layout]] = [
    ("llama, multi-query", (2, 2, True)),
    ("whole embeddings, tied", (2, 2, True)),
    ("gpt2", (1, 4, False)),
    ("in halves", (2, 2, True)),
    ("in halves, bf16", (1, 4, False)),
]


def divided(distributed: Distributed, tensor_parallel: int) -> Distributed:
    """Return the same ranks in other groups."""
    other = copy.copy(distributed)
    options = DistributedConfig(tensor_parallel=tensor_parallel)
    divide(other, lambda ranks: dist.new_group(list(ranks), backend="gloo"), options)
    return other


def write_corpus(folder: Path) -> Options:
    """Write documents of which many tokens do not count; return the options of a training on it."""
    random = np.random.default_rng(0)
    cuts = np.sort(random.choice(2000, 150, replace=False))
    arrays = {
        "tokens": (random.integers(64, size=2000), "<u2"),
        "mask": (random.random(2000) < 0.6, "|u1"),
    }
    for name, (values, dtype) in arrays.items():
        write_documents(folder / name, np.split(values, cuts), dtype)
    return {
        "dataset_source": "list",
        "data_path": (str(folder / "tokens"),),
        "loss_mask": (str(folder / "mask"),),
        "split": (0.8, 0.2),
        "cross_document_attention": False,
        "reset_position_ids": True,
        "validation_iters": 2,
        "batch_size": 4,
        "ema_type": "ema",
    }


def train_and_evaluate(
    distributed: Distributed, options: Options
) -> tuple[list[float], dict[str, float]]:
    """Return the losses of some steps and those of the validation that follows, the averages'
    included."""
    run = start_run(distributed, tiny_config(distributed.world_size, **options))
    batches = enumerate(run.data.batches("training", 0, 4), start=1)
    updates = [train_step(run, micro_batches, iteration) for iteration, micro_batches in batches]
    records: list[dict[str, Any]] = []
    run.trackers = SimpleNamespace(log=records.append)  # type: ignore[assignment]
    evaluate(run, "validation")
    run.model.finish()
    evaluated = {name: value for name, value in records[0].items() if name.endswith("loss")}
    return [float(update.loss) / update.tokens for update in updates], evaluated


def on_four_ranks(distributed: Distributed, corpus: Options) -> tuple[Any, ...]:
    groups = {ranks: divided(distributed, ranks) for ranks in PROGRAM_LAYOUTS}
    trained = [
        train_tiny(groups[ranks], {**PROGRAM, **options, "tensor_parallel": ranks}, 6)
        for ranks, options in PROGRAM_LAYOUTS.items()
    ]
    results = []
    for case, (_, ranks, tokens) in SAME_BITS:
        options = {**CASES[case], "tensor_parallel": ranks, "sequence_tensor_parallel": tokens}
        results.append(run_rank(groups[ranks], options, 1))
    return (
        trained,
        results,
        train_and_evaluate(groups[2], {**corpus, **PROGRAM_LAYOUTS[2], "tensor_parallel": 2}),
    )


def on_one(distributed: Distributed, corpus: Options) -> tuple[Any, ...]:
    return train_tiny(distributed, PROGRAM, 6), train_and_evaluate(distributed, corpus)


@functools.cache
def of_gloo() -> tuple[list[Any], ...]:
    """Return what four ranks find, each a list by rank, and what one finds."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder))
        found = run_distributed(4, on_four_ranks, corpus)
        one = run_distributed(1, on_one, corpus)
    return *(list(some) for some in zip(*found, strict=True)), list(one[0])


def test_threads_compute_the_bits_of_processes() -> None:
    _, results, _, _ = of_gloo()
    for place, (case, layout) in enumerate(SAME_BITS):
        processes = result_of([rank[place] for rank in results])
        threads = run_case(CASES[case], layout, 1)
        assert processes.losses == threads.losses and processes.grad_norms == threads.grad_norms
        assert all(
            torch.equal(processes.gradients[name], value)
            for name, value in threads.gradients.items()
        )
        assert all(
            torch.equal(processes.weights[name], value) for name, value in threads.weights.items()
        )


@pytest.mark.parametrize("place", range(2))
def test_the_program_trains_as_on_one_rank(place: int) -> None:
    """Its own step on its own data, on 2 x 2 ranks with split tokens and on 1 x 4."""
    trained, _, _, (one, _) = of_gloo()
    ranks: list[Trajectory] = [rank[place] for rank in trained]
    for rank in ranks:
        assert same_weights(rank.initial, one.initial)
        assert rank.losses == ranks[0].losses and rank.grad_norms == ranks[0].grad_norms
        assert same_weights(rank.weights, ranks[0].weights)
    np.testing.assert_allclose(ranks[0].losses, one.losses, rtol=1e-6)
    np.testing.assert_allclose(ranks[0].grad_norms, one.grad_norms, rtol=1e-5)
    for name, weight in one.weights.items():
        np.testing.assert_allclose(ranks[0].weights[name], weight, rtol=0, atol=1e-5, err_msg=name)


def test_masks_documents_and_evaluations_are_those_of_one_rank() -> None:
    """From files: tokens that do not count, documents apart, and the losses of a validation, also
    of the averages."""
    _, _, several, (_, (losses, evaluated)) = of_gloo()
    assert len(set(losses)) == 4 and evaluated.keys() == {"loss", "averaged_loss"}
    for rank in several:
        assert rank[0] == several[0][0]
        np.testing.assert_allclose(rank[0], losses, rtol=1e-6)
    assert several[0][1] == pytest.approx(evaluated, rel=1e-6)
