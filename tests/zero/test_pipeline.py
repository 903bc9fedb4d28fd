"""Runs on a pipeline of thread ranks: the bits of one pipeline rank, whatever the schedule."""

from typing import Any

import pytest

from tests.support.engine_runs import Engine, Outcome
from tests.support.thread_ranks import ThreadRank, on_threads

OPTIONS = {"num_layers": 8, "batch_size": 8, "micro_batch_size": 1}
WAYS = [("breadth_first", "loop"), ("breadth_first", "v"), ("one_f_one_b", "loop"), ("interleaved", "loop")]
WAYS += [("zero_bubble_v", "v")]


def run(rank: ThreadRank, options: dict[str, Any]) -> Outcome:
    return Engine(rank, options).run(3, evaluate_every=2)


def outcome(options: dict[str, Any], data: int = 1, tensor: int = 1, pipeline: int = 1) -> Outcome:
    options = {**OPTIONS, "pipeline_parallel": pipeline, "tensor_parallel": tensor, **options}
    results = on_threads(data, tensor, run, options, pipeline=pipeline)
    for result in results[1:]:
        assert (result.losses, result.grad_norms, result.weights) == (
            results[0].losses,
            results[0].grad_norms,
            results[0].weights,
        )
    return results[0]


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize(("schedule", "placement"), WAYS)
def test_the_number_of_pipeline_ranks_changes_no_bit(schedule: str, placement: str, zero_stage: int) -> None:
    way = {"pipeline_schedule": schedule, "pipeline_placement": placement}
    tied = placement == "v"
    options = {"zero_stage": zero_stage, "tie_word_embeddings": tied, "breadth_first_micro_batches": 4}
    alone = outcome({**options}, data=2)
    split = outcome({**options, **way}, data=2, pipeline=2)
    assert (split.losses, split.grad_norms, split.weights) == (alone.losses, alone.grad_norms, alone.weights)
