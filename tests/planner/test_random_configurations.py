"""The plan against what torch's allocator hands out, for configurations that a seed draws: state
exact, peak close."""

import gc
from typing import Any

import pytest

from megatron_lite.config import Config
from megatron_lite.planner.plan import Planner
from tests.support.harness import bytes_by_kind, tiny_config
from tests.support.kernel_checks import products_in_fp32
from tests.support.memory_meters import (
    AllocatorMeter,
    measured_peak,
    micro_batches,
    some,
)
from tests.support.plans import simulated_rank
from tests.support.random_configurations import Drawn, draw_configurations

DRAWN = draw_configurations(12)


def allocated(config: Config, ranks: int) -> tuple[int, int]:
    """Bytes that a rank's model takes, and the most that its second step takes beyond; nobody else
    is there."""
    gc.collect()
    with AllocatorMeter() as state:
        model = simulated_rank(config, ranks)
    model.initialize(1)
    return state.live, measured_peak(model, micro_batches(config))


@pytest.mark.parametrize(("in_fp32", "drawn"), some(DRAWN, (False, True), each=6))
def test_the_plan_is_what_is_allocated(drawn: Drawn, in_fp32: bool) -> None:
    """State to the byte, without the scratch of collectives that nobody runs here; the peak within
    1 percent.

    On processors with instructions for products of halves, and on others, which compute them from
    fp32 copies.
    """
    check(drawn.config(), drawn.ranks, in_fp32)


@pytest.mark.parametrize("splits", [False, True], ids=["whole tokens", "split tokens"])
@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.slow
def test_the_plan_is_what_ranks_allocate_that_share_layers(drawn: Drawn, splits: bool) -> None:
    """The same of two times as many ranks, two to a layer; with fp32 copies where tokens are
    whole."""
    ranks = 2 * drawn.ranks
    options = dict(drawn.options, tensor_parallel=2, sequence_tensor_parallel=splits)
    check(tiny_config(ranks, **options), ranks, in_fp32=not splits)


def check(config: Config, ranks: int, in_fp32: bool) -> None:
    """Compare the plan with what the first rank allocates."""
    with products_in_fp32(in_fp32):
        plan = Planner(ranks, "cpu").plan(config)
        state, peak = allocated(config, ranks)
    assert plan.state_bytes - bytes_by_kind(plan.model)["communication scratch"] == state
    assert plan.activations[config.performance.mlp_recompute_level].peak == pytest.approx(
        peak, rel=0.01
    ), config


@pytest.mark.parametrize(
    ("drawn", "options"),
    [
        (DRAWN[place], options)
        for place, options in zip(
            (0, 3, 5, 8),
            (
                {"fp8": "tensorwise"},
                {"fp8": "rowwise"},
                {"int8": True},
                {"fp8": "tensorwise", "zero_stage": 3},
            ),
            strict=True,
        )
    ],
    ids=["tensorwise", "rowwise", "int8", "ZeRO-3"],
)
def test_the_plan_counts_weights_in_eight_bits(drawn: Drawn, options: dict[str, Any]) -> None:
    """They stay until the next gather, with every weight buffer; rounding takes temporaries."""
    check(drawn.config(**options), drawn.ranks, in_fp32=True)


@pytest.mark.parametrize("place", [1, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_plan_counts_what_adapters_need(place: int) -> None:
    """A frozen model has no gradients and no moments, and in bf16 no fp32 copy."""
    config = DRAWN[place].config(lora_rank=4)
    check(config, DRAWN[place].ranks, in_fp32=False)
    sizes = bytes_by_kind(Planner(DRAWN[place].ranks, "cpu").plan(config).model)
    trained = sizes["optimizer moments"] // 8
    assert sizes["gradient buffers"] <= 4 * DRAWN[place].ranks * (trained + 4096 * 8)
    assert sizes["weight shards"] <= 4 * trained
