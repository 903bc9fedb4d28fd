"""Plans of tensor-parallel runs: state and traffic to the byte, over all groups of a rank.

Most tests run one rank of groups that do not exist: collectives are counted and leave garbage of
the right shape.
"""

import itertools
from typing import Any

import pytest

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.planner.auto import resolve_auto
from megatron_lite.planner.plan import Planner
from pretrain_gpt import main
from tests.planner.test_plan import Books, configured, mistral, planned, run_steps
from tests.support.engine_runs import Engine
from tests.support.harness import bytes_by_kind, run_distributed
from tests.support.memory_meters import micro_batches, some
from tests.support.plans import one_plan, simulated_rank
from tests.support.wire import sent_bytes

Options = dict[str, Any]
LLAMA: Options = dict(
    normalization_type="rms_norm", use_rotary_embeddings=True, gated=True, add_linear_biases=False
) | dict(tie_word_embeddings=False, head_groups=2, ffn_hidden_size=96)
SPLIT: Options = dict(sequence_tensor_parallel=True)
CASES: list[Options] = [
    dict(vocab_size=61),
    dict(zero_stage=3, depth_first_micro_batches=2, training_dtype="bf16", **SPLIT, **LLAMA),
    dict(zero_stage=2, parallel_embeddings=False, cross_entropy_splits=3, **SPLIT),
    dict(parallel_embeddings=False, qk_layernorm=True, **LLAMA),
    dict(
        recompute_layers=2,
        full_precision_residual=True,
        cross_entropy_splits=3,
        training_dtype="bf16",
        **SPLIT,
    ),
    dict(overlap_tensor_reduce=True, recompute_layers=1, sequence_length=128, batch_size=12),
    dict(overlap_tensor_reduce=True, sequence_length=128, batch_size=12, **SPLIT, **LLAMA),
    dict(
        mlp_recompute_level="none,full:1",
        breadth_first_micro_batches=2,
        **{**LLAMA, **SPLIT, "head_groups": 1},
    ),
    dict(
        freeze=("embedding", "blocks.0", "blocks.1.mlp.up"),
        tie_word_embeddings=False,
        recompute_layers=2,
        **SPLIT,
    ),
    dict(
        freeze=("*.norm.*", "*.query_key_value.*", "*.mlp.*"), mlp_recompute_level="full", **SPLIT
    ),
]
LAYOUTS = [(4, 2), (4, 4)]  # ranks, of which so many share the layers


def one_rank(rank: int, ranks: int, options: Options) -> Books:
    """Memory of one rank, and the traffic of its second step, without the optimizer's."""
    config = configured(ranks, options)
    model, batches = simulated_rank(config, ranks, rank), micro_batches(config)
    traffic = model.group.traffic
    model.initialize(1)
    for _ in range(2):
        traffic.take()
        model.forward_backward(batches)
        for stage in model.stages:
            if stage.trainable:
                model.updated(stage)
        model.gather_ahead()
    totals = traffic.take().items()
    sent = {
        kind: (total.collectives, total.elements, total.bytes, total.wire_bytes)
        for kind, total in totals
    }
    return bytes_by_kind(model), sent


@pytest.mark.parametrize(("layout", "options"), some(CASES, LAYOUTS, each=2), ids=str)
def test_state_and_traffic_are_those_of_the_engine(
    options: Options, layout: tuple[int, int]
) -> None:
    """Every kind of memory; collectives, elements and bytes of a step by kind. The first and the
    last rank."""
    ranks, shared = layout
    options = dict(options, tensor_parallel=shared)
    for rank in (0, ranks - 1):
        books = one_rank(rank, ranks, options)
        assert planned(ranks, options, rank) == books, rank
        kinds = {kind for kind in books[1] if kind.startswith("tensor")} - {"tensor sum"}
        assert kinds == {
            "tensor reduce",
            *(["tensor gather"] if "sequence_tensor_parallel" in options else []),
        }


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "shared"), [(2, 2), *LAYOUTS])
def test_state_and_traffic_are_those_of_real_ranks(ranks: int, shared: int) -> None:
    """The same of the program's own steps on ranks that are processes, with the optimizer's
    collectives."""
    cases = [
        dict(case, tensor_parallel=shared)
        for case in [*CASES, dict(optimizer="muon", zero_stage=2)]
    ]
    for rank, books_of_rank in enumerate(
        run_distributed(ranks, run_steps, cases, tensor_parallel=shared)
    ):
        for options, books in zip(cases, books_of_rank, strict=True):
            assert planned(ranks, options, rank) == books, (rank, options)


def test_gpus_exchange_all_copied_gradients() -> None:
    """With whole tokens a CPU sums none of a Llama's; NCCL's sums may differ, so GPUs take one
    rank's of every norm."""
    sizes = dict(num_layers=4, batch_size=4, micro_batch_size=1, sequence_length=1024)
    config = mistral(ranks=2, tensor_parallel=2, **sizes)
    on_cpu, on_gpu = (
        one_plan(config, 2, device).traffic["tensor sum"] for device in ("cpu", "cuda")
    )
    numbers_of_the_loss = 4 * 2 * 1024  # of micro-batches, each with two numbers of a token
    assert on_cpu.elements == 2 * numbers_of_the_loss
    assert on_gpu.elements - on_cpu.elements == 2 * (2 * 4 + 1) * 4096


