"""Memory layout: layers -> stages -> flat ranges -> shards -> buffers. Pure arithmetic, no
tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_lite.config.system import number_of_stages
from megatron_lite.parameter import ParameterSpec
from megatron_lite.tiles import Tile

# Parameters and shards start at multiples of 64 elements: 128 bytes in the smallest dtypes (bf16,
# fp16).
ALIGNMENT = 64


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ParameterSlot:
    """A parameter's position in a flat range of its stage."""

    spec: ParameterSpec
    offset: int  # elements

    @property
    def numel(self) -> int:
        return self.spec.local_numel

    @property
    def end(self) -> int:
        return self.offset + self.spec.local_numel


@dataclass(frozen=True)
class UpdateRange:
    """Consecutive elements with the same update rule; bounds are relative to the shard's start."""

    start: int
    end: int
    is_matrix: bool
    weight_decay: float
    lr_scale: float
    slot: int  # index of the first parameter in the layout


@dataclass(frozen=True)
class FlatLayout:
    """A flat range of (tensor-parallel parts of) parameters: world_size shards of shard_numel
    elements each.

    Shards follow the data-parallel ranks or, with replicas, s * R + r for rank s in the group of
    replica r.
    """

    slots: tuple[ParameterSlot, ...]
    world_size: int
    shard_numel: int
    replicas: int = 1  # R; see `replica_shards.py`

    @property
    def numel(self) -> int:
        return self.world_size * self.shard_numel

    def start(self, rank: int) -> int:
        """Return the offset of a data-parallel rank's shard."""
        replica, place = divmod(rank, self.world_size // self.replicas)
        return (place * self.replicas + replica) * self.shard_numel

    def holder(self, shard: int) -> int:
        """Return the data-parallel rank that owns a shard."""
        place, replica = divmod(shard, self.replicas)
        return replica * (self.world_size // self.replicas) + place

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Padding, as (start, end) elements of the range."""
        starts = [slot.offset for slot in self.slots[1:]] + [self.numel]
        return [
            (slot.end, start)
            for slot, start in zip(self.slots, starts, strict=True)
            if slot.end < start
        ]

    @property
    def first_matrix(self) -> int:
        """Offset of the first hidden matrix; without any, the end of the range."""
        return next((slot.offset for slot in self.slots if slot.spec.matrix_rows), self.numel)

    def update_ranges(self, rank: int, separate: bool = False) -> list[UpdateRange]:
        """Cut a rank's shard into ranges of one update rule, weight decay and learning-rate scale.

        `separate`: cut at every parameter. Padding belongs to the parameter before it: its weights,
        gradients and moments are zero, and every rule keeps zeros at zero.
        """
        firsts: list[int] = []  # index of the first parameter of each range
        for index, slot in enumerate(self.slots):
            if (
                separate
                or not firsts
                or _update_kind(self.slots[firsts[-1]].spec) != _update_kind(slot.spec)
            ):
                firsts.append(index)
        starts = [self.slots[index].offset for index in firsts]
        low, ends = self.start(rank), starts[1:] + [self.numel]
        ranges = [
            UpdateRange(
                max(start - low, 0),
                min(end - low, self.shard_numel),
                *_update_kind(self.slots[index].spec),
                index,
            )
            for index, start, end in zip(firsts, starts, ends, strict=True)
        ]
        return [part for part in ranges if part.start < part.end]

    def pieces(self, rank: int) -> Iterator[tuple[ParameterSlot, int, int]]:
        """Yield the parameters in a rank's shard: (slot, start, end), bounds in elements of the
        parameter."""
        low = self.start(rank)
        high = low + self.shard_numel
        for slot in self.slots:
            start, end = max(slot.offset, low), min(slot.end, high)
            if start < end:
                yield slot, start - slot.offset, end - slot.offset

    def tiles(
        self, rank: int, tensor_rank: int | None = None
    ) -> Iterator[tuple[ParameterSpec, Tile]]:
        """Yield the tiles in a data-parallel rank's shard. tensor_rank: defaults to this rank's."""
        low = self.start(rank)
        for slot in self.slots:
            spec = slot.spec if tensor_rank is None else slot.spec.on(tensor_rank)
            start = slot.offset - low
            if start < self.shard_numel and start + spec.local_numel > 0:
                for held in spec.tiles:
                    for tile in held.cut(-start, self.shard_numel - start):
                        yield spec, tile._replace(offset=start + tile.offset)


def _update_kind(spec: ParameterSpec) -> tuple[bool, float, float]:
    return bool(spec.matrix_rows), spec.weight_decay, spec.lr_scale


def lay_out(specs: Sequence[ParameterSpec], ranks: int, replicas: int = 1) -> FlatLayout:
    """Lay out parameters in a flat range at aligned offsets, grouped by update rule. ranks: per
    replica.

    Hidden matrices come last, and parameters without weight decay before those with it.
    """
    slots = []
    offset = 0
    world_size = ranks * replicas
    for spec in sorted(specs, key=_update_kind):  # stable: in declared order within a group
        slots.append(ParameterSlot(spec, offset))
        offset = round_up(offset + spec.padded_numel, ALIGNMENT)
    shard_numel = round_up(offset, world_size * ALIGNMENT) // world_size
    return FlatLayout(tuple(slots), world_size, shard_numel, replicas)


def split_into_stages(num_layers: int, layers_per_stage: float) -> list[range]:
    """Split the layers into stages, as ranges of layer indices: [embedding], [blocks...]...,
    [head].

    Fractions alternate: 1.5 produces stages of one and two blocks.
    """
    count = number_of_stages(num_layers, layers_per_stage) - 2
    ends = [min(num_layers, int(index * layers_per_stage)) for index in range(count + 1)]
    blocks = [range(1 + start, 1 + end) for start, end in itertools.pairwise(ends)]
    return [range(0, 1), *blocks, range(num_layers + 1, num_layers + 2)]


@dataclass(frozen=True)
class BufferPlan:
    """Which buffer each stage uses, and the size of each buffer."""

    placement: dict[int, int]  # stage -> buffer; absent: none needed
    sizes: tuple[int, ...]  # elements
    owned: tuple[bool, ...]  # whether a single stage uses the buffer


def plan_buffers(
    stage_sizes: Mapping[int, int],
    num_buffers: int,
    keep_apart: frozenset[int],
    every: bool = False,
) -> BufferPlan:
    """Assign buffers to stages round-robin; each buffer is as large as the largest of its stages.

    Stages of size 0 get no buffer (gradients of frozen stages) or, with `every`, an empty one
    (weights of a tied head whose norm has none). Stages in `keep_apart` (a tied embedding, needed
    first and last) get their own buffer. Neither takes part in the round-robin.
    """
    needy = [stage for stage, size in stage_sizes.items() if size or every]
    apart = [stage for stage in needy if stage in keep_apart or not stage_sizes[stage]]
    shared = [stage for stage in needy if stage not in apart]
    count = min(num_buffers, len(shared))
    placement = {stage: position % count for position, stage in enumerate(shared)}
    placement |= {stage: count + position for position, stage in enumerate(apart)}
    users = [
        [stage for stage in needy if placement[stage] == buffer]
        for buffer in range(count + len(apart))
    ]
    sizes = tuple(max(stage_sizes[stage] for stage in stages) for stages in users)
    return BufferPlan(placement, sizes, tuple(len(stages) == 1 for stages in users))
