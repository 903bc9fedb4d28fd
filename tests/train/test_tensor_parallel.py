"""Tensor parallelism against one rank: the same initial weights, gradients, losses and weights.

Ranks here are threads, which cost nothing to start; test_tensor_parallel_program.py holds them
against ranks of gloo.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lite.kernels.triton_support import runs_on
from tests.support.tensor_cases import CASES, QWEN3, Layout, Options, Result, run_case

LAYOUTS: list[Layout] = [
    (data, ranks, tokens) for data in (1, 2) for ranks in (2, 4) for tokens in (False, True)
]
# Without -m slow, each case has one layout: four ranks where they are more than the key heads, else
# mostly two.
FOUR_RANKS = (
    *("llama, grouped", "llama, multi-query", "qwen3, one group", "gpt2", "depth-first"),
    "norms of all heads, one group",
)
SLOW = (
    "gpt2, untied | llama, all heads | documents | documents, rotary positions from 0, windows | positions from 0 | "
    "padded whole vocabulary | whole embeddings, blocks | norms without weights | frozen tied embedding | "
    "frozen matrices | layers in twos | scaled queries | averages | recomputed layers | recomputed MLPs | "
    "bf16, wide residual | bf16, narrow gradients | bf16, split weights"
).split(" | ")


def quick() -> Iterator[tuple[str, Layout]]:
    for place, case in enumerate(case for case in CASES if case not in SLOW):
        four: Layout = (1, 4, True) if "vocab_size" not in CASES[case] else (2, 2, True)
        yield case, four if case in FOUR_RANKS else (1, 2, place % 2 == 0)


def quick_and_slow(*quick: tuple[str, Layout]) -> Any:
    """Parametrize `pairs`: each quick one alone, and as slow tests the rest of the whole table, by
    layout."""
    chosen = [pytest.param([pair], id=f"{pair[0]}-{pair[1]}") for pair in quick]
    for layout in LAYOUTS:
        rest = [(case, layout) for case in CASES if (case, layout) not in quick]
        chosen.append(pytest.param(rest, id=f"rest-{layout}", marks=pytest.mark.slow))
    return pytest.mark.parametrize("pairs", chosen)


# Relative errors of losses, and of gradients as parts of the largest one of a parameter. With 16
# bits, sums over ranks round what one rank does not: so do other errors of the same size.
TOLERANCES = {"fp32": (1e-6, 5e-6), "fp16": (3e-4, 1e-2), "bf16": (3e-3, 6e-2)}


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
        order = (
            "depth_first_micro_batches"
            if "depth_first_micro_batches" in options
            else "breadth_first_micro_batches"
        )
        return {**options, order: options[order] // layout[0]}
    return options


@quick_and_slow(*quick())
def test_gradients_are_those_of_one_rank(pairs: list[tuple[str, Layout]]) -> None:
    """Of every parameter and option; initial weights are equal to the bit, and so are copies of a
    parameter."""
    for case, layout in pairs:
        one, several = on_one_rank(case), run_case(sized(case, layout), layout)
        loss, gradients = tolerances(case)
        assert several.initial.keys() == one.initial.keys(), case
        assert all(
            torch.equal(several.initial[name], value) for name, value in one.initial.items()
        ), case
        np.testing.assert_allclose(several.losses, one.losses, rtol=loss, err_msg=case)
        largest = max(float(gradient.abs().max()) for gradient in one.gradients.values())
        assert largest > 0 and several.gradients.keys() == one.gradients.keys(), case
        for name, gradient in one.gradients.items():
            # Biases of keys have no gradient but rounding.
            size = max(float(gradient.abs().max()), 1e-3 * largest)
            error = float((several.gradients[name] - gradient).abs().max()) / size
            assert error <= gradients, (case, name, error)


@quick_and_slow(("gpt2", (1, 2, False)), ("llama, multi-query", (2, 2, True)))
def test_training_is_that_of_one_rank(pairs: list[tuple[str, Layout]]) -> None:
    """Losses of twenty steps to 1e-6 relative, gradient norms to 1e-5, weights to 1e-5, but those
    of key biases."""
    for case, layout in pairs:
        one = on_one_rank(case, 20)
        zero_stage = 1 + (list(CASES).index(case) + LAYOUTS.index(layout)) % 3
        stage = {} if "zero_stage" in CASES[case] else {"zero_stage": zero_stage}
        several = run_case({**sized(case, layout), **stage}, layout, 20)
        assert len(set(one.losses)) == 20, f"{case}: nothing is trained"
        loss, gradients = tolerances(case)
        np.testing.assert_allclose(several.losses, one.losses, rtol=loss, err_msg=case)
        np.testing.assert_allclose(
            several.grad_norms, one.grad_norms, rtol=max(gradients, 1e-5), err_msg=case
        )
        if loss > 1e-6:
            continue  # with 16 bits, Adam turns errors of small gradients into steps
        for name, weight in one.weights.items():
            ours, theirs = without_keys(name, several.weights[name]), without_keys(name, weight)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5, err_msg=f"{case}: {name}")


def without_keys(name: str, weight: Tensor) -> np.ndarray:
    """Return a weight without biases of keys, which change no loss: Adam divides their rounding by
    itself."""
    if not name.endswith("query_key_value.bias"):
        return weight.numpy()
    keys = (len(weight) - 32) // 2 if len(weight) <= 96 else 64
    queries = len(weight) - 2 * keys
    return np.delete(weight.numpy(), slice(queries, queries + keys))


BUFFERS: list[Options] = [
    {"zero_stage": 1},
    {"zero_stage": 2},
    {"zero_stage": 3},
    {"num_weight_buffers": 3, "num_grad_buffers": 1},
]


@quick_and_slow(("qwen3", (2, 2, True)))
def test_zero_stages_and_buffer_counts_change_no_bit(pairs: list[tuple[str, Layout]]) -> None:
    for case, layout in pairs:
        options = sized(case, layout)
        if "zero_stage" in options or layout[0] == 1:
            continue  # takes one ZeRO stage only, or has one data rank
        first, *others = (run_case({**options, **buffers}, layout, 2) for buffers in BUFFERS)
        for other in others:
            assert other.losses == first.losses and other.grad_norms == first.grad_norms, case
            assert all(
                torch.equal(other.weights[name], weight) for name, weight in first.weights.items()
            ), case


RECOMPUTED: list[Options] = [
    {},
    {"mlp_recompute_level": "activation"},
    {"mlp_recompute_level": "full", "recompute_layers": 1},
    {"recompute_layers": 2},
]


@pytest.mark.parametrize(
    ("case", "layout"), [("llama, multi-query", (1, 2, False)), ("in halves", (1, 2, True))]
)
def test_recomputation_changes_no_bit(case: str, layout: Layout) -> None:
    """Dropout masks included."""
    options = {**CASES[case], "hidden_dropout": 0.1, "attention_dropout": 0.1}
    first, *others = (run_case({**options, **level}, layout) for level in RECOMPUTED)
    for other in others:
        assert other.losses == first.losses
        assert all(
            torch.equal(other.gradients[name], gradient)
            for name, gradient in first.gradients.items()
        )


THREE: Options = {
    **QWEN3,
    "num_attention_heads": 6,
    "hidden_size": 24,
    "head_groups": 3,
    "ffn_hidden_size": 48,
    "sequence_length": 12,
    "vocab_size": 61,
}


@pytest.mark.parametrize("layout", [(1, 3, True), (2, 3, False), (1, 6, True)])
def test_three_and_six_ranks(layout: Layout) -> None:
    """Numbers of ranks that are no powers of two; with six, two ranks have the same key heads."""
    one, several = run_case(THREE), run_case(THREE, layout)
    np.testing.assert_allclose(several.losses, one.losses, rtol=1e-6)
    for name, gradient in one.gradients.items():
        assert float((several.gradients[name] - gradient).abs().max()) <= 5e-6 * float(
            gradient.abs().max()
        ), name


def test_overflows_are_dropped_by_all_ranks() -> None:
    """fp16 with a loss scale that is too large: the same updates are dropped as on one rank."""
    options = {**CASES["fp16"], "initial_loss_scale": 2.0**22}
    one, several = run_case(options, iterations=10), run_case(options, (1, 2, True), 10)
    finite = np.isfinite(one.grad_norms)
    assert 2 < finite.sum() < 10 and np.array_equal(np.isfinite(several.grad_norms), finite)
    np.testing.assert_allclose(
        np.array(several.grad_norms)[finite], np.array(one.grad_norms)[finite], rtol=1e-2
    )
    np.testing.assert_allclose(several.losses, one.losses, rtol=3e-4)
    assert all(bool(weight.isfinite().all()) for weight in several.weights.values())


# Options that reach each kernel: norms, heads with norms and rotation, MLP, embedding, and both
# visits of the head.
KERNELS: dict[str, Options] = {
    "llama": {**CASES["z-loss"], "head_groups": 1},
    "qwen3": {**QWEN3, "logit_soft_cap": 1.0},
    "gpt2": {**CASES["blocks of the vocabulary"], "masks": True},
    "whole embeddings": {**CASES["whole embeddings, tied"], "reset_positions": True},
    "padded vocabulary": CASES["padded vocabulary"],
}


@pytest.mark.slow
@pytest.mark.skipif(
    not runs_on(torch.device("cpu")), reason="Triton is not installed, or does not interpret"
)
# of garbage in padding, which nobody reads
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("layout", [(1, 2, False), (1, 2, True), (1, 4, True)])
@pytest.mark.parametrize("model", KERNELS)
def test_triton_kernels_compute_the_parts_of_each_rank(model: str, layout: Layout) -> None:
    """In Triton's interpreter against torch on one rank: rows and labels of other ranks, odd sizes,
    few heads."""
    options: Options = {**KERNELS[model], "num_layers": 1}
    one, several = run_case(options), run_case({**options, "enable_triton_kernels": True}, layout)
    np.testing.assert_allclose(several.losses, one.losses, rtol=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in one.gradients.values())
    for name, gradient in one.gradients.items():
        size = max(float(gradient.abs().max()), 1e-3 * largest)
        assert float((several.gradients[name] - gradient).abs().max()) <= 5e-6 * size, name
