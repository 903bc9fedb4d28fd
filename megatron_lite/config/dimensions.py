"""The grid of ranks: a table with one row for each dimension along which ranks divide a run.

Whatever numbers, groups, plans, proves or names ranks reads this table. A new dimension is an
option in `system.py`, a row here, an attribute of `distributed.grid.Groups`, and the code that
exchanges along it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

# Groups of several dimensions: those that divide samples, and those over which weights are sharded.
SAMPLES = "samples"
DATA = "data"
# The ranks with parts of the same experts' weights.
EXPERT_PARTS = "expert_parts"


class Dimension(NamedTuple):
    """A dimension of the grid.

    name: also of the group along it. divides: what its ranks share out. option: its size; `unset`
    is the value at which nothing sets it: 1 rank, or 0, all ranks that remain. within: a dimension
    whose ranks the option counts, too. sums: the groups of several dimensions that it is part of;
    see `distributed.grid.Groups`.
    sends: its ranks send each other tensors. exchanges: each sends its own to all others, at once.
    in_layers: they exchange inside of each layer. kinds: of the collectives along it, as in
    `distributed.traffic.KINDS`. own_kinds: of those without the dimension `within`. is_near: they
    take the links within a node if a node has whole groups. remark: on its link in a plan; {name}
    is the speed along a dimension.
    saving: an option with which a search sets it. proved: sizes that `prove_layouts` draws.
    keeps_bits: no size changes a bit.
    """

    name: str
    letter: str
    divides: str
    option: str = ""
    unset: int = 1
    within: str = ""
    sums: tuple[str, ...] = ()
    sends: bool = False
    exchanges: bool = False
    in_layers: bool = False
    kinds: tuple[str, ...] = ()
    own_kinds: tuple[str, ...] = ()
    is_near: bool = False
    remark: str = ""
    saving: str = ""
    proved: tuple[int, ...] = (2, 3, 4)
    keeps_bits: bool = False


# From the dimension whose neighbours are farthest apart to that of neighbouring ranks;
# --pipeline_first moves the first one before the last.
DIMENSIONS = (
    Dimension(
        "pipeline",
        "P",
        divides="layers",
        option="pipeline_parallel",
        sends=True,
        kinds=("send",),
        remark="messages between pipeline ranks take {pipeline:,.4g} GB/s; a receive overlaps with other passes",
        keeps_bits=True,
    ),
    Dimension(
        "replicate",
        "R",
        divides=SAMPLES,
        unset=0,
        sums=("layers", DATA, SAMPLES),
        kinds=("replica gather", "replica reduce"),
    ),
    Dimension(
        "shard",
        "S",
        divides=SAMPLES,
        option="data_parallel_shard",
        unset=0,
        within="expert",
        sums=("layers", DATA, SAMPLES, "shard", "expert_shard"),
        kinds=("gather", "reduce"),
        own_kinds=("expert gather", "expert reduce"),
        is_near=True,
        remark="hybrid shards gather and reduce at {shard:,.4g} GB/s, and across replicas at {replicate:,.4g} GB/s",
        proved=(1, 2),
    ),
    Dimension(
        "expert",
        "E",
        divides=SAMPLES,
        option="expert_parallel",
        sums=("layers", DATA, SAMPLES, "shard", EXPERT_PARTS),
        exchanges=True,
        in_layers=True,
        kinds=("expert exchange",),
        is_near=True,
        remark="ranks exchange the tokens of experts at {expert:,.4g} GB/s",
        proved=(2, 4),
    ),
    Dimension(
        "tensor",
        "T",
        divides="heads, channels, vocabulary",
        option="tensor_parallel",
        sums=("layers", EXPERT_PARTS),
        in_layers=True,
        kinds=("tensor gather", "tensor reduce", "tensor sum", "tensor scale"),
        is_near=True,
        remark="tensor-parallel ranks are neighbours with {tensor:,.4g} GB/s; their collectives overlap with the "
        "matrix products that do not depend on them",
        saving="sequence_tensor_parallel",
    ),
)
OF_A_SAMPLE = tuple(row for row in DIMENSIONS if row.divides != SAMPLES)
# The dimensions along which each group extends.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        group: tuple(row.name for row in DIMENSIONS if group in (row.name, *row.sums))
        for row in DIMENSIONS
        for group in (*row.sums, row.name)
    }
)


class RankGrid:
    """The ranks of a run along each dimension.

    options: anything with the options of the table. Those that it lacks are not set.
    """

    def __init__(self, world_size: int, options: Any) -> None:
        self.world_size = world_size
        self.sizes: dict[str, int] = {
            row.name: getattr(options, row.option, row.unset) or row.unset for row in DIMENSIONS
        }
        for row in DIMENSIONS:
            self.sizes[row.name] //= self.sizes.get(row.within, 1)
        remaining = world_size // math.prod(filter(None, self.sizes.values()))
        for name, size in reversed(self.sizes.items()):
            if not size:  # the nearest dimension that nothing sets has all ranks that remain
                self.sizes[name], remaining = remaining, 1
        self._names = [*self.sizes]  # from the coordinate that changes slowest along the ranks
        if getattr(options, "pipeline_first", False):
            self._names.insert(-1, self._names.pop(0))

    @functools.cached_property
    def strides(self) -> dict[str, int]:
        """How many ranks apart the neighbours along each dimension are."""
        strides: dict[str, int] = {}
        stride = 1
        for name in reversed(self._names):
            strides[name] = stride
            stride *= self.sizes[name]
        return strides

    @property
    def shape(self) -> dict[str, int]:
        """The ranks along each dimension; those that divide samples are one, "data"."""
        shape = {row.name: self.sizes[row.name] for row in OF_A_SAMPLE}
        names = (DATA if row.divides == SAMPLES else row.name for row in DIMENSIONS)
        return {name: shape.get(name) or self.size(SAMPLES) for name in names}

    def size(self, group: str) -> int:
        """Return the ranks of a group."""
        return math.prod(self.sizes[name] for name in GROUPS[group])

    def span(self, group: str) -> int:
        """Return how many neighbouring ranks a group is spread over."""
        return max(self.sizes[name] * self.strides[name] for name in GROUPS[group])

    def place(self, rank: int) -> dict[str, int]:
        """Return a rank's number in each of its groups."""
        return {group: self._number(rank, names) for group, names in GROUPS.items()}

    def ranks(self, group: str) -> list[list[int]]:
        """Return the ranks of each group with this name, in ascending order."""
        others = [name for name in self._names if name not in GROUPS[group]]
        found: dict[int, list[int]] = {}
        for rank in range(self.world_size):
            found.setdefault(self._number(rank, others), []).append(rank)
        return [*found.values()]

    def _number(self, rank: int, names: Collection[str]) -> int:
        """Return a rank's number among those that differ in these dimensions alone."""
        number = 0
        for name in self._names:
            if name in names:
                number = number * self.sizes[name] + rank // self.strides[name] % self.sizes[name]
        return number


def ranks_per_sample(options: Any) -> int:
    """Return the number of ranks that share the work on a sample. options: as for `RankGrid`."""
    return math.prod(getattr(options, row.option, row.unset) for row in OF_A_SAMPLE)


def layer_options(options: Any) -> dict[str, Any]:
    """Return the options, with their values, of the dimensions that exchange inside of layers."""
    return {row.option: getattr(options, row.option) for row in DIMENSIONS if row.in_layers}


def ranks_per_layer(options: Any) -> int:
    """Return the number of ranks that share each layer: neighbours, in a node if they fit."""
    return int(math.prod(layer_options(options).values()))
