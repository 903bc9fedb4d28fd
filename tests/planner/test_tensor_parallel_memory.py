"""Activations of a tensor-parallel rank against plans: bytes that autograd keeps, and peaks of
steps and evaluations.

One process is the first rank of a group that does not exist: exchanges leave garbage of the right
shape, in memory that is real.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_lite.config import Config
from megatron_lite.model.layer import MicroBatch
from megatron_lite.planner.step_memory import ActivationMemory
from megatron_lite.zero.multi_stage import MultiStage
from tests.planner.test_plan import EVERY_NORM, SIZES
from tests.planner.test_tensor_parallel_plans import LLAMA
from tests.support.harness import tiny_config
from tests.support.kernel_checks import products_in_fp32
from tests.support.memory_meters import measure_kept, micro_batches, second_peak, some
from tests.support.plans import planned_memory, simulated_rank

Options = dict[str, Any]


def a_rank(config: Config) -> MultiStage:
    """The model of the first rank, with weights."""
    model = simulated_rank(config, config.distributed.tensor_parallel)
    model.initialize(1)
    return model


KEPT: list[Options] = [
    {},
    dict(training_dtype="bf16", hidden_dropout=0.1, embedding_dropout=0.1, **EVERY_NORM),
    dict(full_precision_residual=True, training_dtype="bf16", **EVERY_NORM),
    LLAMA,
    dict(training_dtype="bf16", qk_layernorm=True, **LLAMA),
    dict(mlp_recompute_level="activation", **LLAMA),
    dict(mlp_recompute_level="full", training_dtype="bf16"),
    dict(mlp_recompute_level="none,full:1", recompute_layers=1, **LLAMA),
    dict(attention_dropout=0.1, window_size=5),
    dict(parallel_embeddings=False, tie_word_embeddings=False),
    dict(
        freeze=("embedding", "blocks.0.mlp.up"),
        tie_word_embeddings=False,
        mlp_recompute_level="full",
    ),
    dict(freeze=("embedding.word", "*.norm.*"), tie_word_embeddings=False, training_dtype="bf16"),
]


@pytest.mark.parametrize(
    ("ranks", "splits", "options"), some(KEPT, (2, 4), (False, True), each=5), ids=str
)
def test_activations_are_what_autograd_keeps(ranks: int, splits: bool, options: Options) -> None:
    """The planned activations of each layer equal to the byte what autograd saves on a rank."""
    sizes = dict(batch_size=2, tensor_parallel=ranks, sequence_tensor_parallel=splits)
    config = tiny_config(ranks, **{**sizes, **options})
    saved = planned_memory(config, ranks).saved
    measured = measure_kept(a_rank(config), micro_batches(config)[0])
    assert dict(zip(measured, (layer.total() for layer in saved), strict=True)) == measured


PEAKS: list[Options] = [
    {},
    dict(training_dtype="bf16"),
    dict(**{**LLAMA, "ffn_hidden_size": 512}),
    dict(training_dtype="bf16", **{**LLAMA, "ffn_hidden_size": 512}, vocab_size=100),
    dict(vocab_size=8192),
    dict(vocab_size=8192, training_dtype="bf16", breadth_first_micro_batches=2, batch_size=4),
    dict(parallel_embeddings=False, vocab_size=8192),
    dict(parallel_embeddings=False, vocab_size=8192, training_dtype="bf16"),
    dict(hidden_dropout=0.1, full_precision_residual=True, training_dtype="bf16", **EVERY_NORM),
    dict(recompute_layers=2, vocab_size=100),
    dict(vocab_size=100, num_attention_heads=32, head_groups=1, kv_channels=32),
    dict(vocab_size=100, ffn_hidden_size=64),
    dict(vocab_size=100, ffn_hidden_size=64, training_dtype="bf16"),
    dict(vocab_size=100, ffn_hidden_size=64, overlap_tensor_reduce=True),
    dict(vocab_size=100, overlap_tensor_reduce=True, training_dtype="bf16"),
]


@pytest.mark.parametrize(
    ("ranks", "splits", "level", "options"),
    some(PEAKS, (2, 4), (False, True), ("none", "activation", "full"), each=17),
    ids=str,
)
def test_peaks_are_those_of_a_step(ranks: int, splits: bool, level: str, options: Options) -> None:
    """The planned peak of forward and backward passes, beyond the state, is within 1 percent of a
    real step."""
    layout = dict(tensor_parallel=ranks, sequence_tensor_parallel=splits, mlp_recompute_level=level)
    config = tiny_config(ranks, **{**SIZES, **layout, **options})
    model, batches = a_rank(config), micro_batches(config)
    planned, measured = peaks(config, lambda: model.forward_backward(batches))
    assert planned.peak == pytest.approx(measured, rel=0.01), planned.peak_at


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {**LLAMA, "training_dtype": "bf16", "vocab_size": 4096},
        {"parallel_embeddings": False, **EVERY_NORM},
    ],
    ids=str,
)
def test_peaks_of_an_evaluation(options: Options, splits: bool) -> None:
    """With larger micro-batches an evaluation sets the peak; the plan is within 1 percent."""
    sizes = dict(
        SIZES,
        max_position_embeddings=256,
        batch_size=16,
        micro_batch_size=1,
        validation_iters=1,
        eval_micro_batch_size=16,
    )
    layout = dict(tensor_parallel=2, sequence_tensor_parallel=splits)
    config = tiny_config(2, **{**sizes, **layout, "sequence_length": 128, **options})
    model, tokens = a_rank(config), torch.zeros(16, 128, dtype=torch.int64)
    planned, measured = peaks(config, lambda: model.evaluate([MicroBatch(tokens, tokens)]))
    assert planned.peak_at.endswith("evaluation")
    assert planned.peak == pytest.approx(measured, rel=0.01), planned.peak_at


def test_gradients_of_copies_are_summed_in_memory_for_all_ranks() -> None:
    """A table of positions that every rank has, of which each computes a part of the gradient: T
    times its bytes."""
    options = dict(
        SIZES, max_position_embeddings=8192, tensor_parallel=4, sequence_tensor_parallel=True
    )
    config = tiny_config(4, **options)
    model, batches = a_rank(config), micro_batches(config)
    planned, measured = peaks(config, lambda: model.forward_backward(batches))
    assert planned.peak_at == "sums of gradients"
    assert planned.peak == 4 * 4 * 8192 * 128 == measured - 8  # the loss


def peaks(config: Config, passes: Callable[[], object]) -> tuple[ActivationMemory, int]:
    """The planned memory, and the peak measured in the second of two runs: the first one also makes
    rotary tables.

    On any processor as on one with instructions for bf16.
    """
    with products_in_fp32(False):
        planned = planned_memory(config, config.distributed.tensor_parallel)
        return planned, second_peak(passes)
