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
class UpdateRange:
    """A run of shard elements that are updated alike; bounds are relative to the shard."""

    start: int
    end: int
    is_matrix: bool
    weight_decay: bool
    lr_scale: float
    slot: int  # index of its first parameter in the layout


@dataclass(frozen=True)
class FlatLayout:
    """A flat range of parameters: world_size equal shards of shard_numel elements each."""

    slots: tuple[ParameterSlot, ...]
    world_size: int
    shard_numel: int

    @property
    def numel(self) -> int:
        return self.world_size * self.shard_numel

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The padding, as (start, end) in elements of the range."""
        starts = [slot.offset for slot in self.slots[1:]] + [self.numel]
        return [(slot.end, start) for slot, start in zip(self.slots, starts, strict=True) if slot.end < start]

    @property
    def has_matrices(self) -> bool:
        """Whether there are matrices between hidden layers."""
        return any(slot.spec.matrix_rows for slot in self.slots)

    @property
    def first_matrix(self) -> int:
        """Where the matrices between hidden layers begin, in elements of the range; its end if there are none."""
        return next((slot.offset for slot in self.slots if slot.spec.matrix_rows), self.numel)

    def update_ranges(self, rank: int, apart: bool = False) -> list[UpdateRange]:
        """This rank's shard cut where the matrices begin, and where weight decay or learning-rate scale change;
        `apart`: at every parameter.

        Padding goes with the parameter before it: its weight, gradient and moments are zero, and Adam leaves zeros at
        zero.
        """
        firsts: list[int] = []  # of each run of parameters that are updated alike
        for index, slot in enumerate(self.slots):
            if apart or not firsts or _update_kind(self.slots[firsts[-1]].spec) != _update_kind(slot.spec):
                firsts.append(index)
        starts = [self.slots[index].offset for index in firsts]
        low, ends = rank * self.shard_numel, starts[1:] + [self.numel]
        ranges = [
            UpdateRange(
                max(start - low, 0), min(end - low, self.shard_numel), *_update_kind(self.slots[index].spec), index
            )
            for index, start, end in zip(firsts, starts, ends, strict=True)
        ]
        return [part for part in ranges if part.start < part.end]

    def pieces(self, rank: int) -> Iterator[tuple[ParameterSlot, int, int]]:
        """What a rank's shard holds: (slot, start, end), bounds in elements of the parameter."""
        low, high = rank * self.shard_numel, (rank + 1) * self.shard_numel
        for slot in self.slots:
            start, end = max(slot.offset, low), min(slot.end, high)
            if start < end:
                yield slot, start - slot.offset, end - slot.offset


def _update_kind(spec: ParameterSpec) -> tuple[bool, bool, float]:
    return bool(spec.matrix_rows), spec.weight_decay, spec.lr_scale


def lay_out(specs: Sequence[ParameterSpec], world_size: int) -> FlatLayout:
    """Place parameters in a flat range, each at an aligned offset: those that are updated alike lie together.

    The matrices between hidden layers come last, and before them parameters exempt from weight decay first.
    """
    slots, offset = [], 0
    for spec in sorted(specs, key=_update_kind):  # stable: else as declared
        slots.append(ParameterSlot(spec, offset))
        offset = round_up(offset + spec.padded_numel, ALIGNMENT)
    return FlatLayout(tuple(slots), world_size, round_up(offset, world_size * ALIGNMENT) // world_size)


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

    placement: tuple[int | None, ...]  # stage -> buffer; None: it needs none
    sizes: tuple[int, ...]  # elements
    own: tuple[bool, ...]  # stage -> nobody else uses its buffer


def plan_buffers(
    stage_sizes: Sequence[int], num_buffers: int, keep_apart: frozenset[int], every: bool = False
) -> BufferPlan:
    """The i-th stage uses buffer i mod `num_buffers`, as large as the largest stage in it.

    Stages of size 0 need none (gradients of frozen stages) and are not counted; with `every` they get one of size 0
    (weights of a tied head whose norm has none). Stages in `keep_apart` (a tied embedding: needed first and last) get a
    buffer of their own and are not counted either.
    """
    needy = [stage for stage, size in enumerate(stage_sizes) if size or every]
    apart = [stage for stage in needy if stage in keep_apart or not stage_sizes[stage]]
    shared = [stage for stage in needy if stage not in apart]
    count = min(num_buffers, len(shared))
    placement = {stage: position % count for position, stage in enumerate(shared)}
    placement |= {stage: count + position for position, stage in enumerate(apart)}
    users = [[stage for stage in needy if placement[stage] == buffer] for buffer in range(count + len(apart))]
    return BufferPlan(
        placement=tuple(placement.get(stage) for stage in range(len(stage_sizes))),
        sizes=tuple(max(stage_sizes[stage] for stage in stages) for stages in users),
        own=tuple(stage in placement and len(users[placement[stage]]) == 1 for stage in range(len(stage_sizes))),
    )
