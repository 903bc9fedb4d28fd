"""Whole weights out of the masters, for exports of another dtype than the training's: nothing is rounded on the way.

A flat range is put together in the memory of one rank's host, a window of every shard at a time, so that no device
needs more than a small, fixed amount beside what it holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed
    from megatron_lite.zero.flat_shard import FlatShard
    from megatron_lite.zero.multi_stage import MultiStage

WINDOW_NUMEL = 2**24  # of fp32 on every rank: 64 MiB


def master_weights(model: MultiStage, distributed: Distributed, average: bool = False) -> Iterator[tuple[str, Tensor]]:
    """(name, full weight) of the whole model, in fp32 on the host of rank 0; other ranks get an empty tensor.

    `average`: the running averages, where a parameter has one. Each is valid until the next one is asked for. Every
    rank has to iterate to the end. Rank 0 holds the largest range of a stage in fp32.
    """
    for _, part in model.parts():
        whole = _put_together(part, distributed, average)
        for slot in part.layout.slots:
            found = whole[slot.offset : slot.offset + slot.numel]
            yield slot.spec.name, found.view(slot.spec.shape) if distributed.rank == 0 else found


def _put_together(part: FlatShard, distributed: Distributed, average: bool) -> Tensor:
    """All shards of a range behind each other, (numel,) on rank 0's host; (0,) on the others."""
    world_size, shard_numel = distributed.world_size, part.layout.shard_numel
    whole = torch.empty(part.layout.numel if distributed.rank == 0 else 0)
    step = max(1, min(shard_numel, WINDOW_NUMEL // world_size))
    gathered = torch.empty(world_size, step, device=distributed.device)
    for start in range(0, shard_numel, step):
        end = min(start + step, shard_numel)
        own = part.average[start:end] if average and part.average is not None else part.weights.read(slice(start, end))
        if world_size > 1:
            gathered[distributed.rank, : end - start] = own
            distributed.all_gather(gathered.view(-1), "export").wait()
        else:
            gathered[0, : end - start] = own
        if distributed.rank == 0:
            whole.view(world_size, shard_numel)[:, start:end].copy_(gathered[:, : end - start])
    return whole
