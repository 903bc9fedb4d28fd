"""Runs on a pipeline of thread ranks: the bits of one pipeline rank, whatever the schedule."""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_lite.model.layer import MicroBatch, Routing
from megatron_lite.zero.loans import BorrowedStage, Loans
from megatron_lite.zero.messages import Messages
from megatron_lite.zero.pipeline import Pass
from tests.support.engine_runs import Engine, Outcome
from tests.support.harness import LLAMA
from tests.support.thread_ranks import ThreadRank, on_threads

Options = Mapping[str, Any]
OPTIONS: Options = {"num_layers": 4, "batch_size": 8, "micro_batch_size": 1}
SCHEDULES = ("breadth_first", "one_f_one_b", "interleaved", "zero_bubble_v")
WAYS = [("breadth_first", "loop"), ("breadth_first", "v"), ("zero_bubble_v", "v")]
WAYS += [("one_f_one_b", "loop"), ("interleaved", "loop")]


def plain(rank: ThreadRank, options: dict[str, Any], steps: int) -> Outcome:
    return Engine(rank, options).run(steps, evaluate_every=2)


def outcome(
    options: Options,
    data: int = 1,
    tensor: int = 1,
    pipeline: int = 1,
    steps: int = 3,
    run: Callable[..., Outcome] = plain,
) -> tuple[Any, ...]:
    """What all ranks agree on: losses, gradient norms, evaluations (of all data ranks), weights."""
    options = {**OPTIONS, "pipeline_parallel": pipeline, "tensor_parallel": tensor, **options}
    shard = options.get("data_parallel_shard", 0)
    results: list[Outcome] = on_threads(
        data, tensor, run, options, steps, pipeline=pipeline, shard=shard
    )
    for result in results[1:]:
        assert (result.losses, result.grad_norms) == (results[0].losses, results[0].grad_norms)
        assert result.weights == results[0].weights
    evaluated = [
        [
            sum(losses)
            for losses in zip(*((*it.evaluated, *it.averaged) for it in some), strict=True)
        ]
        for some in (results[rank :: data * tensor] for rank in range(data * tensor))
    ]
    return results[0].losses, results[0].grad_norms, evaluated, results[0].weights


