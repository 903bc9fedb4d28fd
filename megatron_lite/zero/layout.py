"""Where everything lies: layers -> stages -> flat ranges -> shards -> buffers. Pure arithmetic, no tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_lite.parameter import ParameterSpec

# Parameters and shards start at multiples of 64 elements: 128 bytes in the smallest dtype used (bf16, fp16).
ALIGNMENT = 64


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below the value."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ParameterSlot:
    """The place of one parameter in its stage's flat range."""

    spec: ParameterSpec
    offset: int  # elements

    @property
    def numel(self) -> int:
        return self.spec.numel

    @property
    def end(self) -> int:
        return self.offset + self.spec.numel


@dataclass(frozen=True)
class DecayRange:
    """A run of shard elements that share one weight-decay setting; bounds are relative to the shard."""

    start: int
    end: int
    weight_decay: bool


@dataclass(frozen=True)
class StageLayout:
    """The flat range of one stage: world_size equal shards of shard_numel elements each."""

    slots: tuple[ParameterSlot, ...]
    world_size: int
    shard_numel: int

    @property
    def numel(self) -> int:
        return self.world_size * self.shard_numel

    def decay_ranges(self, rank: int) -> list[DecayRange]:
        """This rank's shard cut at the border between exempt and decayed parameters (exempt ones come first).

        Padding belongs to either side: its weight, gradient and moments are zero, and Adam leaves zeros at zero.
        """
        first_decayed = next((slot.offset for slot in self.slots if slot.spec.weight_decay), self.numel)
        border = min(max(first_decayed - rank * self.shard_numel, 0), self.shard_numel)
        ranges = (DecayRange(0, border, False), DecayRange(border, self.shard_numel, True))
        return [part for part in ranges if part.end > part.start]

    def pieces(self, rank: int) -> Iterator[tuple[ParameterSlot, int, int]]:
        """What a rank's shard holds: (slot, start, end), bounds in elements of the parameter."""
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        for slot in self.slots:
            start, end = max(slot.offset, low), min(slot.end, high)
            if start < end:
                yield slot, start - slot.offset, end - slot.offset


def lay_out(specs: Sequence[ParameterSpec], world_size: int) -> StageLayout:
    """Place parameters in a flat range: those exempt from weight decay first, each at an aligned offset."""
    slots, offset = [], 0
    for spec in sorted(specs, key=lambda spec: spec.weight_decay):  # stable: declaration order within each half
        slots.append(ParameterSlot(spec, offset))
        offset = round_up(offset + spec.numel, ALIGNMENT)
    return StageLayout(tuple(slots), world_size, round_up(offset, world_size * ALIGNMENT) // world_size)


def split_into_stages(num_layers: int, layers_per_stage: float) -> list[range]:
    """Group the embedding, `num_layers` blocks and the head: [embedding], [blocks...]..., [head], as layer indices.

    Fractions balance: with 1.5, stages of one and two blocks alternate.
    """
    borders = [0]
    while borders[-1] < num_layers:
        borders.append(min(num_layers, max(borders[-1] + 1, int(len(borders) * layers_per_stage))))
    blocks = [range(1 + start, 1 + end) for start, end in zip(borders, borders[1:], strict=False)]
    return [range(0, 1), *blocks, range(num_layers + 1, num_layers + 2)]


@dataclass(frozen=True)
class BufferPlan:
    """Which buffer each stage uses, and how large each buffer is."""

    placement: tuple[int, ...]  # stage -> buffer
    sizes: tuple[int, ...]  # elements
    own: tuple[bool, ...]  # stage -> nobody else uses its buffer


def plan_buffers(stage_sizes: Sequence[int], num_buffers: int, keep_apart: frozenset[int]) -> BufferPlan:
    """Stage i uses buffer i mod `num_buffers`, as large as the largest stage in it.

    Stages in `keep_apart` (a tied embedding: needed first and last) get a buffer of their own and are not counted.
    """
    shared = [stage for stage in range(len(stage_sizes)) if stage not in keep_apart]
    count = min(num_buffers, len(shared))
    placement = {stage: position % count for position, stage in enumerate(shared)}
    placement |= {stage: count + position for position, stage in enumerate(sorted(keep_apart))}
    users = [[stage for stage in placement if placement[stage] == buffer] for buffer in range(count + len(keep_apart))]
    return BufferPlan(
        placement=tuple(placement[stage] for stage in range(len(stage_sizes))),
        sizes=tuple(max(stage_sizes[stage] for stage in stages) for stages in users),
        own=tuple(len(users[placement[stage]]) == 1 for stage in range(len(stage_sizes))),
    )
