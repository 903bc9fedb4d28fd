"""--debug_tensor_parallel: compare what the ranks of a tensor-parallel group must hold alike, bit by bit.

Weights and reduced gradients are compared on the shards, where several ranks have copies of them; layer outputs and the
gradients of layer inputs unless the ranks split their tokens. Every rank of the run takes part, in the same order.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.monitor.bit_hash import BITS
from megatron_lite.zero.replicas import Replicas


class CopyCheck:
    """The differences of a phase, which `report` logs.

    splits_tokens: each rank has hidden states of some of the tokens.
    """

    def __init__(self, distributed: Distributed, logger: logging.Logger, splits_tokens: bool) -> None:
        self._distributed, self._logger, self._splits_tokens = distributed, logger, splits_tokens
        self._found: list[str] = []  # of this rank's group, on its first rank
        self._compared = 0  # tensors

    def layer(self, name: str, tensor: Tensor) -> None:
        """Compare the output of a layer or the gradient of its input."""
        if tensor.dim() and self._splits_tokens:
            return
        copies = torch.stack(self._distributed.tensor.gather_tensors(tensor.detach().contiguous()))
        self._compare(name, copies, tuple(range(len(copies))))

    def shard(self, what: str, replicas: Replicas | None, shard: Tensor) -> None:
        """Compare the elements of a shard that several ranks have. what: "init", "gradient" or "update"."""
        if replicas is None or not replicas.copied:
            return
        own = torch.cat([shard[tile.offset : tile.end] for tile in replicas.copied])
        gathered = torch.stack(self._distributed.tensor.gather_tensors(own))
        sizes = [tile.numel for tile in replicas.copied]
        for tile, copies in zip(replicas.copied, gathered.split(sizes, dim=1), strict=True):
            self._compare(f"{tile.name} {what}", copies, tile.holders)

    def report(self, phase: str) -> None:
        """Log the differences since the last report, on rank 0."""
        found, compared = self._found, self._compared
        self._found, self._compared = [], 0
        everyone = self._distributed.gather_objects(found)
        if self._distributed.rank != 0:
            return
        for rank, lines in enumerate(everyone):
            for line in lines:
                self._logger.error("%s | MISMATCH %s, between rank %d and its group", phase, line, rank)
        if not any(everyone):
            self._logger.info("%s | the copies of %d tensors are equal in all tensor-parallel groups", phase, compared)

    def _compare(self, name: str, copies: Tensor, holders: tuple[int, ...]) -> None:
        """Compare the copies, (ranks, ...), of these ranks of the group."""
        self._compared += 1
        bits = copies.view(BITS[copies.itemsize])
        differs = torch.zeros_like(bits[0], dtype=torch.bool)
        for rank in holders[1:]:
            differs |= bits[rank] != bits[holders[0]]
        if (count := int(differs.sum())) and self._distributed.tensor.rank == holders[0]:
            self._found.append(f"{name}: {count:,} / {differs.numel():,} elements")
