"""The groups of a rank along the dimensions of the grid of ranks (`config.dimensions`).

torch's `init_device_mesh` would make the same groups, but without a time-out, and with references
to them that `Distributed.close` could not drop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron_lite.config import DistributedConfig
from megatron_lite.config.dimensions import DIMENSIONS, EXPERT_PARTS, GROUPS, RankGrid
from megatron_lite.distributed.expert_group import ExpertGroup
from megatron_lite.distributed.pipeline_group import PipelineGroup
from megatron_lite.distributed.rank_group import Group
from megatron_lite.distributed.traffic import Traffic

# By name. The others are along one dimension, even if these ranks are those of a larger group.
OF_SEVERAL = frozenset(group for row in DIMENSIONS for group in row.sums)
TYPES: Mapping[str, type[Group]] = MappingProxyType(
    {"expert": ExpertGroup, **{row.name: PipelineGroup for row in DIMENSIONS if row.sends}}
)


class Groups(Group):
    """The group of all ranks, with this rank's group for each name in `GROUPS`.

    Weights are gathered and gradients reduced over `data`, with hybrid shards over `shard` and
    `replicate`; those of experts over `expert_shard` and `replicate`. Norms and losses are summed
    over `layers`, then over `pipeline`.
    """

    pipeline: PipelineGroup
    layers: Group  # the ranks with the same layers
    data: Group  # those of them with the same part of each layer
    samples: Group  # those of them with different samples
    shard: Group  # those of them that share full weights and gradients
    replicate: Group  # those with the same place in other such groups
    expert_shard: Group  # those of `shard` with the same experts
    expert: ExpertGroup  # those with different experts, which exchange tokens
    expert_parts: Group  # those that have all experts; with all on each rank, `tensor`
    tensor: Group

    def take(self, grid: RankGrid, make: Callable[[str, type[Group]], Group]) -> None:
        """Take the groups of a grid, in the same order on all ranks.

        make: returns this rank's group by name and type. Not called for one dimension of one rank,
        nor for several dimensions with the ranks of a group that there is already.
        """
        self.grid = grid
        self.groups: list[Group] = [self]
        known: dict[frozenset[str], Group] = {_with_several_ranks(grid, grid.sizes): self}
        for name, dimensions in GROUPS.items():
            of_type, several = TYPES.get(name, Group), _with_several_ranks(grid, dimensions)
            if name == EXPERT_PARTS and "expert" not in several:
                continue
            if name in OF_SEVERAL and several in known:
                group = known[several]
            elif name in OF_SEVERAL or several:
                group = make(name, of_type)
                self.groups.append(group)
            else:
                group = of_type(0, 1, self.device, None, Traffic())
            if name in OF_SEVERAL:
                known[several] = group
            setattr(self, name, group)
        if self.expert.world_size == 1:
            self.expert_parts = self.tensor


def divide(
    world: Groups, new_group: Callable[[Sequence[int]], Any], options: DistributedConfig
) -> None:
    """Divide the ranks into groups. Collective.

    Collectives of several groups are in flight at the same time. NCCL may then deadlock unless all
    ranks start them in the same order, which they do: the order depends on the options alone, never
    on data or timing.

    new_group: creates a process group of the given ranks; all ranks call it. options: with an unset
    --data_parallel_shard, all data-parallel ranks share shards.
    """
    grid = RankGrid(world.world_size, options)

    def process_group(name: str) -> Any:
        made = [(ranks, new_group(ranks)) for ranks in grid.ranks(name)]
        return next(group for ranks, group in made if world.rank in ranks)

    def make(name: str, of_type: type[Group]) -> Group:
        group = of_type(
            grid.place(world.rank)[name],
            grid.size(name),
            world.device,
            process_group(name),
            world.traffic,
            world.watch,
        )
        if isinstance(group, PipelineGroup):
            group.messages = process_group(name), process_group(name)
        return group

    world.take(grid, make)


def _with_several_ranks(grid: RankGrid, dimensions: Collection[str]) -> frozenset[str]:
    return frozenset(name for name in dimensions if grid.sizes[name] > 1)
