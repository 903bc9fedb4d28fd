"""Plans of pipeline ranks against the memory of a step and the messages of real runs."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from megatron_lite.config import Config, DistributedConfig
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.model.layer import MicroBatch
from megatron_lite.planner.devices import data_sheet
from megatron_lite.planner.plan import Planner, SimulatedGroup, planned_durations
from megatron_lite.planner.search import Search
from megatron_lite.planner.work_time import predict_step
from pretrain_gpt import main
from tests.planner.test_plan import SIZES
from tests.support.harness import run_distributed, start_run, tiny_config
from tests.support.kernel_checks import products_in_fp32
from tests.support.memory_meters import micro_batches, second_peak, some
from tests.support.plans import one_plan, simulated_rank
from tests.support.thread_ranks import rank_grid

Options = dict[str, Any]
WAYS = [
    *(
        ("breadth_first", "loop"),
        ("breadth_first", "v"),
        ("one_f_one_b", "loop"),
        ("interleaved", "loop"),
    ),
    ("zero_bubble_v", "v"),
]
OPTIONS: Options = {"num_layers": 8, "batch_size": 8, "micro_batch_size": 1, "pipeline_parallel": 2}


def configured(schedule: str, placement: str, ranks: int = 2, **options: Any) -> Config:
    way = {
        "pipeline_schedule": schedule,
        "pipeline_placement": placement,
        "tie_word_embeddings": placement == "v",
    }
    return tiny_config(ranks, **{**OPTIONS, **way, **options})


@pytest.mark.parametrize(
    ("rank", "way"),
    some(
        [*((*way, way[1] == "v") for way in WAYS), *((*way, True) for way in WAYS[2:4])],
        (0, 1),
        each=3,
    ),
    ids=str,
)
def test_peaks_are_those_of_a_step(way: tuple[str, str, bool], rank: int) -> None:
    """The planned peak of every pipeline rank is within 1 percent of its step, whose messages are
    memory only."""
    schedule, placement, tied = way
    sizes = dict(
        SIZES, num_layers=6, batch_size=6, sequence_length=128, zero_stage=3 if rank else 1
    )
    config = configured(schedule, placement, **sizes, tie_word_embeddings=tied)
    model, batches = simulated_rank(config, 2, rank), micro_batches(config)
    model.initialize(1)
    with products_in_fp32(False):
        planned = one_plan(config, 2, "cpu", rank).activations["none"]
        peak = second_peak(lambda: model.forward_backward(batches))
    assert planned.peak == pytest.approx(peak, rel=0.01), planned.peak_at


@pytest.mark.parametrize("rank", [0, 1])
def test_peaks_of_an_evaluation(rank: int) -> None:
    """With larger micro-batches an evaluation sets the peak: a rank has the hidden states of all of
    them at once."""
    sizes = dict(
        SIZES,
        batch_size=32,
        validation_iters=1,
        eval_micro_batch_size=8,
        num_layers=4,
        sequence_length=64,
    )
    config = configured("one_f_one_b", "loop", **sizes)
    model, tokens = simulated_rank(config, 2, rank), torch.zeros(8, 64, dtype=torch.int64)
    planned = one_plan(config, 2, "cpu", rank).activations["none"]
    peak = second_peak(lambda: model.evaluate([MicroBatch(tokens, tokens) for _ in range(4)]))
    assert planned.peak_at.endswith("evaluation")
    assert planned.peak == pytest.approx(peak, rel=0.01), planned.peak_at


def run_steps(
    distributed: Distributed, cases: list[Options]
) -> list[dict[str, tuple[int, int, int, int]]]:
    """Run two real steps; return the traffic of the second and the stages' memory."""
    from megatron_lite.train import train_step

    found = []
    for options in cases:
        run = start_run(distributed, configured(ranks=distributed.world_size, **options))
        for iteration, batch in enumerate(run.data.batches("training", 0, 2), start=1):
            distributed.traffic.take()
            train_step(run, batch, iteration)
        totals = distributed.traffic.take()
        found.append({kind: counts(total) for kind, total in totals.items() if kind != "sum"})
        run.data.close()
    return found


