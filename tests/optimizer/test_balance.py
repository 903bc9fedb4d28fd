"""Balance of experts: the choice bias against a float64 replay of counts, learning rates, and loads
of a skewed task."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import UsageError
from megatron_lite.model.experts import Router
from megatron_lite.monitor.watch import of_counted
from megatron_lite.optimizer.balance import Balance
from megatron_lite.train import train_step
from tests.support.harness import layers_of, run_distributed, start_run, tiny_config, train_whole

EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_token": 2, "moe_ffn_hidden_size": 16}


def followed(distributed: Distributed, options: dict[str, Any]) -> list[Any]:
    """Train; return each step's totals and biases, (blocks, ...)."""
    run = start_run(distributed, tiny_config(distributed.world_size, **options, train_iters=6))
    balance: Any = run.optimizer._followers["balance"]
    assert isinstance(balance, Balance)
    steps = []
    for iteration, batches in enumerate(run.data.batches("training", 0, 6), start=1):
        train_step(run, batches, iteration)
        biases = torch.stack([router.balance.detach() for router in balance._routers])
        steps.append((balance._totals.clone().numpy(), biases.clone().numpy()))
    return steps


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_bias_is_a_replay_of_global_counts(dtype: str) -> None:
    """On two ranks with accumulation, in fp32 at any training dtype: equal on both, and what float64
    makes of the counts."""
    options = EXPERTS | {"moe_router_bias_update_rate": 0.03, "batch_size": 8, "zero_stage": 3}
    options |= {"training_dtype": dtype, "micro_batch_size": 2}
    first, second = run_distributed(2, followed, options)
    bias = np.zeros((2, 4))
    for (totals, found), (other_totals, other) in zip(first, second, strict=True):
        counts, tokens = totals[:, :4], totals[:, -1]
        assert (counts.sum(1) == 2 * tokens).all() and (tokens == 8 * 16).all()
        signs = np.sign(counts.mean(1, keepdims=True) - counts)
        bias += 0.03 * (signs - signs.mean(1, keepdims=True))
        np.testing.assert_allclose(found, bias, rtol=0, atol=1e-7)
        np.testing.assert_array_equal(found, other)
        np.testing.assert_array_equal(totals, other_totals)


def logged(distributed: Distributed, options: dict[str, Any]) -> tuple[Any, Any, list[int]]:
    """Return the record and totals of a step, and what each router counted."""
    run = start_run(distributed, tiny_config(1, **EXPERTS | options, train_iters=1))
    (batches,) = run.data.batches("training", 0, 1)
    train_step(run, batches, 1)
    balance: Any = run.optimizer._followers["balance"]
    return balance.record(), balance._totals.numpy(), balance._totals[:, -1].tolist()


def test_the_log_says_what_the_counts_say() -> None:
    """Of the blocks that count: without what comes before the first trained one."""
    record, totals, tokens = run_distributed(1, logged, {"freeze": ("embedding", "blocks.0")})[0]
    assert tokens == [0, 64]
    loads, shares = totals[1, :4] / 64, totals[1, 4:8] / 64
    assert record["expert_auxiliary_loss"] == pytest.approx(4 * (loads * shares).sum())
    assert record["expert_z_loss"] == pytest.approx(totals[1, -3] / 64)
    assert record["largest_expert_load"] == pytest.approx(loads.max() / loads.mean())
    frozen = {"freeze": ("embedding", "blocks")}
    assert run_distributed(1, logged, frozen)[0][0] == {}


def test_watched_routers_are_those_of_the_log(tmp_path: Path) -> None:
    """Of all ranks and micro-batches, with pipelines and tensor parallelism too."""
    layouts = {"one": (1, {}), "four": (4, {"pipeline_parallel": 2, "tensor_parallel": 2})}
    lines = []
    for name, (ranks, layout) in layouts.items():
        watch = {"watch": ("experts",), "watch_interval": 1, "experiment_dir": str(tmp_path / name)}
        options = {"train_iters": 2, "log_interval": 1, "validation_iters": 0, "num_experts": 8}
        found = EXPERTS | options | layout | watch
        run_distributed(ranks, whole, found, tensor_parallel=layout.get("tensor_parallel", 1))
        lines.append(
            [
                [json.loads(line) for line in (tmp_path / name / file).read_text().splitlines()]
                for file in ("watch.jsonl", "metrics.jsonl")
            ]
        )
    (watched, metrics), (others, _) = lines
    logged = [line for line in metrics if line["phase"] == "training"]
    for line, other, log in zip(watched, others, logged, strict=True):
        assert line["experts"].pop("statistics") == ["load", "entropy", "dead"]
        assert other["experts"].pop("statistics") and [*line["experts"]] == [*other["experts"]]
        for name, values in line["experts"].items():
            assert other["experts"][name] == pytest.approx(values, rel=1e-5)
        loads, entropies, _ = zip(*line["experts"].values(), strict=True)
        assert max(loads) == pytest.approx(log["largest_expert_load"], rel=1e-5)
        assert all(1.0 < entropy < np.log(8) for entropy in entropies)


