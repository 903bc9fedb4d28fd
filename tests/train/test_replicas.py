"""--check_replicas_interval in the program: what changes on one rank alone ends the run before it
is used."""

from pathlib import Path
from typing import Any

import torch

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import NumericsError
from megatron_lite.train import train
from tests.support.harness import parameters_of, run_distributed, start_run, tiny_config

OPTIONS = dict(batch_size=6, train_iters=8, check_replicas_interval=2, checkpoint_interval=1)


def start(distributed: Distributed, options: dict[str, Any], fault: str) -> str:
    """Train; in iteration 6 rank 1 alone changes something. Returns the error."""
    run = start_run(distributed, tiny_config(distributed.world_size, **OPTIONS, **options))
    forward_backward = run.model.forward_backward

    def faulty(micro_batches: Any) -> torch.Tensor:
        loss = forward_backward(micro_batches)
        if distributed.rank == 1 and run.iteration + 1 == 6:
            if fault == "weight":
                dict(parameters_of(run.model))["blocks.0.mlp.up.weight"].data.view(torch.int32)[
                    -1, -1
                ] ^= 1
            elif fault == "counter":
                run.optimizer._updates.add_(1)
        return loss

    run.model.forward_backward = faulty  # type: ignore[method-assign]
    try:
        return train(run)[1]
    except NumericsError as error:
        return str(error)
    finally:
        run.model.finish()
        run.experiment.release()


def story(distributed: Distributed, root: str) -> list[str]:
    """Two runs, one after the other."""
    return [
        start(distributed, dict(experiment_dir=f"{root}/weight"), "weight"),
        start(
            distributed,
            dict(experiment_dir=f"{root}/counter", zero_stage=3, training_dtype="bf16"),
            "counter",
        ),
    ]


def test_a_rank_that_differs_ends_the_run(tmp_path: Path) -> None:
    """One bit of a weight, or one counter: named with its rank on all ranks, and nothing is saved
    after it.

    The message names the newest checkpoint from before the last good check. Until then no
    difference is found.
    """
    results = run_distributed(3, story, str(tmp_path))
    assert results[0] == results[1] == results[2]
    weight, counter = results[0]
    assert "in iteration 6: blocks.0.mlp.up.weight on rank 1. " in weight
    assert "the optimizer's updates on rank 1" in counter
    for name, message in (("weight", weight), ("counter", counter)):
        assert (
            f"the last check without a difference was at iteration 4; {tmp_path / name}/checkpoints/3 is"
            in message
        )
        assert sorted(path.name for path in (tmp_path / name / "checkpoints").iterdir()) == [
            "1",
            "2",
            "3",
            "4",
            "5",
        ]
