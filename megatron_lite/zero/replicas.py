"""Replicated parameters, which several ranks of a tensor-parallel group store in their shards.

Copies must stay equal, so they get the same gradient. Where each rank computes a part of the
gradient (a norm of some of the tokens, a key head that serves queries on two ranks), one collective
per stage sums the parts on the shards, in rank order. On GPUs, other replicated gradients are taken
from their first holder: NCCL may sum the gradients of different data-parallel groups in different
orders. A global norm counts each element once, on its first holder.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.distributed.rank_group import Group
from megatron_lite.kernels.tensor_collectives import SUM
from megatron_lite.parameter import ParameterSpec
from megatron_lite.zero.layout import FlatLayout


class Segment(NamedTuple):
    """Consecutive elements of a shard, and whether they count on this rank; padding counts with the
    tile before it."""

    start: int
    end: int
    counts: bool


class Replicas:
    """The tiles of a rank's shard, and which of them other ranks share."""

    def __init__(self, layout: FlatLayout, rank: int, tensor: Group) -> None:
        """Find the replicated tiles. rank: in the data-parallel group."""
        self._tensor, size = tensor, tensor.world_size
        held = [
            (spec, tile._replace(holders=tuple(holder % size for holder in tile.holders)))
            for spec, tile in layout.tiles(rank)  # of experts, holders count other groups, too
        ]
        tiles = [tile for _, tile in held]
        self.segments = _segments(
            [(tile.offset, tile.holders[0] == tensor.rank) for tile in tiles], layout.shard_numel
        )
        self.counted = [(start, end) for start, end, counts in self.segments if counts]
        self.copied = [tile for tile in tiles if len(tile.holders) > 1]
        may_differ = tensor.device.type == "cuda"
        # Each tile with the ranks whose values are summed. Copies have the same offsets in all
        # shards, so all ranks contribute the same number of elements.
        self._summed = [
            (tile, tile.holders if spec.split.sums_gradients else tile.holders[:1])
            for spec, tile in held
            if len(tile.holders) > 1 and (spec.split.sums_gradients or may_differ)
        ]
        self._numel = sum(tile.numel for tile, _ in self._summed)

    @property
    def gathered_numel(self) -> int:
        """Elements that `sum_gradients` allocates temporarily."""
        return self._tensor.world_size * self._numel

    def sum_gradients(self, shard: Tensor) -> None:
        """Sum partial gradients in a shard over the holders of each tile; make other copies
        equal."""
        if not self._numel:
            return
        gathered = shard.new_empty(self._tensor.world_size, self._numel)
        torch.cat(
            [shard[tile.offset : tile.end] for tile, _ in self._summed],
            out=gathered[self._tensor.rank],
        )
        self._tensor.all_gather(gathered.view(-1), SUM).wait()
        parts = gathered.split([tile.numel for tile, _ in self._summed], dim=1)
        for (tile, ranks), values in zip(self._summed, parts, strict=True):
            torch.sum(values[ranks[0] : ranks[-1] + 1], dim=0, out=shard[tile.offset : tile.end])


def whole_parameter(spec: ParameterSpec, local: Tensor, tensor: Group) -> Tensor:
    """Gather a parameter over a tensor-parallel group. Collective.

    local: this rank's part, returned as is if no other rank has a different part.
    """
    if spec.local_shape == spec.shape:
        return local
    gathered = local.new_empty(tensor.world_size, spec.padded_numel)
    gathered[tensor.rank, : local.numel()] = local.reshape(-1)
    tensor.all_gather(gathered.view(-1), "whole").wait()
    return assembled(spec, list(gathered))


def assembled(spec: ParameterSpec, parts: Sequence[Tensor]) -> Tensor:
    """Assemble a parameter from the flat parts, padding included, of all ranks of a tensor-parallel
    group.

    Returns a view of the first part if that part is the whole parameter.
    """
    if spec.local_shape == spec.shape:
        return parts[0][: spec.numel].view(spec.shape)
    whole = parts[0].new_empty(spec.shape)
    for rank, part in enumerate(parts):
        spec.on(rank).place(part, whole)
    return whole


def _segments(starts: list[tuple[int, bool]], end: int) -> list[Segment]:
    """Merge neighbouring tiles that both count or both do not, given their starts, into
    segments."""
    firsts = [next(run) for _, run in itertools.groupby(starts, itemgetter(1))] or [(0, True)]
    edges = [0, *(start for start, _ in firsts[1:]), end]
    return [
        Segment(*both, counts)
        for both, (_, counts) in zip(itertools.pairwise(edges), firsts, strict=True)
    ]