WIRE: Options = dict(
    num_layers=3,
    hidden_size=64,
    sequence_length=128,
    vocab_size=512,
    batch_size=4,
    micro_batch_size=4,
)


def wire_bytes(
    distributed: Distributed, cases: list[Options]
) -> list[tuple[list[tuple[int, int]], int]]:
    """Bytes of two steps of every case: those that the sockets of this rank have sent, and those of
    its `Traffic`; and the memory that the tensor-parallel group receives in."""
    found = []
    for options in cases:
        engine, distributed.tensor._scratch = Engine(distributed, options), None
        steps = []
        for iteration in range(2):
            distributed.barrier()
            distributed.traffic.take()
            before = sent_bytes()
            engine.step(iteration + 1)
            engine.model.finish()
            distributed.barrier()
            totals = distributed.traffic.take().values()
            steps.append((sent_bytes() - before, sum(total.wire_bytes for total in totals)))
        assert distributed.tensor._scratch is not None
        found.append((steps, distributed.tensor._scratch.nbytes))
    return found


def test_sockets_send_what_the_plan_counts() -> None:
    """On gloo the kernel counts the bytes of the plan and of the engine, and at most 1 percent
    more, for headers."""
    cases = [
        dict(WIRE, **options, tensor_parallel=2) for options in ({}, SPLIT, {**LLAMA, **SPLIT})
    ]
    found = run_distributed(2, wire_bytes, cases, tensor_parallel=2)[0]
    for options, (steps, scratch) in zip(cases, found, strict=True):
        plan = one_plan(configured(2, options), 2, "cpu")
        assert plan.runtime["tensor-parallel scratch"] == scratch
        expected = sum(total.wire_bytes for total in plan.traffic.values())
        for sent, counted in steps[1:]:
            assert 0 <= counted - expected < 100, "the gradient's norm"
            assert 1 <= sent / expected < 1.01, options


def test_ranks_that_share_layers_share_the_state() -> None:
    """Of a Mistral-7B, 8 ranks hold as much in all whether they split layers, states, or both;
    norms are copied."""
    states = [
        bytes_by_kind(
            one_plan(mistral(ranks=8, tensor_parallel=ranks, zero_stage=1), 8, "cuda").model
        )
        for ranks in (1, 2, 8)
    ]
    shards = [
        sum(memory[kind] for kind in ("weight shards", "optimizer moments")) for memory in states
    ]
    assert shards[0] <= shards[1] <= shards[2] < shards[0] * 1.001
    buffers = [memory["gradient buffers"] for memory in states]
    assert (
        buffers[0]
        == pytest.approx(2 * buffers[1], rel=1e-3)
        == pytest.approx(8 * buffers[2], rel=1e-3)
    )


def test_a_planner_tells_layouts_apart() -> None:
    """Every answer of one planner is that of a whole plan."""
    planner = Planner(8, "cuda")
    layouts: tuple[Options, ...] = (
        {},
        SPLIT,
        dict(parallel_embeddings=False),
        dict(overlap_tensor_reduce=True),
    )
    for ranks, options in itertools.product((1, 2, 4), layouts):
        config = mistral(
            ranks=8,
            num_layers=4,
            tensor_parallel=ranks,
            micro_batch_size=2,
            zero_stage=3,
            **options,
        )
        found, expected = planner.plan(config), one_plan(config, 8, "cuda")
        assert (
            found.needed_bytes() == expected.needed_bytes() and found.traffic == expected.traffic
        ), (ranks, options)


def test_auto_counts_what_a_rank_holds() -> None:
    """A lower ZeRO stage fits where layers are shared, and ranks that all share them gather
    nothing."""
    chosen = []
    for ranks in (1, 4):
        config = mistral(
            ranks=8, tensor_parallel=ranks, zero_stage="auto", layers_per_stage="auto", batch_size=8
        )
        stages = resolve_auto(config, 8, "cuda", 70 * 2**30)[0].multi_stage
        chosen.append((stages.zero_stage, stages.layers_per_stage))
    (alone, blocks), (shared, more_blocks) = chosen
    assert alone > shared and blocks == 1 and more_blocks >= 1
    config = mistral(ranks=4, tensor_parallel=4, zero_stage=3, layers_per_stage="auto")
    resolved, (note,) = resolve_auto(config, 4, "cuda", 70 * 2**30)
    assert resolved.multi_stage.layers_per_stage == 1 and "gathers nothing" in note.text


@pytest.mark.slow
def test_the_fewest_gpus_are_a_multiple(capsys: pytest.CaptureFixture[str]) -> None:
    """--world_size=auto counts in groups that share layers, and groups share the batch."""
    flags = [
        "@scripts/examples/mistral_7b.flags",
        "--dataset_source=random",
        "--dry_run=1",
        "--batch_size=6",
    ]
    assert main([*flags, "--world_size=auto", "--tensor_parallel=4"]) == 0
    text = capsys.readouterr().out
    assert "dry run for 4 GPUs" in text or "dry run for 8 GPUs" in text
    assert (
        "of 4 tensor-parallel ranks" in text
        and "--tensor_parallel=4" in text.rpartition("run this")[2]
    )
