"""Full fp32 weights gathered from the master shards, for exports in another dtype than the training dtype.

Rank 0 assembles a flat range in host memory, a window of every shard at a time, so that no device needs more than a
small, fixed amount of extra memory.
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

WINDOW_NUMEL = 2**24  # fp32 elements on every rank: 64 MiB


def master_weights(model: MultiStage, distributed: Distributed, average: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, full weight) of the whole model, in fp32 on the host of rank 0; other ranks get empty tensors.

    Every rank must iterate to the end. A tensor is valid until the next one is requested. Rank 0 holds the largest flat
    range of a stage in fp32.

    average: yield running averages, where a parameter has one.
    """
    for _, part in model.parts():
        whole = _gather(part, distributed, average)
        for slot in part.layout.slots:
            found = whole[slot.offset : slot.offset + slot.numel]
            yield slot.spec.name, found.view(slot.spec.shape) if distributed.rank == 0 else found


def _gather(part: FlatShard, distributed: Distributed, average: bool) -> Tensor:
    """Return all shards of a range in rank order: (numel,) on the host of rank 0, (0,) on other ranks."""
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
