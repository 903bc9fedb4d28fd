"""Runs with experts: a restart, also in another layout, and what counts for the balance."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.train import train_step
from tests.support.harness import (
    full_weights,
    run_distributed,
    start_run,
    tiny_config,
    train_tiny,
    train_whole,
)

EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_token": 2,
    "moe_ffn_hidden_size": 24,
    "num_shared_experts": 1,
    "moe_router_bias_update_rate": 0.02,
    "expert_auxiliary_loss_coefficient": 0.1,
    "random_bias_init": True,
    "add_qkv_biases": False,  # the exact gradient of keys' biases is zero
}
NUMBERS = ("loss", "grad_norm", "expert_auxiliary_loss", "expert_z_loss", "largest_expert_load")


def records(folder: Path) -> list[list[float]]:
    """Return the numbers of each log line of training."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[line[name] for name in NUMBERS] for line in lines if line["phase"] == "training"]


def whole(distributed: Distributed, options: dict[str, Any]) -> Any:
    """Train a start to its end; return the weights."""
    common = EXPERTS | {"log_interval": 1, "validation_iters": 1, "validation_interval": 2}
    config = tiny_config(distributed.world_size, **common | options)
    return full_weights(train_whole(distributed, config).model)


LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank": (1, {}, {}),
    "ZeRO-3 and T=2": (2, {"zero_stage": 3}, {"tensor_parallel": 2}),
}


@pytest.mark.parametrize(
    "name", ["one rank", pytest.param("ZeRO-3 and T=2", marks=pytest.mark.slow)]
)
def test_a_restart_changes_nothing(name: str, tmp_path: Path) -> None:
    """To the bit in the same layout, to rounding in another one: balance and loads are saved, and
    the log says what it would have said."""
    ranks, layout, other = LAYOUTS[name]
    starts = {"all": [layout], "twice": [layout | {"stop_interval": 3}, other or layout]}
    found = {}
    for folder, options in starts.items():
        for each in options:
            each = {"train_iters": 6, "experiment_dir": str(tmp_path / folder)} | each
            tensor = each.get("tensor_parallel", 1)
            found[folder] = run_distributed(ranks, whole, each, tensor_parallel=tensor)[0]
    logs = [records(tmp_path / folder) for folder in starts]
    assert len(logs[0]) == 6
    if other:
        np.testing.assert_allclose(*logs, rtol=1e-5)
    else:
        assert logs[0] == logs[1]
    for key, weight in found["all"].items():
        exact = key.endswith(".balance") or not other
        np.testing.assert_allclose(found["twice"][key], weight, rtol=0, atol=0 if exact else 1e-5)
    balance = found["all"]["blocks.1.mlp.router.balance"]
    assert np.abs(balance).max() > 0.01 and abs(balance.sum()) < 1e-6


def test_a_pipeline_balances_micro_batches_as_one_rank(tmp_path: Path) -> None:
    """Logs and weights, in fp32: routers differ, so that stages alone have another loss."""
    options: dict[str, Any] = {
        "moe_balance": "micro_batch",
        "moe_router_bias": True,
        "init_method_std": 0.5,
        "micro_batch_size": 1,
        "breadth_first_micro_batches": 4,
        "train_iters": 2,
        "validation_iters": 0,
    }
    weights = []
    for ranks in (1, 2):
        run = options | {"pipeline_parallel": ranks, "experiment_dir": str(tmp_path / f"{ranks}")}
        weights.append(run_distributed(ranks, whole, run, pipeline_parallel=ranks)[0])
    np.testing.assert_allclose(records(tmp_path / "2"), records(tmp_path / "1"), rtol=1e-6)
    for name, weight in weights[0].items():
        np.testing.assert_allclose(weights[1][name], weight, rtol=0, atol=1e-6, err_msg=name)


