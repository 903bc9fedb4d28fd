"""Plans of experts that ranks share out: state and traffic of real runs, and rows for twice the
mean load."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_lite.kernels.expert_exchange import PLANNED_LOAD
from megatron_lite.planner.devices import LINK_SHARE, data_sheet
from megatron_lite.planner.speeds import CollectiveSpeed
from tests.planner.test_plan import planned, run_steps
from tests.support.harness import run_distributed, tiny_config
from tests.support.plans import one_plan

EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_ffn_hidden_size": 24,
    "expert_parallel": 2,
}
CASES = [
    EXPERTS | options
    for options in (
        {"zero_stage": 1},
        {"zero_stage": 2, "optimizer": "muon"},
        {"zero_stage": 3, "training_dtype": "bf16", "mlp_recompute_level": "full"},
        {"zero_stage": 3, "freeze": ("blocks.0.mlp.experts",), "ema_type": "ema"},
    )
]
EXCHANGE = "expert exchange"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_state_and_traffic_are_those_of_real_runs(ranks: int) -> None:
    """But for the sizes of exchanges, which the load decides."""
    found = run_distributed(ranks, run_steps, CASES, expert_parallel=2)
    for case, (memory, traffic) in zip(CASES, found[0], strict=True):
        state, expected = planned(ranks, case)
        assert memory == state
        exchanges, most = traffic.pop(EXCHANGE), expected.pop(EXCHANGE)
        assert exchanges[0] == most[0] and exchanges[1] <= most[1]
        for other in ("sum", "whole"):
            expected.pop(other, None)
        assert traffic == expected, case


def test_rows_are_for_twice_the_mean_load() -> None:
    """A plan of a rank that shares out experts has room for it; state falls with the ranks."""
    large = {"hidden_size": 256, "moe_ffn_hidden_size": 1024, "batch_size": 8}
    plans = [
        one_plan(tiny_config(4, **EXPERTS | large | {"expert_parallel": ranks}), 4, "cuda")
        for ranks in (1, 2, 4)
    ]
    one, *others = [plan.activations["none"].held for plan in plans]
    for other in others:
        assert 1.3 * one < other <= PLANNED_LOAD * 1.5 * one
    states = [plan.state_bytes for plan in plans]
    assert states[0] > states[1] > states[2]


@pytest.mark.parametrize(
    ("experts", "tensor", "gb_s"),
    [(8, 1, 450), (16, 1, 50 * 15 / 8), (8, 2, 50 * 7 / 4), (32, 1, 50 * 31 / 24)],
)
def test_what_leaves_a_node_takes_the_adapter_of_its_gpu(
    experts: int, tensor: int, gb_s: float
) -> None:
    """Of the other ranks of 32 H100 some are on the same node. No ring carries an exchange."""
    sizes = {"expert_parallel": experts, "tensor_parallel": tensor, "num_experts": 32}
    options = EXPERTS | sizes | {"device": "cuda", "batch_size": 32}
    sheet = data_sheet(tiny_config(32, **options).distributed, "cuda", 32)
    assert sheet.collective_s(EXCHANGE, 0, 1e9) == pytest.approx(1 / gb_s / LINK_SHARE)


@pytest.mark.parametrize(
    ("experts", "tensor", "shard", "dense", "own"),
    [
        (1, 1, 0, 400, 400),
        (8, 1, 0, 400, 50),
        (4, 2, 0, 200, 50),
        (2, 1, 0, 400, 200),
        (16, 1, 0, 400, 50),
        (8, 1, 16, 400, 50),
        (4, 1, 8, 450, 450),
    ],
)
def test_rings_of_experts_share_the_adapters_of_a_node(
    experts: int, tensor: int, shard: int, dense: float, own: float
) -> None:
    """On 32 H100 the ranks with the same experts gather these, and all data-parallel ranks the
    rest."""
    sizes = {"expert_parallel": experts, "tensor_parallel": tensor, "data_parallel_shard": shard}
    options = EXPERTS | sizes | {"num_experts": 32, "device": "cuda", "batch_size": 32}
    sheet = data_sheet(tiny_config(32, **options).distributed, "cuda", 32)
    for kind, gb_s in {"gather": dense, "reduce": dense, "expert gather": own}.items():
        assert sheet.collective_s(kind, 0, 1e9) == pytest.approx(1 / gb_s / LINK_SHARE), kind


def test_measured_speeds_serve_the_kinds_of_experts() -> None:
    """A file that measures gathers and reductions has none of those among ranks with the same
    experts."""
    sheet = data_sheet(
        tiny_config(8, **EXPERTS, device="cuda", batch_size=32).distributed, "cuda", 8
    )
    gather, reduce = (CollectiveSpeed(0.0, speed) for speed in (1e9, 2e9))
    measured = replace(sheet, collectives={"gather": gather, "reduce": reduce})
    for kind in ("gather", "expert gather", "anything else"):
        assert measured.collective_s(kind, 1, 1e9) == 1.0, kind
    for kind in ("reduce", "expert reduce"):
        assert measured.collective_s(kind, 1, 1e9) == 0.5, kind
