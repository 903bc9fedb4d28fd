"""The ranks of a run as a grid of pipeline x replica x shard x tensor ranks, and the groups along
its dimensions.

Tensor-parallel ranks are adjacent. torch's `init_device_mesh` would make the same groups, but
without a time-out, and with references to them that `Distributed.close` could not drop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from megatron_lite.config import DistributedConfig
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


def place_of(rank: int, world_size: int, options: DistributedConfig) -> Coordinates:
    """Return a rank's place: along the ranks the tensor coordinate changes fastest, then by default
    the data one."""
    others, tensor = divmod(rank, options.tensor_parallel)
    if options.pipeline_first:
        data, pipeline = divmod(others, options.pipeline_parallel)
    else:
        pipeline, data = divmod(
            others, world_size // (options.pipeline_parallel * options.tensor_parallel)
        )
    return Coordinates(pipeline, data, tensor)


def groups_along(dimensions: Sequence[int], places: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return the groups of ranks whose places differ only in these dimensions, each in ascending
    order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        others = tuple(
            index for dimension, index in enumerate(place) if dimension not in dimensions
        )
        groups.setdefault(others, []).append(rank)
    return [*groups.values()]


def divide(
    world: Distributed, new_group: Callable[[Sequence[int]], Any], options: DistributedConfig
) -> None:
    """Divide the ranks into groups; all ranks call this together.

    Collectives of several groups are in flight at the same time. NCCL may then deadlock unless all
    ranks start them in the same order, which they do: the order depends on the options alone, never
    on data or timing.

    new_group: creates a process group of the given ranks; all ranks call it. options: with an unset
        --data_parallel_shard, all data-parallel ranks share shards.
    """
    tensor, pipeline = options.tensor_parallel, options.pipeline_parallel
    ranks = world.world_size // (pipeline * tensor)  # data-parallel
    shard = options.data_parallel_shard or ranks
    world.places = [place_of(rank, world.world_size, options) for rank in range(world.world_size)]
    grid = [(place.pipeline, *divmod(place.data, shard), place.tensor) for place in world.places]

    def process_group(dimensions: Sequence[int]) -> tuple[list[int], Any]:
        made = [(ranks, new_group(ranks)) for ranks in groups_along(dimensions, grid)]
        return next((ranks, group) for ranks, group in made if world.rank in ranks)

    def own(
        dimensions: Sequence[int],
    ) -> tuple[int, int, torch.device, Any, Traffic, StepWatch | None]:
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
    if shard < ranks:
        world.shard, world.replicate = Group(*own((2,))), Group(*own((1,)))
        world.groups += [world.shard, world.replicate]
