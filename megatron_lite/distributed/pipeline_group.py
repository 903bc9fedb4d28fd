"""A pipeline's group of ranks, which also send each other tensors."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.distributed.rank_group import Group
from megatron_lite.distributed.traffic import Handle

# see `from_owner`
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64)
_HEAD = 8


class PipelineGroup(Group):
    """A group whose ranks send each other tensors.

    messages: process groups for tensors to lower and to higher ranks. Two ranks may send in both
    directions at once, which NCCL can only do in two groups.
    """

    messages: tuple[Any, ...] = ()

    def send(self, tensor: Tensor, peer: int) -> Handle:
        """Start sending a contiguous tensor, which must not change before `wait`."""
        group, tag = self.messages[peer > self.rank], self._next_message("send", peer)
        work: Any = dist.isend(tensor, group=group, group_dst=peer, tag=tag)
        return self.traffic.started("send", tensor, work, tensor.nbytes)

    def receive(self, tensor: Tensor, peer: int) -> Handle:
        """Start receiving into a contiguous tensor. Two ranks' messages arrive in the order in
        which they are sent."""
        group, tag = self.messages[peer < self.rank], self._next_message("receive", peer)
        work: Any = dist.irecv(tensor, group=group, group_src=peer, tag=tag)
        return self.traffic.started("receive", tensor, work, 0)

    def from_owner(self, tensor: Tensor | None, owner: int) -> Tensor:
        """Return rank `owner`'s tensor on every rank; the others pass None. Several ranks read the
        device."""
        if self.rank == owner:
            assert tensor is not None
            if peers := [peer for peer in range(self.world_size) if peer != owner]:
                head = torch.tensor(
                    [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape], device=self.device
                )
                head = torch.nn.functional.pad(head, (0, _HEAD - len(head)))
                for handle in [
                    self.send(it.contiguous(), peer) for peer in peers for it in (head, tensor)
                ]:
                    handle.wait()
            return tensor
        head = torch.empty(_HEAD, dtype=torch.int64, device=self.device)
        self.receive(head, owner).wait()
        dtype, dims, *shape = head.tolist()
        received = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device=self.device)
        self.receive(received, owner).wait()
        return received

    def connect(self) -> None:
        """Send something both ways between each pair of ranks, in the same order on both."""
        one = torch.zeros(1, device=self.device)
        for low, high in itertools.combinations(range(self.world_size), 2):
            if self.rank in (low, high):
                first, second = (
                    (self.send, self.receive) if self.rank == low else (self.receive, self.send)
                )
                first(one, high + low - self.rank).wait()
                second(one, high + low - self.rank).wait()

    @functools.cached_property
    def _numbers(self) -> Counter[tuple[str, int]]:
        """Messages sent and received so far, by peer."""
        return Counter()

    def _next_message(self, kind: str, peer: int) -> int:
        self._numbers[kind, peer] += 1
        return self._numbers[kind, peer] % 2**30
