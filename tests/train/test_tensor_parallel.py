"""Tensor parallelism against one rank: the same initial weights, gradients, losses and weights.

Most ranks here are threads, which cost nothing to start; the last tests hold them against ranks of gloo, to the bit.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.distributed.process_group import Distributed
from tests.support.harness import Trajectory, run_distributed, same_weights, train_tiny
from tests.support.tensor_cases import CASES, QWEN3, Layout, Options, Result, result_of, run_case, run_rank

LAYOUTS: list[Layout] = [(data, ranks, tokens) for data in (1, 2) for ranks in (2, 4) for tokens in (False, True)]
# Without -m slow, each case has one layout: four ranks where they are more than the key heads, else mostly two.
FOUR_RANKS = ("llama, grouped", "llama, multi-query", "qwen3, one group", "gpt2", "depth-first")
SLOW = (
    "gpt2, untied",
    "llama, all heads",
    "documents",
    "documents, positions from 0, windows",
    "positions from 0",
    "padded whole vocabulary",
    "whole embeddings, blocks",
    "norms without weights",
    "frozen tied embedding",
    "frozen matrices",
    "layers in twos",
    "scaled queries",
    "averages",
    "recomputed layers",
    "recomputed MLPs",
    "bf16, wide residual",
    "bf16, narrow gradients",
    "bf16, split weights",
)


def quick() -> list[tuple[str, Layout]]:
    found: list[tuple[str, Layout]] = []
    for place, case in enumerate(case for case in CASES if case not in SLOW):
        four: Layout = (1, 4, True) if "vocab_size" not in CASES[case] else (2, 2, True)
        found.append((case, four if case in FOUR_RANKS else (1, 2, place % 2 == 0)))
    return found


# Relative errors of losses, and of gradients as parts of the largest one of a parameter. With 16 bits, sums over ranks
# round what one rank does not: so do other errors of the same size.
TOLERANCES = {"fp32": (1e-6, 5e-6), "fp16": (3e-4, 1e-2), "bf16": (3e-3, 6e-2)}
WHOLE_TABLE = [(case, layout) for case in CASES for layout in LAYOUTS]


@functools.cache
def on_one_rank(case: str, iterations: int = 0) -> Result:
    return run_case(CASES[case], iterations=iterations)


def tolerances(case: str) -> tuple[float, float]:
    return TOLERANCES[CASES[case].get("training_dtype", "fp32")]


def sized(case: str, layout: Layout) -> Options:
    """Options of a case, with as many samples on one rank as on two data ranks."""
    options = CASES[case]
    if options.get("batch_size", 4) is None:  # micro-batches of one sample each
        assert options["micro_batch_size"] == 1
        order = "depth_first_micro_batches" if "depth_first_micro_batches" in options else "breadth_first_micro_batches"
        return {**options, order: options[order] // layout[0]}
    return options


def compare_gradients(case: str, layout: Layout) -> None:
    one, several = on_one_rank(case), run_case(sized(case, layout), layout)
    loss, gradients = tolerances(case)
    assert several.initial.keys() == one.initial.keys()
    assert all(torch.equal(several.initial[name], value) for name, value in one.initial.items())
    np.testing.assert_allclose(several.losses, one.losses, rtol=loss)
    largest = max(float(gradient.abs().max()) for gradient in one.gradients.values())
    assert largest > 0 and several.gradients.keys() == one.gradients.keys()
    for name, gradient in one.gradients.items():
        # Biases of keys have no gradient but rounding.
        size = max(float(gradient.abs().max()), 1e-3 * largest)
        error = float((several.gradients[name] - gradient).abs().max()) / size
        assert error <= gradients, (name, error)


@pytest.mark.parametrize(("case", "layout"), quick())
def test_gradients_are_those_of_one_rank(case: str, layout: Layout) -> None:
    """Of every parameter and option; initial weights are equal to the bit, and so are copies of a parameter."""
    compare_gradients(case, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "layout"), WHOLE_TABLE)
def test_gradients_are_those_of_one_rank_in_any_layout(case: str, layout: Layout) -> None:
    compare_gradients(case, layout)


def compare_training(case: str, layout: Layout, zero_stage: int) -> None:
    """Losses of twenty steps to 1e-6 relative, gradient norms to 1e-5, weights to 1e-5, but those of key biases."""
    one = on_one_rank(case, 20)
    stage = {} if "zero_stage" in CASES[case] else {"zero_stage": zero_stage}
    several = run_case({**sized(case, layout), **stage}, layout, 20)
    assert len(set(one.losses)) == 20, "nothing is trained"
    loss, gradients = tolerances(case)
    np.testing.assert_allclose(several.losses, one.losses, rtol=loss)
    np.testing.assert_allclose(several.grad_norms, one.grad_norms, rtol=max(gradients, 1e-5))
    if loss > 1e-6:
        return  # with 16 bits, Adam turns errors of small gradients into steps
    for name, weight in one.weights.items():
        np.testing.assert_allclose(
            without_keys(name, several.weights[name]), without_keys(name, weight), rtol=0, atol=1e-5, err_msg=name
        )


def without_keys(name: str, weight: Tensor) -> np.ndarray:
    """Return a weight without biases of keys, which change no loss: Adam divides their rounding by itself."""
    if not name.endswith("query_key_value.bias"):
        return weight.numpy()
    keys = (len(weight) - 32) // 2 if len(weight) <= 96 else 64
    queries = len(weight) - 2 * keys
    return np.delete(weight.numpy(), slice(queries, queries + keys))


@pytest.mark.parametrize(
    ("case", "layout", "zero_stage"), [("gpt2", (1, 2, False), 1), ("llama, multi-query", (2, 2, True), 3)]
)
def test_training_is_that_of_one_rank(case: str, layout: Layout, zero_stage: int) -> None:
    compare_training(case, layout, zero_stage)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "layout"), WHOLE_TABLE)
def test_training_is_that_of_one_rank_in_any_layout(case: str, layout: Layout) -> None:
    compare_training(case, layout, 1 + (list(CASES).index(case) + LAYOUTS.index(layout)) % 3)


OF_TWO_DATA_RANKS = [(case, layout) for case, layout in WHOLE_TABLE if layout[0] == 2]
BUFFERS: list[Options] = [
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"num_weight_buffers": 3, "num_grad_buffers": 1},
]


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("qwen3", (2, 2, True)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in WHOLE_TABLE if each[1][0] == 2),
    ],
)
def test_zero_stages_and_buffer_counts_change_no_bit(case: str, layout: Layout) -> None:
    options = sized(case, layout)
    if "zero_stage" in options:
        pytest.skip("takes one ZeRO stage only")
    first, *others = (run_case({**options, **buffers}, layout, 2) for buffers in BUFFERS)
    for other in others:
        assert other.losses == first.losses and other.grad_norms == first.grad_norms
        assert all(torch.equal(other.weights[name], weight) for name, weight in first.weights.items())


RECOMPUTED: list[Options] = [
    {},
    {"mlp_recompute_level": "activation"},
    {"mlp_recompute_level": "full", "recompute_layers": 1},
    {"recompute_layers": 2},
]


@pytest.mark.parametrize("layout", [(1, 2, False), (1, 2, True)])
def test_recomputation_changes_no_bit(layout: Layout) -> None:
    """Dropout masks included."""
    options = {**CASES["llama, multi-query"], "hidden_dropout": 0.1, "attention_dropout": 0.1}
    first, *others = (run_case({**options, **level}, layout) for level in RECOMPUTED)
    for other in others:
        assert other.losses == first.losses
        assert all(torch.equal(other.gradients[name], gradient) for name, gradient in first.gradients.items())


# -- ranks of gloo ----------------------------------------------------------------------------------------------------

PROGRAM: Options = {**QWEN3, "vocab_size": 61, "logit_z_loss": 1e-2, "batch_size": 4, "lr": 1e-3, "clip_grad": 0.5}
PROGRAM_LAYOUTS: dict[int, Options] = {2: {"sequence_tensor_parallel": True, "zero_stage": 2}, 4: {"zero_stage": 3}}
# Cases whose collectives have every form: of hidden states, logits, losses, embeddings and gradients.
SAME_BITS: list[tuple[str, Layout]] = [
    ("llama, multi-query", (2, 2, True)),
    ("whole embeddings, tied", (2, 2, True)),
    ("gpt2", (1, 4, False)),
]


def divided(distributed: Distributed, tensor_parallel: int) -> Distributed:
    """Return the same ranks in other groups."""
    other = copy.copy(distributed)
    other.divide(tensor_parallel, lambda ranks: dist.new_group(list(ranks), backend="gloo"))
    return other


def on_four_ranks(distributed: Distributed) -> tuple[list[Trajectory], list[tuple[Any, ...]]]:
    groups = {ranks: divided(distributed, ranks) for ranks in PROGRAM_LAYOUTS}
    trained = [
        train_tiny(groups[ranks], {**PROGRAM, **options, "tensor_parallel": ranks}, 6)
        for ranks, options in PROGRAM_LAYOUTS.items()
    ]
    results = []
    for case, (_, ranks, tokens) in SAME_BITS:
        options = {**CASES[case], "tensor_parallel": ranks, "sequence_tensor_parallel": tokens}
        results.append(run_rank(groups[ranks], options, 1))
    return trained, results


@functools.cache
def of_gloo() -> tuple[list[list[Trajectory]], list[list[tuple[Any, ...]]]]:
    trained, results = zip(*run_distributed(4, on_four_ranks), strict=True)
    return list(trained), list(results)


def test_threads_compute_the_bits_of_processes() -> None:
    _, results = of_gloo()
    for place, (case, layout) in enumerate(SAME_BITS):
        processes, threads = result_of([rank[place] for rank in results]), run_case(CASES[case], layout, 1)
        assert processes.losses == threads.losses and processes.grad_norms == threads.grad_norms
        assert all(torch.equal(processes.gradients[name], value) for name, value in threads.gradients.items())
        assert all(torch.equal(processes.weights[name], value) for name, value in threads.weights.items())


@pytest.mark.parametrize("place", range(2))
def test_the_program_trains_as_on_one_rank(place: int) -> None:
    """Its own step on its own data, on 2 x 2 ranks with split tokens and on 1 x 4."""
    (one,) = run_distributed(1, train_tiny, PROGRAM, 6)
    ranks = [rank[place] for rank in of_gloo()[0]]
    for rank in ranks:
        assert same_weights(rank.initial, one.initial)
        assert rank.losses == ranks[0].losses and rank.grad_norms == ranks[0].grad_norms
        assert same_weights(rank.weights, ranks[0].weights)
    np.testing.assert_allclose(ranks[0].losses, one.losses, rtol=1e-6)
    np.testing.assert_allclose(ranks[0].grad_norms, one.grad_norms, rtol=1e-5)
    for name, weight in one.weights.items():
        np.testing.assert_allclose(ranks[0].weights[name], weight, rtol=0, atol=1e-5, err_msg=name)
