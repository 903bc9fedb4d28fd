"""The plan against what torch's allocator hands out, for configurations that a seed draws: state exact, peak close."""

from __future__ import annotations

import gc
from collections.abc import Collection
from typing import Any

import pytest

from megatron_lite.config import Config
from megatron_lite.optimizer.optimizer import rule_of
from megatron_lite.planner.plan import Planner, SimulatedGroup
from megatron_lite.zero.multi_stage import MultiStage
from tests.support.harness import layers_of, tiny_config
from tests.support.kernel_checks import products_in_fp32
from tests.support.memory_meters import AllocatorMeter, measured_peak, micro_batches
from tests.support.random_configurations import Drawn, draw_configurations

DRAWN = draw_configurations(12)
# Of ZeRO-2 in bf16 and ZeRO-3 in fp32; the others are slow.
QUICK = (4, 5)


def allocated(config: Config, ranks: int) -> tuple[int, int]:
    """Bytes that a rank's model takes, and the most that its second step takes beyond; nobody else is there."""
    group = SimulatedGroup(0, ranks, "cpu", "cpu", config.distributed.tensor_parallel)
    layers = layers_of(config, group.tensor)
    gc.collect()
    with AllocatorMeter() as state:
        model = MultiStage(
            layers,
            config.multi_stage,
            config.batch,
            config.distributed.training_dtype,
            group.data,
            tensor=group.tensor,
            world=group,
            state=rule_of(config.optimizer).declared,
            averaged=config.averaging.enabled,
        )
    model.initialize(1)
    return state.live, measured_peak(model, micro_batches(config))


def cases(quick: Collection[int]) -> list[Any]:
    """All drawn configurations, of which some are quick."""
    return [
        pytest.param(drawn, id=str(number), marks=[] if number in quick else pytest.mark.slow)
        for number, drawn in enumerate(DRAWN)
    ]


@pytest.mark.parametrize("in_fp32", [False, True], ids=["bf16 products", "fp32 copies"])
@pytest.mark.parametrize("drawn", cases(QUICK))
def test_the_plan_is_what_is_allocated(drawn: Drawn, in_fp32: bool) -> None:
    """State to the byte, without the scratch of collectives that nobody runs here; the peak within 1 percent.

    On processors with instructions for products of halves, and on others, which compute them from fp32 copies.
    """
    check(drawn.config(), drawn.ranks, in_fp32)


@pytest.mark.parametrize("splits", [False, True], ids=["whole tokens", "split tokens"])
@pytest.mark.parametrize("drawn", cases(()))
def test_the_plan_is_what_ranks_allocate_that_share_layers(drawn: Drawn, splits: bool) -> None:
    """The same of two times as many ranks, two to a layer; with fp32 copies where tokens are whole."""
    ranks = 2 * drawn.ranks
    options = dict(drawn.options, tensor_parallel=2, sequence_tensor_parallel=splits)
    check(tiny_config(ranks, **options), ranks, in_fp32=not splits)


def check(config: Config, ranks: int, in_fp32: bool) -> None:
    """Compare the plan with what the first rank allocates."""
    with products_in_fp32(in_fp32):
        plan = Planner(ranks, "cpu").plan(config)
        state, peak = allocated(config, ranks)
    assert plan.state_bytes - plan.model.memory.bytes_by_kind()["communication scratch"] == state
    assert plan.activations[config.performance.mlp_recompute_level].peak == pytest.approx(peak, rel=0.01), config