def counts(total: Any) -> tuple[int, int, int, int]:
    return total.collectives, total.elements, total.bytes, total.wire_bytes


def test_messages_are_those_of_real_runs_and_of_the_formula() -> None:
    """Of each micro-batch a message of b s h numbers passes each border between ranks twice, as
    planned and sent.

    With a tied head on another rank, a step also moves the padded embedding once there and its
    words' gradients back.
    """
    borders = {("breadth_first", "loop", 3, False): 3, ("zero_bubble_v", "v", 1, True): 2}
    borders |= {("one_f_one_b", "loop", 1, False): 1, ("one_f_one_b", "loop", 3, True): 1}
    names = "schedule", "placement", "zero_stage", "tie_word_embeddings"
    cases: list[Options] = [dict(zip(names, case, strict=True), num_layers=4) for case in borders]
    real = run_distributed(4, run_steps, cases, pipeline_parallel=2)
    for place, (options, crossed) in enumerate(zip(cases, borders.values(), strict=True)):
        config, sent = configured(ranks=4, **options), 0
        for rank in range(4):
            plan = one_plan(config, 4, "cpu", rank)
            planned = plan.traffic
            assert {kind: counts(total) for kind, total in planned.items()} == real[rank][place], (
                options,
                rank,
            )
            sent += planned["send"].wire_bytes
        lent = 0
        if options["tie_word_embeddings"] and options["placement"] == "loop":
            words = config.model.vocab_size * config.model.hidden_size
            # from 2 data-parallel ranks
            lent = plan.model.all_stages[0].numel + 2 * words
        assert sent == 4 * (
            crossed * 8 * 2 * config.batch.sequence_length * config.model.hidden_size + lent
        )


@pytest.mark.parametrize(
    ("tensor", "pipeline", "first"), [*itertools.product((1, 2), (1, 2, 4), (False, True))]
)
def test_simulated_ranks_have_the_places_of_the_grid(
    tensor: int, pipeline: int, first: bool
) -> None:
    options = DistributedConfig(
        tensor_parallel=tensor, pipeline_parallel=pipeline, pipeline_first=first
    )
    grid = rank_grid(16, options)
    for place in itertools.product(*map(range, grid.shape)):
        group = SimulatedGroup(int(grid[place]), 16, "cpu", options=options)
        assert (group.pipeline.rank, group.data.rank, group.tensor.rank) == place
        assert (
            group.pipeline.world_size,
            group.data.world_size,
            group.tensor.world_size,
        ) == grid.shape


def test_the_plan_is_that_of_the_rank_that_needs_most() -> None:
    """1F1B holds most on the first rank; with a large vocabulary the last rank needs more."""
    for options, expected in (({}, 0), ({"vocab_size": 20000, "training_dtype": "bf16"}, 1)):
        config = configured("one_f_one_b", "loop", 4, **options)
        needed = [one_plan(config, 4, "cpu", rank).needed_bytes() for rank in range(4)]
        plan = Planner(4, "cpu").plan(config)
        assert plan.model.ranks.rank == expected
        assert plan.needed_bytes() == max(needed), needed


def test_many_micro_batches_repeat_the_first() -> None:
    """Extrapolating gives the traffic of the whole schedule, whose peak the first micro-batches
    reach."""
    for schedule in ("one_f_one_b", "interleaved"):
        few, many = (
            configured(schedule, "loop", zero_stage=3, batch_size=size) for size in (13, 41)
        )
        plan = one_plan(many, 2, "cpu", 1)
        assert plan.activations["none"].peak == one_plan(few, 2, "cpu", 1).activations["none"].peak
        steps = plan.partition.steps(many, "none", (1, 41))
        assert plan.traffic["send"].collectives == sum(step.send is not None for step in steps)


