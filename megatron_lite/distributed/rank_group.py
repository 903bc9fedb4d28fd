"""A group of ranks and its collectives, over NCCL on GPUs and point to point on CPU.

On CPU, gloo's reduce-scatter moves as many bytes as an all-reduce, and its all-gather takes three
times as long as a send/receive pair. So here every rank sends each peer the slice that the peer
needs, directly between the flat buffers. An all-reduce is a reduce-scatter and an all-gather,
except that two ranks send each other the whole buffer: as many bytes, but in one round, which takes
0.7 of the time for 1 MiB.

Sums are taken in rank order on CPU, and by `sum_in_rank_order` on any device, so that results
depend on neither timing nor ZeRO stage. NCCL sums in the order of its own algorithm: around a ring
starting next to the slice's owner, or in the switches between GPUs. NCCL chooses the algorithm by
size, topology and version; --deterministic=1 pins it (`startup.NCCL_RING`), so that equal sizes on
the same GPUs are bitwise reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.distributed.cpu_collectives import PairwiseSum, Works
from megatron_lite.distributed.step_watch import Event, StepWatch
from megatron_lite.distributed.traffic import FirstWait, Handle, Traffic

# A CPU reduction receives into a ring of chunks per peer: small enough to be added while in the
# cache, and enough of them to keep transfers overlapped with computation.
REDUCTION_CHUNK_NUMEL = 2**18
REDUCTION_SLOTS = 8


class Group:
    """A group of ranks including this one, and its collectives, which are no-ops for a single rank.

    rank, world_size: within the group. group: NCCL's or gloo's. watch: enforces the step timeout on
    a GPU.
    """

    symmetric_memory: Any = None  # torch's library for it, if the collectives' buffers are there

    def __init__(
        self,
        rank: int,
        world_size: int,
        device: torch.device,
        group: Any,
        traffic: Traffic,
        watch: StepWatch | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.group = group
        self.traffic, self.watch = traffic, watch
        self.device_type = device.type  # in a plan, the planned device's
        self._tag = 0
        self._scratch: Tensor | None = None
        self._reduction: Handle | None = None

    def all_gather(self, buffer: Tensor, kind: str = "gather") -> Handle:
        """All-gather a flat buffer, (world_size * n,), in place; each rank contributes slice
        `rank`."""
        if self.world_size == 1:
            return Works()
        slices = buffer.view(self.world_size, -1)
        if self.device.type == "cuda":
            work = _nccl("all_gather_single", "all_gather_into_tensor")(
                buffer, slices[self.rank], group=self.group, async_op=True
            )
            return self._started(kind, buffer, work)
        return self._started(kind, buffer, self._pairwise_gather(slices))

    def reduce_scatter(self, buffer: Tensor, kind: str = "reduce") -> Handle:
        """Reduce-scatter a flat buffer, (world_size * n,), in place into slice `rank`; other slices
        become garbage.

        On CPU one reduction is in flight at a time, because it owns the scratch: starting the next
        one completes it.
        """
        if self.world_size == 1:
            return Works()
        if self.device.type == "cuda":
            own = buffer.view(self.world_size, -1)[self.rank]
            work = _nccl("reduce_scatter_single", "reduce_scatter_tensor")(
                own, buffer, group=self.group, async_op=True
            )
            return self._started(kind, buffer, work)
        self._reduction = self._started(
            kind, buffer, self._pairwise_sum(buffer.view(self.world_size, -1))
        )
        return self._reduction

    def all_reduce(self, buffer: Tensor, kind: str) -> Handle:
        """All-reduce a contiguous tensor in place, bit-identical on all ranks."""
        if self.world_size == 1:
            return Works()
        if self.device.type == "cuda":
            work = dist.all_reduce(buffer, group=self.group, async_op=True)
            return self._started(kind, buffer, work, passes=2)
        flat, rest = buffer.view(-1), -buffer.numel() % self.world_size
        if self.world_size == 2:
            work = self._pairwise_sum(flat.expand(2, -1), (1, 1, flat.numel()))
        else:
            padded = torch.cat([flat, flat.new_zeros(rest)]) if rest else flat
            slices = padded.view(self.world_size, -1)
            reduction = self._pairwise_sum(slices)

            def finish() -> None:
                reduction.wait()
                self._pairwise_gather(slices).wait()
                if rest:
                    flat.copy_(padded[: flat.numel()])

            work = FirstWait(reduction, finish)
        self._reduction = self._started(kind, buffer, work, passes=2)
        return self._reduction

    def sum_in_rank_order(self, values: Tensor) -> Tensor:
        """Return the sum of a small vector over ranks, bit-identical on all ranks."""
        return values if self.world_size == 1 else self.gathered(values, "sum").sum(dim=0)

    def largest(self, values: Tensor, kind: str) -> Tensor:
        """Return the elementwise maximum of a small tensor over ranks; NaN if any is NaN."""
        return values if self.world_size == 1 else self.gathered(values, kind).amax(dim=0)

    def gathered(self, tensor: Tensor, kind: str) -> Tensor:
        """Return all ranks' tensors, (world_size, *shape), on every rank; shapes and dtypes must
        match."""
        gathered = tensor.new_empty(self.world_size, *tensor.shape)
        gathered[self.rank] = tensor
        self.all_gather(gathered.view(-1), kind).wait()
        return gathered

    def exchange(self, own: Tensor, other: Tensor, peer: int) -> None:
        """Send a contiguous tensor to a peer while receiving one of the same size; wait for
        both."""
        moves = [(dist.isend, own), (dist.irecv, other)]
        for work in dist.batch_isend_irecv(
            [dist.P2POp(move, tensor, group=self.group, group_peer=peer) for move, tensor in moves]
        ):
            work.wait()

    def wait_for(self, event: Event) -> None:
        """Wait for a GPU event in the step that the host is queueing."""
        assert self.watch is not None, f"no events on {self.device.type}"
        self.watch.wait_for(event)

    def reduction_scratch_bytes(self, shard_numel: int, dtype: torch.dtype) -> int:
        """Return the scratch bytes that `reduce_scatter` allocates for shards of this size."""
        return reduction_scratch_bytes(self.device_type, self.world_size, shard_numel, dtype)

    # -- point to point, on CPU
    # ----------------------------------------------------------------------------------------

    def _pairwise_gather(self, slices: Tensor) -> Handle:
        tag = self._next_tag(1)
        peers = [peer for peer in range(self.world_size) if peer != self.rank]
        sends: list[Any] = [
            dist.isend(slices[self.rank], group=self.group, group_dst=peer, tag=tag)
            for peer in peers
        ]
        receives: list[Any] = [
            dist.irecv(slices[peer], group=self.group, group_src=peer, tag=tag) for peer in peers
        ]
        return Works([*receives, *sends])

    def _pairwise_sum(self, slices: Tensor, shape: tuple[int, int, int] | None = None) -> Handle:
        """Start a reduction after the previous one, whose scratch it reuses. shape: the
        scratch's."""
        if self._reduction is not None:
            self._reduction.wait()
        shape = shape or reduction_scratch_shape(self.world_size, slices.shape[1])
        size = math.prod(shape) * slices.itemsize
        if self._scratch is None or self._scratch.numel() < size:
            self._scratch = slices.new_empty(size, dtype=torch.uint8)
        scratch = self._scratch[:size].view(slices.dtype).view(shape)
        tag = self._next_tag(-(-slices.shape[1] // max(1, shape[-1])))
        return PairwiseSum(slices, scratch, self.rank, self.group, tag)

    def _next_tag(self, count: int) -> int:
        tag, self._tag = self._tag, (self._tag + count) % 2**30
        return tag

    def _started(self, kind: str, buffer: Tensor, work: Handle, passes: int = 1) -> Handle:
        """Count a collective over a full buffer. passes: 2 for an all-reduce: a reduce-scatter and
        an all-gather."""
        wire_bytes = passes * buffer.nbytes * (self.world_size - 1) // self.world_size
        return self.traffic.started(kind, buffer, work, wire_bytes)


def alone(device: torch.device) -> Group:
    """Return a group of one rank."""
    return Group(0, 1, device, None, Traffic())


def reduction_scratch_bytes(
    device_type: str, world_size: int, shard_numel: int, dtype: torch.dtype
) -> int:
    """Return the scratch bytes for reductions of shards of this size: receive chunks on CPU, none
    on a GPU."""
    if device_type == "cuda":
        return 0
    return math.prod(reduction_scratch_shape(world_size, shard_numel)) * dtype.itemsize


def reduction_scratch_shape(world_size: int, shard_numel: int) -> tuple[int, int, int]:
    """Return (slots, peers, elements per chunk) for shards of this size."""
    chunk_numel = min(shard_numel, REDUCTION_CHUNK_NUMEL)
    chunks = -(-shard_numel // chunk_numel) if shard_numel else 0
    return min(REDUCTION_SLOTS, chunks), world_size - 1, chunk_numel


def _nccl(name: str, older_name: str) -> Callable[..., Handle]:
    """Return a collective by its name in torch >= 2.13, else by the older name that 2.13
    deprecates."""
    return getattr(dist, name, None) or getattr(dist, older_name)
