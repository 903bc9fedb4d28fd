"""The folder of a bad step: where its first number was not finite, and a replay that takes the same
step again."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.config import Config
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import NumericsError, UsageError
from megatron_lite.optimizer.bad_steps import BadStep
from megatron_lite.outputs.bad_steps import content
from megatron_lite.outputs.run import Run
from megatron_lite.seeds import derive_seed
from megatron_lite.train import train
from scripts.replay_step import checkpoint_of, configuration, read_folder, replay
from tests.support.engine_runs import digest
from tests.support.harness import run_distributed, start_run, tiny_config

BAD, ROOT = 6, Path(__file__).resolve().parents[2]


def opened(distributed: Distributed, config: Config, fault: bool) -> Run:
    """A run; with a fault, data-parallel rank 1 has NaN as gradients of its second micro-batch in
    iteration BAD."""
    run = start_run(distributed, config)
    forward_backward = run.model.forward_backward
    seed = derive_seed(config.distributed.seed, "dropout", BAD, 1, 1)

    def faulty(inputs: Any) -> torch.Tensor:
        nan = torch.full((), math.nan)
        return forward_backward(
            [
                dataclasses.replace(one, gradient_scale=nan) if one.dropout_seed == seed else one
                for one in inputs
            ]
        )

    if fault:
        run.model.forward_backward = faulty  # type: ignore[method-assign]
    return run


def story(distributed: Distributed, root: str, zero_stage: int) -> dict[str, Any]:
    """Train until the bad step, then repeat it with the fault and without."""
    options = dict(
        batch_size=8, micro_batch_size=2, train_iters=8, checkpoint_interval=4, hidden_dropout=0.1
    )
    options |= dict(on_bad_step="abort", experiment_dir=root, zero_stage=zero_stage)
    options |= dict(tensor_parallel=distributed.tensor.world_size, tie_word_embeddings=False)
    options |= dict(pipeline_parallel=distributed.pipeline.world_size)
    run, told = opened(distributed, tiny_config(distributed.world_size, **options), fault=True), {}
    with pytest.raises(NumericsError) as caught:
        train(run)
    told["error"], told["last"] = str(caught.value), run.iteration
    run.model.finish()
    run.experiment.release()
    distributed.barrier()  # rank 0 writes the folder
    folder = Path(root) / "runs" / "0" / "artifacts" / f"bad_step_{BAD}"
    for name, fault in (("again", True), ("healthy", False)):
        found = read_folder(folder)
        run = opened(distributed, configuration(found, checkpoint_of(found, None)), fault)
        told[f"{name} from"] = run.iteration
        told[name] = replay(run, found, folder / name)
        run.model.finish()
    return told


@pytest.mark.parametrize(
    ("tensor", "pipeline"),
    [*(pytest.param(*groups, marks=pytest.mark.slow) for groups in ((1, 1), (2, 1))), (1, 2)],
)
def test_a_bad_step_is_found_and_repeated(tmp_path: Path, tensor: int, pipeline: int) -> None:
    """One micro-batch of one data-parallel rank goes wrong: it is named with layer, parameter, rank
    and samples; with the same fault the replay takes the same step, bit for bit, and says that a
    step without it differs."""
    groups = dict(tensor_parallel=tensor, pipeline_parallel=pipeline)
    results = run_distributed(2 * tensor * pipeline, story, str(tmp_path), 3, **groups)
    assert all(result == results[0] for result in results)
    told = results[0]
    assert told["last"] == BAD and "stopped by --on_bad_step=abort" in told["error"]
    folder = tmp_path / "runs" / "0" / "artifacts" / f"bad_step_{BAD}"
    written = json.loads((folder / "bad_step.json").read_text())
    found = written["found"]
    assert (found["rank"], found["micro_batch"]) == (2 * (pipeline - 1) + tensor, 1), (
        "the rank with the head"
    )
    assert found["tensor"] == "the gradient of the input of head"
    assert (found["first_sample"], found["samples"]) == ((BAD - 1) * 8 + 6, 2)
    assert (
        found["parameters_not_finite"][0] == "embedding.word.weight"
        and not found["state_not_finite"]
    )
    assert (written["weights_of_iteration"], Path(written["checkpoint"]).name) == (BAD - 1, "4")
    assert sum(path.stat().st_size for path in folder.glob("*.json")) < 20_000
    code, words = told["again"]
    assert (code, told["again from"]) == (0, 4) and words.startswith(
        "the bad step is the same again: loss"
    )
    code, words = told["healthy"]
    assert code == 1 and "its update is not dropped" in words
    logs = sorted(path.name for path in (folder / "again").iterdir())
    assert logs == [
        f"tensor_logs_train_{BAD:05d}_rank_{rank:03d}.safetensors"
        for rank in range(0, 2 * pipeline, 2)
    ]


def spikes(distributed: Distributed, root: str) -> list[str]:
    """Two runs that drop many updates, one with folders and one without; the digests of their
    state."""
    options = dict(
        skip_bad_steps=True, skip_bad_steps_window=8, skip_bad_steps_sigma=1.0, train_iters=24
    )
    states = []
    saving = {"experiment_dir": root, "checkpoint_interval": 2, "max_checkpoints": 1}
    for directory in (saving, {}):
        run = opened(
            distributed, tiny_config(distributed.world_size, **options, **directory), fault=False
        )
        train(run)
        states.append(
            digest(part.read(kind) for _, part in run.model.parts() for kind in part.kinds())
        )
        run.model.finish()
        run.experiment.release()
    return states


def test_folders_are_few_and_change_no_number(tmp_path: Path) -> None:
    """A run with many bad steps leaves three folders, and ends with the same bits as one that
    leaves none. The checkpoints that the folders name stay, beside the newest one."""
    ((first, second),) = run_distributed(1, spikes, str(tmp_path))
    assert first == second
    folders = sorted((tmp_path / "runs" / "0" / "artifacts").iterdir())
    assert len(folders) == 3
    named = {str(read_folder(folder)["checkpoint"]) for folder in folders} - {"None"}
    kept = {str(path) for path in (tmp_path / "checkpoints").iterdir()}
    assert named and named < kept and len(kept) < len(named) + 4, "of twelve"
    found = read_folder(folders[0])["found"]
    assert found["largest_gradient"] and 0 < found["share"] <= 1
    with pytest.raises(UsageError, match="bad_step.json"):
        read_folder(tmp_path)


def begun_elsewhere(distributed: Distributed, root: str) -> tuple[str | None, str]:
    """A run without a checkpoint of its own, that began with another run's; the checkpoints that
    its replay takes."""
    first = tiny_config(train_iters=4, checkpoint_interval=2, experiment_dir=f"{root}/first")
    again = dict(load_checkpoint_path=f"{root}/first/checkpoints/2", allow_data_change=True, seed=7)
    second = tiny_config(train_iters=8, experiment_dir=f"{root}/second", **again)
    for config in (first, second):
        run = opened(distributed, config, fault=False)
        if config is first:
            train(run)
        run.model.finish()
        run.experiment.release()
    found = content(run, BadStep(BAD, (1.0, 1.0), (math.inf, math.inf)), {})
    path = checkpoint_of(found, None)
    replayed = opened(distributed, configuration(json.loads(json.dumps(found)), path), fault=False)
    replayed.model.finish()
    assert replayed.iteration == 2, (
        "not the initial weights, and not refused because of the other seed"
    )
    return found["checkpoint"], str(path)


def test_a_replay_begins_where_the_run_began(tmp_path: Path) -> None:
    """With the checkpoint of --load_checkpoint_path, although a newer one is beside it;
    --allow_data_change holds."""
    ((named, taken),) = run_distributed(1, begun_elsewhere, str(tmp_path))
    assert named == taken == str(tmp_path / "first" / "checkpoints" / "2")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"iteration": 0}, "not a description of a bad step"),
        ({"checkpoint": 5}, "its checkpoint is not a path"),
        ({"config": {"batch_size": "x"}}, "config: batch_size: must be of type int"),
        ({"config": {"optimizer": ["a"]}}, "config: optimizer: "),
        ({"config": []}, "config is not an object"),
    ],
)
def test_a_damaged_description_is_a_usage_error(
    tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    good = {
        "iteration": 3,
        "world_size": 1,
        "checkpoint": None,
        "loss": "0x1p0",
        "grad_norm": "nan",
        "config": {},
    }
    (tmp_path / "bad_step.json").write_text(json.dumps(good))
    assert read_folder(tmp_path)["numbers"][0] == 1.0
    (tmp_path / "bad_step.json").write_text(json.dumps(good | changes))
    with pytest.raises(UsageError, match=problem):
        read_folder(tmp_path)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    """The script repeats a spike of a plain run, from the initial weights, and exits with 0."""
    run_distributed(1, spikes, str(tmp_path))
    folder = min(
        (tmp_path / "runs" / "0" / "artifacts").iterdir(),
        key=lambda path: int(path.name.rpartition("_")[2]),
    )
    command = [sys.executable, "scripts/replay_step.py", str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert (
        "the bad step is the same again" in result.stdout + result.stderr
        and (folder / "replay").is_dir()
    )