@pytest.mark.parametrize(
    ("schedule", "placement"), [("one_f_one_b", "loop"), ("zero_bubble_v", "v")]
)
def test_a_tied_embedding_keeps_something_of_every_micro_batch(
    schedule: str, placement: str
) -> None:
    """Extrapolating adds what its late backward passes need: an output and its gradient of each
    micro-batch."""
    few, many = (
        configured(schedule, placement, batch_size=size, tie_word_embeddings=True)
        for size in (13, 21)
    )
    plan = one_plan(many, 2, "cpu", 0)
    model = simulated_rank(many, 2)
    batches = micro_batches(many)
    model.initialize(1)
    peak = plan.activations["none"].peak
    measured = second_peak(lambda: model.forward_backward(batches))
    assert peak == pytest.approx(measured, rel=0.01)
    grown = peak - one_plan(few, 2, "cpu", 0).activations["none"].peak
    assert grown == 8 * 2 * plan.partition.message_bytes(many)


def test_the_predicted_bubble_is_that_of_the_formula() -> None:
    """1F1B waits (P - 1) / m of its work, of m micro-batches; only embedding and head make ranks
    unequal."""
    sizes = dict(
        hidden_size=4096, num_attention_heads=32, sequence_length=2048, max_position_embeddings=2048
    )
    config = configured(
        "one_f_one_b", "loop", **sizes, training_dtype="bf16", tie_word_embeddings=False
    )
    time = predict_step(one_plan(config, 2, "cuda", 0), data_sheet(config.distributed, "cuda", 2))
    work = sum(time.parts.values()) - time.parts["bubble"]
    assert time.parts["bubble"] / work == pytest.approx(1 / 8, rel=0.2)
    assert all(min(of) > 0 for of in planned_durations(config, 2, "cuda") or ())


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_automatic_schedule_is_as_fast_as_any_that_needs_no_more_memory(ranks: int) -> None:
    """By their plans, with ZeRO-1: within 3 percent in time of all that need at most 5 percent more
    memory."""
    sizes = dict(
        hidden_size=4096, num_attention_heads=32, sequence_length=2048, max_position_embeddings=2048
    )
    sizes |= dict(num_layers=8, batch_size=16, pipeline_parallel=ranks, vocab_size=32000)
    planner = Planner(ranks, "cuda")
    options = {**sizes, "training_dtype": "bf16", "tie_word_embeddings": False}
    found = {}
    for schedule, placement in (("auto", "auto"), *WAYS):
        plan = planner.plan(configured(schedule, placement, ranks, **options))
        time = predict_step(plan, data_sheet(plan.config.distributed, "cuda", ranks))
        found[schedule, placement] = time.seconds, plan.needed_bytes()
    automatic_s, automatic_bytes = found["auto", "auto"]
    others = [seconds for seconds, size in found.values() if size <= 1.05 * automatic_bytes]
    assert automatic_s <= 1.03 * min(others), found


def test_a_dry_run_says_what_the_pipeline_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Rank, schedule, bubble, messages and the size of the pipeline, which the command keeps."""
    flags = "--num_layers=8 --hidden_size=64 --num_attention_heads=4 --vocab_size=100 --sequence_length=64"
    flags += " --dataset_source=random --tie_word_embeddings=0 --batch_size=8 --micro_batch_size=1"
    assert main(["--dry_run=1", "--world_size=4", "--pipeline_parallel=2", *flags.split()]) == 0
    page = capsys.readouterr().out
    for text in (
        "of pipeline rank ",
        "--pipeline_schedule=zero_bubble_v",
        "bubble",
        "messages to other",
        "PP 2, predicted",
    ):
        assert text in page, page
    assert page.rpartition("run this")[2].count("--pipeline_parallel=2") == 1


def test_pipelines_are_tried_after_tensor_parallelism() -> None:
    """A search on the same ranks, or for the fewest, tries groups of 8 in pipelines last; a
    pipeline as asked stays."""
    asked = configured("one_f_one_b", "loop")
    for pipeline, expected in (
        (1, [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8)]),
        (2, [(1, 2), (2, 2)]),
    ):
        run = dataclasses.replace(
            asked, distributed=dataclasses.replace(asked.distributed, pipeline_parallel=pipeline)
        )
        tried = [
            (it.sizes["tensor"], it.sizes["pipeline"])
            for it in Search(run, 8, 64, "cuda", 1)._wider_groups()
        ]
        assert tried[: len(expected)] == expected