def micro_batches(data: int) -> Options:
    """All in one group, as a pipeline has them."""
    return {"breadth_first_micro_batches": 8 // data}


CASES: list[tuple[Options, int, int, int]] = [  # options, data, tensor, pipeline ranks
    ({"zero_stage": 1}, 2, 1, 2),
    ({"zero_stage": 3, **LLAMA, "num_layers": 8}, 2, 1, 4),
    (
        {
            "zero_stage": 2,
            "training_dtype": "bf16",
            "recompute_layers": 2,
            "mlp_recompute_level": "full",
        },
        1,
        2,
        2,
    ),
]
MORE: list[Options] = [
    {"optimizer": "muon", "zero_stage": 3},
    {"ema_type": "ema", "ema_beta": 0.5, "training_dtype": "fp16"},
    # the first pipeline rank trains nothing before the way back
    {"freeze": ("embedding", "blocks.0", "blocks.1")},
    {"num_layers": 5, "full_precision_residual": True, "training_dtype": "bf16", "zero_stage": 3},
]


@pytest.mark.parametrize(
    ("schedule", "placement", "case"),
    [
        *((*way, 0) for way in WAYS),
        *(pytest.param(*way, case, marks=pytest.mark.slow) for way in WAYS[1:3] for case in (1, 2)),
    ],
)
def test_the_number_of_pipeline_ranks_changes_no_bit(
    schedule: str, placement: str, case: int
) -> None:
    """Tied weights where embedding and head are on one rank."""
    options, data, tensor, pipeline = CASES[case]
    options = {"tie_word_embeddings": placement == "v", **options}
    split = {**options, "pipeline_schedule": schedule, "pipeline_placement": placement}
    assert outcome(split, data, tensor, pipeline) == alone(case, placement == "v")


@functools.cache
def alone(case: int, tied: bool) -> tuple[Any, ...]:
    options, data, tensor, _ = CASES[case]
    return outcome({"tie_word_embeddings": tied, **options, **micro_batches(data)}, data, tensor)


@pytest.mark.parametrize("options", MORE)
def test_nor_with_other_options(options: Options) -> None:
    assert outcome(options, 2, 1, 2) == outcome({**options, **micro_batches(2)}, 2)


# Embedding and head on different ranks: options, data, tensor and pipeline ranks.
LOOPS: list[tuple[Options, int, int, int]] = [
    (
        {
            "pipeline_schedule": "one_f_one_b",
            "ema_type": "ema",
            "ema_beta": 0.5,
            "training_dtype": "fp16",
        },
        2,
        1,
        2,
    ),
    (
        {
            "pipeline_schedule": "interleaved",
            "zero_stage": 2,
            "vocab_size": 61,
            "training_dtype": "bf16",
        },
        1,
        2,
        2,
    ),
    ({"pipeline_schedule": "breadth_first", "zero_stage": 3, "data_parallel_shard": 1}, 2, 1, 2),
    (
        {
            "pipeline_schedule": "breadth_first",
            "breadth_first_micro_batches": 2,
            "depth_first_micro_batches": 4,
        },
        1,
        1,
        4,
    ),
]
LOOPS_TOO: list[tuple[Options, int, int, int]] = [
    (
        {"pipeline_schedule": "one_f_one_b", "freeze": ("embedding.word.weight",), "zero_stage": 3},
        1,
        1,
        2,
    ),
    ({"pipeline_schedule": "one_f_one_b", "freeze": ("embedding",)}, 2, 1, 2),
    (
        {
            "pipeline_schedule": "one_f_one_b",
            "freeze": ("embedding.position.weight",),
            "full_precision_gradients": False,
        },
        2,
        1,
        2,
    ),
    ({"pipeline_schedule": "interleaved", "optimizer": "muon", "zero_stage": 3}, 2, 1, 2),
    (
        {"pipeline_schedule": "breadth_first", "ema_type": "ema", "ema_beta": 0.5, "zero_stage": 3},
        2,
        1,
        2,
    ),
    (
        {
            "pipeline_schedule": "one_f_one_b",
            "training_dtype": "bf16",
            "split_master_weights": True,
            "fp8": "rowwise",
        },
        2,
        1,
        2,
    ),
    (
        {
            "pipeline_schedule": "breadth_first",
            "input_embedding_norm": True,
            "num_weight_buffers": 1,
            "num_grad_buffers": 1,
        },
        2,
        1,
        2,
    ),
]


def looped(
    options: Options, data: int, tensor: int, pipeline: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The outcomes of tied weights on a pipeline and on one pipeline rank."""
    options = {"tie_word_embeddings": True, **options}
    split = {**options, "pipeline_placement": "loop"}
    depth_first = {"depth_first_micro_batches": 1}
    return outcome(split, data, tensor, pipeline), outcome(
        {**options, **depth_first, **micro_batches(data)}, data, tensor
    )


@pytest.mark.parametrize(
    "case", [*LOOPS, *(pytest.param(case, marks=pytest.mark.slow) for case in LOOPS_TOO)]
)
def test_a_tied_head_on_another_rank_changes_no_bit(case: tuple[Options, int, int, int]) -> None:
    """Padded vocabularies, averages, replicas, several groups of micro-batches, frozen parts of the
    embedding."""
    split, whole = looped(*case)
    assert split == whole


def test_weights_that_are_not_lent_again_are_noticed() -> None:
    """A copy from before the first step takes part in the second one."""
    receive = Loans.receive

    def only_once(self: Loans, message: Any, micro_batch: Any) -> None:
        stage = self._stages.get(message.stage)
        if (
            message.kind != "lend"
            or not isinstance(stage, BorrowedStage)
            or not hasattr(stage, "give_back")
        ):
            receive(self, message, micro_batch)
            return
        for part in stage.parts:
            self._group.receive(torch.empty_like(part.placed), message.peer).wait()

    with mock.patch.object(Loans, "receive", only_once):
        split, whole = looped({"pipeline_schedule": "one_f_one_b"}, 1, 1, 2)
    assert split[0][0] == whole[0][0] and split[0][1] != whole[0][1]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "placement"), WAYS)
@pytest.mark.parametrize("pipeline", [2, 4])
def test_twenty_steps_in_every_layout(schedule: str, placement: str, pipeline: int) -> None:
    """ZeRO 1, 2, 3 on one or two tensor-parallel and one or two data-parallel ranks."""
    for zero_stage, tensor, data, tied in itertools.product(
        (1, 2, 3), (1, 2), (1, 2), (False, True)
    ):
        options = {"num_layers": 8, "zero_stage": zero_stage, "tie_word_embeddings": tied}
        split = {**options, "pipeline_schedule": schedule, "pipeline_placement": placement}
        found = outcome(split, data, tensor, pipeline, steps=20)
        assert found == twenty_steps(tuple(options.items()), data, tensor), (options, data, tensor)


@functools.cache
def twenty_steps(options: tuple[tuple[str, Any], ...], data: int, tensor: int) -> tuple[Any, ...]:
    """The outcome of one pipeline rank, which all layouts share."""
    return outcome({**dict(options), **micro_batches(data)}, data, tensor, steps=20)


# -- messages
# ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_on_its_way_is_not_written(schedule: str) -> None:
    """A transfer may take until its sender waits for it."""
    sent: list[tuple[Tensor, Tensor]] = []
    send = Messages.send

    def remember(self: Messages, message: Any, tensor: Tensor, carried: Any = ()) -> None:
        send(self, message, tensor, carried)
        sent.extend((each, each.clone()) for each in self.sent[-1][1])

    options = {
        **OPTIONS,
        "pipeline_parallel": 2,
        "pipeline_schedule": schedule,
        "tie_word_embeddings": False,
    }
    # here, as threads would take back each other's patches
    with mock.patch.object(Messages, "send", remember):
        on_threads(1, 1, plain, options, 2, pipeline=2)
    assert sent and all(torch.equal(tensor, before) for tensor, before in sent)


def test_a_missing_wait_is_noticed() -> None:
    """Memory for a message holds no numbers before it has come."""
    options = {**OPTIONS, "pipeline_parallel": 2, "tie_word_embeddings": False}

    def take(self: Messages, message: Any, micro_batch: Any) -> Tensor:
        return self._coming.pop(message)[1][0]

    with mock.patch.object(Messages, "take", take):
        losses = on_threads(1, 1, plain, options, 1, pipeline=2)[0].losses
    assert not torch.tensor(losses).isfinite().any()


class Balanced(Engine):
    """An engine with experts, whose routers differ, and a balance of micro-batches."""

    def batches(self, iteration: int, scale: Tensor | None = None) -> list[MicroBatch]:
        """See `Engine`; evaluations count nothing."""
        batches, model = super().batches(iteration, scale), self.config.model
        if scale is None:
            return batches
        samples, shape = self.config.batch.micro_batch_size, (model.expert_blocks, 4)
        assert samples
        return [
            replace(each, routing=Routing(samples, scale, counts=torch.zeros(shape)))
            for each in batches
        ]


def balanced(rank: ThreadRank, options: dict[str, Any], steps: int) -> Outcome:
    return Balanced(rank, options).run(steps, evaluate_every=2)


BALANCED: Options = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_router_bias": True,
    "random_bias_init": True,
    "init_method_std": 0.5,
    "expert_auxiliary_loss_coefficient": 5.0,
    "moe_balance": "micro_batch",
    "tie_word_embeddings": False,
    "batch_size": 16,
    "micro_batch_size": 2,
    "recompute_layers": 2,
}
BALANCED_CASES: list[tuple[Options, int, int, int]] = [
    ({"moe_first_dense_layers": 1}, 1, 1, 2),
    ({"num_layers": 8, "zero_stage": 3}, 1, 1, 4),
    ({"training_dtype": "bf16", "sequence_tensor_parallel": True}, 2, 2, 2),
    ({"freeze": ("embedding", "blocks.0", "blocks.1")}, 2, 1, 2),
]


@pytest.mark.parametrize(
    ("way", "case"),
    [
        *((way, 0) for way in WAYS),
        *(
            pytest.param(way, case, marks=pytest.mark.slow)
            for way in WAYS
            for case in range(1, len(BALANCED_CASES))
        ),
    ],
)
def test_a_pipeline_balances_experts_as_one_rank(way: tuple[str, str], case: int) -> None:
    """By the counts of all blocks for a micro-batch, which its messages carry; see
    `tests/train/test_against_torch.py` for the loss of one rank."""
    options, data, tensor, pipeline = BALANCED_CASES[case]
    options = {**BALANCED, **options}
    split = {**options, "pipeline_schedule": way[0], "pipeline_placement": way[1]}
    one = {**options, "breadth_first_micro_batches": 8 // data}
    expected = outcome(one, data, tensor, run=balanced)
    assert outcome(split, data, tensor, pipeline, run=balanced) == expected
    with mock.patch.object(MicroBatch, "carried", ()):
        alone = outcome(split, data, tensor, pipeline, run=balanced)
    assert abs(alone[1][0] / expected[1][0] - 1) > 1e-3


def recorded(rank: ThreadRank, options: dict[str, Any]) -> tuple[list[Pass], list[Pass]]:
    """The passes of a step as they run, and those of the simulated schedule."""
    engine, passes = Engine(rank, options), list[Pass]()

    def recording(stage: Any) -> Any:
        class Recorded:
            def __getattr__(self, name: str) -> Any:
                return getattr(stage, name)

            def forward(self, hidden: Any, batch: Any, slot: int) -> Any:
                passes.append(Pass("forward", stage.index, slot))
                return stage.forward(hidden, batch, slot)

            def backward(self, grad: Any, slot: int) -> Any:
                passes.append(Pass("backward", stage.index, slot))
                return stage.backward(grad, slot)

            def backward_input(self, grad: Any, slot: int) -> Any:
                passes.append(Pass("input", stage.index, slot))
                return stage.backward_input(grad, slot)

            def backward_weights(self, slot: int) -> None:
                passes.append(Pass("weights", stage.index, slot))
                stage.backward_weights(slot)

        return Recorded()

    engine.model.wrap(recording)
    engine.model.gather_ahead()
    engine.gradients(1)
    count = engine.config.batch.sequential_micro_batches or 1
    return passes, engine.model.order.training(count, count)[rank.pipeline.rank]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_follows_the_simulated_order(schedule: str) -> None:
    options = {
        **OPTIONS,
        "pipeline_parallel": 2,
        "pipeline_schedule": schedule,
        "tie_word_embeddings": False,
    }
    for passes, simulated in on_threads(1, 1, recorded, options, pipeline=2):
        assert passes == simulated