def test_evaluation_recomputation_and_padding_count_nothing(tmp_path: Path) -> None:
    """Counts of a run that evaluates and recomputes are those of one that does not; a padded batch
    counts its real tokens, and one of padding alone none."""
    plain: dict[str, Any] = {"train_iters": 2, "validation_iters": 0}
    recomputing = plain | {
        "recompute_layers": 2,
        "validation_iters": 1,
        "validation_at_start": True,
    }
    for folder, options in {"plain": plain, "recomputing": recomputing}.items():
        run_distributed(1, whole, options | {"experiment_dir": str(tmp_path / folder)})
    assert records(tmp_path / "plain") == records(tmp_path / "recomputing")
    run = {"batch_size": 3, "micro_batch_size": 2, "allow_nondivisible_batch_size": True}
    options = EXPERTS | run | {"moe_balance": "sequence"}
    padded, empty, alone = (
        run_distributed(ranks, train_tiny, options | {"micro_batch_size": size}, 3)[0]
        for ranks, size in ((1, 2), (2, 1), (1, 1))
    )
    for name, weight in alone.weights.items():
        atol = 0 if name.endswith(".balance") else 1e-5
        for found in (padded, empty):
            np.testing.assert_allclose(found.weights[name], weight, rtol=0, atol=atol, err_msg=name)


def test_a_checkpoint_with_frozen_experts_is_a_safetensors_file(tmp_path: Path) -> None:
    """A stage's frozen weights and its balance have names of their own."""
    options = {"train_iters": 1, "freeze": ("blocks.0",), "experiment_dir": str(tmp_path)}
    run_distributed(1, whole, options)
    names = load_file(tmp_path / "checkpoints" / "1" / "rank_000.safetensors").keys()
    kinds = {name.partition(".")[2] for name in names}
    assert {"frozen.weights", "state.weights", "weights"} <= kinds


def counted(distributed: Distributed, options: dict[str, Any]) -> Any:
    """Train two steps of a padded batch; return the counts of the second and the folder's content."""
    common = {"batch_size": 5, "allow_nondivisible_batch_size": True, "train_iters": 2}
    run = start_run(distributed, tiny_config(distributed.world_size, **EXPERTS | common | options))
    for iteration, batches in enumerate(run.data.batches("training", 0, 2), start=1):
        train_step(run, batches, iteration)
    balance: Any = run.optimizer._followers["balance"]
    return balance._totals[:, :6].numpy()


def test_a_replay_takes_the_recorded_experts(tmp_path: Path) -> None:
    """In another layout, with weights whose routers choose otherwise; padding is in no record, and
    recomputation repeats what it records."""
    folder = tmp_path / "routing"
    record = {"moe_replay_routing": str(folder), "micro_batch_size": 1, "recompute_layers": 1}
    other = {"micro_batch_size": 2, "zero_stage": 3, "seed": 7}
    (wanted,) = run_distributed(1, counted, record)
    (path, *_) = sorted(folder.iterdir())
    values = np.fromfile(path, "<u2").reshape(2, 5, 16, 2)  # steps, samples, positions, choices
    np.testing.assert_array_equal(wanted[0], np.bincount(values[1].ravel() - 1, minlength=6))
    free, replayed = (
        run_distributed(2, counted, other | more)[0]
        for more in ({}, {"moe_replay_routing": str(folder)})
    )
    np.testing.assert_array_equal(replayed, wanted)
    assert (free != wanted).any()
    np.zeros_like(values[1, 0]).tofile(path)  # one sample, of which nothing is recorded
    for options, words in (({}, "1 of 10 samples"), ({"num_experts": 8}, "8x2x16.bin has 0 of 10")):
        with pytest.raises(RuntimeError, match=f"UsageError.*{words}"):
            run_distributed(1, counted, record | options)
    with pytest.raises(RuntimeError, match="UsageError.*bin: File exists; name a folder"):
        run_distributed(1, counted, {"moe_replay_routing": str(path)})


def test_sinkhorn_balances_real_tokens(tmp_path: Path) -> None:
    """The experts of the third sample are the same alone and with padding behind it."""
    sinkhorn = {"expert_routing_type": "sinkhorn", "moe_router_bias_update_rate": None}
    found = []
    for rows in (1, 2):
        record = {"moe_replay_routing": str(tmp_path / f"{rows}"), "micro_batch_size": rows}
        run_distributed(1, counted, sinkhorn | record | {"batch_size": 3})
        path, *_ = sorted((tmp_path / f"{rows}").iterdir())
        found.append(np.fromfile(path, "<u2").reshape(2, 3, -1)[0, 2])  # before an update
    np.testing.assert_array_equal(*found)
