"""Collectives on CPU: point-to-point transfers directly between the flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_lite.distributed.traffic import Handle


class Done:
    """Handle of a collective that has finished already."""

    def wait(self) -> None:
        """Return at once."""


class Works:
    """Handle of several transfers that make up one collective."""

    def __init__(self, works: Sequence[Handle]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()


class PairwiseSum:
    """A reduce-scatter: slices arrive chunk by chunk and are added in rank order.

    buffer: (world_size * n,); slice `rank` becomes the sum of that slice over all ranks. scratch: (slots, world_size -
    1, chunk_numel). All sends and the first receives, one per slot, are posted at once and run while the caller
    computes; `wait` adds.
    """

    def __init__(self, buffer: Tensor, scratch: Tensor, rank: int, group: Any, tag: int) -> None:
        world_size = scratch.shape[1] + 1
        slices = buffer.view(world_size, -1)
        self._rank, self._scratch = rank, scratch
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._group, self._tag, self._chunk_numel = group, tag, scratch.shape[-1]
        self._chunks = list(slices[rank].split(self._chunk_numel)) if self._peers else []
        self._sends: list[Any] = [
            dist.isend(chunk, group=self._group, group_dst=peer, tag=tag + index)
            for peer in self._peers
            for index, chunk in enumerate(slices[peer].split(self._chunk_numel))
        ]
        self._receives = [self._receive(index) for index in range(min(len(scratch), len(self._chunks)))]

    def _receive(self, index: int) -> list[Any]:
        numel, slot = self._chunks[index].numel(), self._scratch[index % len(self._scratch)]
        return [
            dist.irecv(slot[row, :numel], group=self._group, group_src=peer, tag=self._tag + index)
            for row, peer in enumerate(self._peers)
        ]

    def wait(self) -> None:
        """Add each chunk as it arrives, until the own slice holds the sum over all ranks."""
        for index, own in enumerate(self._chunks):
            for work in self._receives[index]:
                work.wait()
            add_in_rank_order(own, self._rank, list(self._scratch[index % len(self._scratch)][:, : own.numel()]))
            if index + len(self._scratch) < len(self._chunks):
                self._receives.append(self._receive(index + len(self._scratch)))
        self._chunks = []
        for work in self._sends:
            work.wait()
        # A kept handle must keep neither the buffer, which may be of activations, nor the transfers, nor the group:
        # `Distributed.close` drops its last reference.
        self._sends, self._receives, self._group = [], [], None


class WholeExchange:
    """An all-reduce in which every rank sends every other its whole buffer: one round instead of two.

    buffer: (n,), becomes the sum over all ranks. received: (world_size - 1, n). Two ranks send as many bytes as with a
    reduction and a gather.
    """

    def __init__(self, buffer: Tensor, received: Tensor, rank: int, group: Any, tag: int) -> None:
        self._rank, self._tensors = rank, [(buffer, received)]
        peers = [peer for peer in range(len(received) + 1) if peer != rank]
        self._works: list[Any] = [dist.isend(buffer, group=group, group_dst=peer, tag=tag) for peer in peers]
        self._works += [
            dist.irecv(row, group=group, group_src=peer, tag=tag) for row, peer in zip(received, peers, strict=True)
        ]

    def wait(self) -> None:
        """Add the others' buffers once all transfers are done; before, the own one is still being sent."""
        for work in self._works:
            work.wait()
        for buffer, received in self._tensors:
            add_in_rank_order(buffer, self._rank, list(received))
        self._works, self._tensors = [], []  # a kept handle keeps no memory


def add_in_rank_order(own: Tensor, rank: int, others: list[Tensor]) -> None:
    """Compute own = others[0] + ... + own + ... + others[-1], own at position `rank`; overwrites `others`."""
    if rank > 0:
        total = others[0]
        for other in others[1:rank]:
            total.add_(other)
        own.add_(total)
    for other in others[rank:]:
        own.add_(other)
