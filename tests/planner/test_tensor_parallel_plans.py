"""Plans of tensor-parallel runs against real ranks: state and traffic to the byte, over all groups of a rank."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from megatron_lite.planner.auto import resolve_auto
from megatron_lite.planner.plan import Planner, make_plan
from pretrain_gpt import main
from tests.planner.test_plan import Books, mistral, planned, run_steps
from tests.support.harness import run_distributed

Options = dict[str, Any]
LLAMA: Options = dict(
    normalization_type="rms_norm",
    use_rotary_embeddings=True,
    gated=True,
    add_linear_biases=False,
    tie_word_embeddings=False,
    head_groups=2,
    ffn_hidden_size=96,
)
SPLIT: Options = dict(sequence_tensor_parallel=True)
CASES: list[Options] = [
    dict(vocab_size=61),
    dict(zero_stage=3, depth_first_micro_batches=2, training_dtype="bf16", **SPLIT, **LLAMA),
    dict(zero_stage=2, parallel_embeddings=False, cross_entropy_splits=3, **SPLIT),
    dict(parallel_embeddings=False, qk_layernorm=True, **LLAMA),
    dict(recompute_layers=2, full_precision_residual=True, cross_entropy_splits=3, training_dtype="bf16", **SPLIT),
    dict(mlp_recompute_level="none,full:1", breadth_first_micro_batches=2, **{**LLAMA, **SPLIT, "head_groups": 1}),
    dict(freeze=("embedding", "blocks.0", "blocks.1.mlp.up"), tie_word_embeddings=False, recompute_layers=2, **SPLIT),
    dict(freeze=("*.norm.*", "*.query_key_value.*", "*.mlp.*"), mlp_recompute_level="full", **SPLIT),
]


@functools.cache
def real(ranks: int, tensor_parallel: int) -> list[list[Books]]:
    """The books of every rank and case."""
    cases = [dict(case, tensor_parallel=tensor_parallel) for case in CASES]
    return run_distributed(ranks, run_steps, cases, tensor_parallel=tensor_parallel)


LAYOUTS = [(4, 2), pytest.param(2, 2, marks=pytest.mark.slow), pytest.param(4, 4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("case", range(len(CASES)), ids=lambda case: str(CASES[case]))
@pytest.mark.parametrize(("ranks", "tensor_parallel"), LAYOUTS)
def test_state_and_traffic_are_those_of_real_ranks(ranks: int, tensor_parallel: int, case: int) -> None:
    """Every kind of memory, and collectives, elements and bytes of a step by kind, to the byte on every rank."""
    for rank, books in enumerate(real(ranks, tensor_parallel)):
        memory, traffic = planned(ranks, dict(CASES[case], tensor_parallel=tensor_parallel), rank)
        assert (memory, traffic) == books[case], rank
    assert "tensor reduce" in traffic and ("tensor gather" in traffic) == ("sequence_tensor_parallel" in CASES[case])


def test_ranks_that_share_layers_share_the_state() -> None:
    """Of a Mistral-7B, 8 ranks hold as much in all whether they split layers, states, or both; norms are copied."""
    states = [
        make_plan(mistral(ranks=8, tensor_parallel=ranks, zero_stage=1), 8, "cuda").model.memory.bytes_by_kind()
        for ranks in (1, 2, 8)
    ]
    shards = [sum(memory[kind] for kind in ("weight shards", "optimizer moments")) for memory in states]
    assert shards[0] <= shards[1] <= shards[2] < shards[0] * 1.001
    buffers = [memory["gradient buffers"] for memory in states]
    assert buffers[0] == pytest.approx(2 * buffers[1], rel=1e-3) == pytest.approx(8 * buffers[2], rel=1e-3)


def test_a_planner_tells_layouts_apart() -> None:
    """Every answer of one planner is that of a whole plan."""
    planner = Planner(8, "cuda")
    for ranks in (1, 2, 4):
        for options in ({}, SPLIT, dict(parallel_embeddings=False)):
            config = mistral(ranks=8, num_layers=4, tensor_parallel=ranks, micro_batch_size=2, zero_stage=3, **options)
            assert planner.needed_bytes(config) == make_plan(config, 8, "cuda").needed_bytes(), (ranks, options)


def test_auto_counts_what_a_rank_holds() -> None:
    """A lower ZeRO stage fits where layers are shared, and a stage takes more of the smaller blocks to gather."""
    chosen = []
    for ranks in (1, 4):
        config = mistral(ranks=8, tensor_parallel=ranks, zero_stage="auto", layers_per_stage="auto", batch_size=8)
        stages, _ = resolve_auto(config, 8, "cuda", 70 * 2**30)
        chosen.append((stages.zero_stage, stages.layers_per_stage))
    (alone, blocks), (shared, more_blocks) = chosen
    assert alone > shared and blocks == 1 and more_blocks >= 1
    config = mistral(ranks=4, tensor_parallel=4, zero_stage=3, layers_per_stage="auto")
    stages, (note,) = resolve_auto(config, 4, "cuda", 70 * 2**30)
    assert stages.layers_per_stage == 1 and "gathers nothing" in note.text


def test_the_fewest_gpus_are_a_multiple(capsys: pytest.CaptureFixture[str]) -> None:
    """--world_size=auto counts in groups that share layers, and the batch is shared by groups."""
    flags = ["@scripts/examples/mistral_7b.flags", "--dataset_source=random", "--dry_run=1", "--batch_size=6"]
    assert main([*flags, "--world_size=auto", "--tensor_parallel=4"]) == 0
    text = capsys.readouterr().out
    assert "dry run for 4 GPUs" in text or "dry run for 8 GPUs" in text
    assert "of 4 tensor-parallel ranks" in text and "--tensor_parallel=4" in text.rpartition("run this")[2]
