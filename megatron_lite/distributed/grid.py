"""The ranks of a run as a grid of pipeline x replica x shard x tensor ranks, and the groups along its dimensions.

Tensor-parallel ranks are adjacent. torch's `init_device_mesh` would make the same groups, but without a time-out, and
with references to them that `Distributed.close` could not drop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from megatron_lite.distributed.pipeline_group import PipelineGroup
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.rank_group import Group
from megatron_lite.distributed.step_watch import StepWatch
from megatron_lite.distributed.traffic import Traffic


class Coordinates(NamedTuple):
    """A rank's place among the pipeline, data and tensor-parallel ranks."""

    pipeline: int
    data: int
    tensor: int


def rank_grid(world_size: int, pipeline: int, tensor: int, pipeline_first: bool = False) -> torch.Tensor:
    """Return the ranks by pipeline, data and tensor-parallel rank, (P, N, T); the last changes fastest.

    pipeline_first: the pipeline ranks change faster than the data-parallel ones.
    """
    assert world_size % (pipeline * tensor) == 0, "checked with the options"
    ranks = torch.arange(world_size)
    if pipeline_first:
        return ranks.view(-1, pipeline, tensor).transpose(0, 1)
    return ranks.view(pipeline, -1, tensor)


def places_of(grid: torch.Tensor) -> list[Coordinates]:
    """Return each rank's place in a grid of ranks, (P, N, T)."""
    places = {
        rank: Coordinates(pipeline, data, tensor)
        for pipeline, plane in enumerate(grid.tolist())
        for data, row in enumerate(plane)
        for tensor, rank in enumerate(row)
    }
    return [places[rank] for rank in sorted(places)]


def groups_along(dimensions: Sequence[int], grid: torch.Tensor) -> list[list[int]]:
    """Return the groups of ranks of a grid that differ only in these dimensions, each in ascending order."""
    others = [dim for dim in range(grid.dim()) if dim not in dimensions]
    size = math.prod(grid.shape[dim] for dim in dimensions)
    groups: list[list[int]] = grid.permute(*others, *dimensions).reshape(-1, size).tolist()
    return groups


def divide(
    world: Distributed,
    new_group: Callable[[Sequence[int]], Any],
    *,
    tensor: int,
    pipeline: int = 1,
    pipeline_first: bool = False,
    shard: int = 0,
) -> None:
    """Divide the ranks into groups; all ranks call this together.

    Collectives of several groups are in flight at the same time. NCCL may then deadlock unless all ranks start them in
    the same order, which they do: the order depends on the options alone, never on data or timing.

    new_group: creates a process group of the given ranks; all ranks call it. shard: data-parallel ranks in a group of
        hybrid shards; 0: all.
    """
    grid = rank_grid(world.world_size, pipeline, tensor, pipeline_first)
    world.places = places_of(grid)
    grid = grid.reshape(pipeline, -1, shard or grid.shape[1], tensor)

    def process_group(dimensions: Sequence[int]) -> tuple[list[int], Any]:
        made = [(ranks, new_group(ranks)) for ranks in groups_along(dimensions, grid)]
        return next((ranks, group) for ranks, group in made if world.rank in ranks)

    def own(dimensions: Sequence[int]) -> tuple[int, int, torch.device, Any, Traffic, StepWatch | None]:
        ranks, group = process_group(dimensions)
        return ranks.index(world.rank), len(ranks), world.device, group, world.traffic, world.watch

    if pipeline > 1:
        world.pipeline = PipelineGroup(*own((0,)))
        world.pipeline.messages = process_group((0,))[1], process_group((0,))[1]
        world.layers = Group(*own((1, 2, 3)))
        world.groups += [world.pipeline, world.layers]
    world.data = world.layers
    if tensor > 1:
        world.data, world.tensor = Group(*own((1, 2))), Group(*own((3,)))
        world.groups += [world.data, world.tensor]
    world.shard = world.data
    if grid.shape[1] > 1:
        world.shard, world.replicate = Group(*own((2,))), Group(*own((1,)))
        world.groups += [world.shard, world.replicate]
