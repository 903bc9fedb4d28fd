"""Compute how long a micro-batch's passes through a model's stages take, from their measured
costs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_lite.config import Config, DistributedConfig
from megatron_lite.config.dimensions import layer_options, ranks_per_layer
from megatron_lite.model.block import Block
from megatron_lite.planner.devices import data_sheet
from megatron_lite.planner.speeds import Speeds
from megatron_lite.planner.stage_costs import Cost, StageCosts
from megatron_lite.zero.pipeline import Durations
from megatron_lite.zero.stage import Stage

LEAST_S = 1e-6  # per pass


def hidden_s(cost: Cost, speeds: Speeds, dtype: str) -> float:
    """Return the time of tensor-parallel collectives that overlap with products of the same
    pass."""
    hidden = 0.0
    for overlap, count in cost.overlaps.items():
        computing = sum(speeds.item_s(item, dtype) for item in overlap.items)
        sending = speeds.collective_s(overlap.kind, 1, overlap.wire_bytes)
        hidden += count * min(sending * speeds.overlap, computing)
    return hidden


def stage_durations(
    stages: Sequence[Stage], costs: Sequence[StageCosts], speeds: Speeds, dtype: str
) -> tuple[Durations, ...]:
    """Return the seconds of each stage's passes; a backward pass that no schedule divides is all
    `input`."""

    def seconds(cost: Cost, host_s: float) -> float:
        computing = sum(count * speeds.item_s(item, dtype) for item, count in cost.work.items())
        exposed = speeds.traffic_s(cost.traffic) - hidden_s(cost, speeds, dtype)
        return max(
            LEAST_S,
            exposed + (max(computing, host_s) if speeds.waits_for_host else computing + host_s),
        )

    found: dict[int, Durations] = {}  # equal stages share their costs
    for stage, of in zip(stages, costs, strict=True):
        blocks = sum(isinstance(layer, Block) for layer in stage.layers)
        in_parts = bool(of.weights[1].work)
        shares = (1, 1, 1) if in_parts else (1, 2, 0)  # of three in the host's time for a block
        if id(of) not in found:
            pairs = zip(of.passes, shares, strict=True)
            found[id(of)] = Durations(
                *(seconds(both[1], speeds.block_s * blocks * share / 3) for both, share in pairs)
            )
    return tuple(found[id(of)] for of in costs)


def scheduled_durations(
    config: Config, stages: Sequence[Stage], costs: Sequence[StageCosts]
) -> tuple[Durations, ...]:
    """Return the durations that schedules are made with: on one device, so that all ranks and plans
    have the same."""
    dtype, shared = config.distributed.training_dtype, layer_options(config.distributed)
    options = dataclasses.replace(DistributedConfig(), training_dtype=dtype, **shared)
    sheet = data_sheet(options, "cuda", ranks_per_layer(options))
    speeds = dataclasses.replace(sheet, block_s=0.0)  # the host's
    return stage_durations(stages, costs, speeds, dtype)
