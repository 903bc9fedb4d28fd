"""Collectives on CPU: point-to-point transfers directly between the flat buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_lite.distributed.traffic import Handle


class Works:
    """The handle of a collective made of several transfers; finished already if there are none."""

    def __init__(self, works: Sequence[Handle] = ()) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()


class PairwiseSum:
    """A reduction over ranks: chunks arrive from every peer and are added in rank order.

    slices: (world_size, n); peer p receives slice p, and slice `rank` becomes the sum. If all
    slices alias one buffer, this is an all-reduce in which every rank sends its whole buffer.
    scratch: (slots, world_size - 1, chunk_numel). All sends and the first receives, one per slot,
    are posted immediately and overlap with computation; `wait` adds.
    """

    def __init__(self, slices: Tensor, scratch: Tensor, rank: int, group: Any, tag: int) -> None:
        self._rank = rank
        self._scratch = scratch
        self._sends_own = slices.stride(0) == 0
        self._peers = [peer for peer in range(len(slices)) if peer != rank]
        self._group = group
        self._tag = tag
        self._chunk_numel = scratch.shape[-1]
        self._chunks = list(slices[rank].split(self._chunk_numel)) if self._peers else []
        self._sends: list[Any] = [
            dist.isend(chunk, group=self._group, group_dst=peer, tag=tag + index)
            for peer in self._peers
            for index, chunk in enumerate(slices[peer].split(self._chunk_numel))
        ]
        self._receives = [
            self._receive(index) for index in range(min(len(scratch), len(self._chunks)))
        ]

    def _receive(self, index: int) -> list[Any]:
        numel, slot = self._chunks[index].numel(), self._scratch[index % len(self._scratch)]
        return [
            dist.irecv(slot[row, :numel], group=self._group, group_src=peer, tag=self._tag + index)
            for row, peer in enumerate(self._peers)
        ]

    def wait(self) -> None:
        """Add each chunk as it arrives, without writing to memory that is still being sent."""
        if self._sends_own:
            self._finish_sends()
        for index, own in enumerate(self._chunks):
            for work in self._receives[index]:
                work.wait()
            add_in_rank_order(
                own, self._rank, list(self._scratch[index % len(self._scratch)][:, : own.numel()])
            )
            if index + len(self._scratch) < len(self._chunks):
                self._receives.append(self._receive(index + len(self._scratch)))
        self._finish_sends()
        # A caller may keep a finished handle. It must not keep alive the buffer, which may contain
        # activations, the transfers, or the group, whose last reference `Distributed.close` drops.
        self._chunks = []
        self._receives = []
        self._group = None

    def _finish_sends(self) -> None:
        for work in self._sends:
            work.wait()
        self._sends = []


def add_in_rank_order(own: Tensor, rank: int, others: list[Tensor]) -> None:
    """Compute own = others[0] + ... + own + ... + others[-1] with own at position `rank`; overwrite
    `others`."""
    if rank > 0:
        total = others[0]
        for other in others[1:rank]:
            total.add_(other)
        own.add_(total)
    for other in others[rank:]:
        own.add_(other)