def test_a_router_that_counts_nothing_is_not_watched() -> None:
    """Two experts, one of them without a token, and a router below which all is frozen."""
    sums = torch.tensor([[0, 0, 0, 0, 0, 0, 0], [0, 4, 1, 3, 9, 2, 4]], dtype=torch.float64)
    assert of_counted(("frozen", "trained"), sums) == {"trained": (2.0, 0.5, 1.0)}


def whole(distributed: Distributed, options: dict[str, Any]) -> None:
    train_whole(distributed, tiny_config(distributed.world_size, **options))


def dropped(distributed: Distributed) -> tuple[float, float]:
    """Return the largest bias after a dropped update, and after one more that is not."""
    options = EXPERTS | {"moe_router_bias_update_rate": 0.03, "train_iters": 2}
    run = start_run(distributed, tiny_config(1, **options))
    found = []
    for iteration, batches in enumerate(run.data.batches("training", 0, 2), start=1):
        run.optimizer.loss_scale.scale.fill_(torch.inf if iteration == 1 else 1.0)
        train_step(run, batches, iteration)
        balance: Any = run.optimizer._followers["balance"]
        found.append(max(float(router.balance.abs().max()) for router in balance._routers))
    return found[0], found[1]


def test_a_dropped_update_changes_no_bias() -> None:
    before, after = run_distributed(1, dropped)[0]
    assert before == 0.0 < after


def test_learning_rates_of_experts_and_routers() -> None:
    """--mlp_lr_scale is of experts, --router_lr_scale of routers; --lr_scales and --freeze win; no
    scale makes a balance a weight."""
    options = EXPERTS | {"mlp_lr_scale": 0.5, "lr_scales": ("blocks.1.mlp.experts:3",)}
    config = tiny_config(**options, router_lr_scale=2.0, freeze=("blocks.0.mlp.router",))
    specs = {p.spec.name: p.spec for layer in layers_of(config) for p in layer.parameters()}  # type: ignore[attr-defined]
    scales = {name: spec.lr_scale for name, spec in specs.items()}
    assert scales["blocks.0.mlp.experts.up.weight"] == 0.5
    assert scales["blocks.1.mlp.experts.up.weight"] == 3.0
    assert scales["blocks.1.mlp.router.weight"] == 2.0
    assert scales["blocks.0.mlp.router.weight"] == 0.0
    assert scales["blocks.0.attention.output.weight"] == 1.0
    assert not specs["blocks.1.mlp.router.balance"].trainable


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_experts_per_token": 5}, "at most all experts"),
        ({"num_experts": 10_000, "num_layers": 10_000}, "at most 200,000 experts"),
        ({"moe_layer_frequency": 3}, "no block would have experts"),
        ({"moe_router_groups": 3}, "equally many experts"),
        ({"moe_router_groups": 4}, "two or more"),
        ({"moe_router_groups": 2, "moe_router_top_groups": 3}, "there are 2 groups"),
        ({"moe_router_groups": 2, "num_experts_per_token": 3}, "keep more groups"),
        ({"fp8": "tensorwise"}, "no products in 8 bits"),
        ({"expert_routing_type": "sinkhorn", "moe_router_choice_bias": True}, "balances the load"),
        (
            {"moe_router_choice_bias": False, "moe_router_bias_update_rate": 0.1},
            "no bias to update",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tiny_config(**EXPERTS | options)


BALANCES: dict[str, dict[str, Any]] = {
    "bias": {"moe_router_bias_update_rate": 0.01},
    **{
        kind: {"expert_auxiliary_loss_coefficient": 0.5, "moe_balance": kind}
        for kind in ("global", "sequence")
    },
    # averages over blocks, so that each may be skewed: a single one
    "micro_batch": {
        "expert_auxiliary_loss_coefficient": 0.5,
        "moe_balance": "micro_batch",
        "moe_first_dense_layers": 1,
    },
    "sinkhorn": {"expert_routing_type": "sinkhorn"},
    "none": {"expert_auxiliary_loss_coefficient": 0.0},
}


def load_after(distributed: Distributed, options: dict[str, Any], iterations: int) -> float:
    """Return the largest load over the mean in the last 50 steps, of routers that begin skewed."""
    options = EXPERTS | {"num_experts": 8, "train_iters": iterations, "log_interval": 1} | options
    run = start_run(distributed, tiny_config(1, **options, moe_router_bias=True))
    for stage in run.model.stages:
        stage.gather()
        for layer in stage.layers:
            for module in layer.modules():  # type: ignore[attr-defined]
                if isinstance(module, Router) and module.bias is not None:
                    module.bias.data.copy_(torch.linspace(1.0, -1.0, 8))
    balance: Any = run.optimizer._followers["balance"]
    loads = torch.zeros(len(balance._routers), 8, dtype=torch.float64)
    for iteration, batches in enumerate(run.data.batches("training", 0, iterations), start=1):
        train_step(run, batches, iteration)
        if iteration > iterations - 50:
            loads += balance._totals[:, :8]
    return float((loads.amax(1) / loads.mean(1)).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", BALANCES)
def test_loads_of_a_skewed_task(name: str) -> None:
    """Below 1.2 of the mean with each method; without, the first experts keep most tokens."""
    load = run_distributed(1, load_after, BALANCES[name], 500)[0]
    assert load > 1.5 if name == "none" else load < 1.2, load
