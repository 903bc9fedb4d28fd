"""The process groups of a run, and the few collectives that training needs. `startup.py` joins the groups.

On CUDA these are NCCL's collectives. On CPU, gloo's reduce-scatter moves as many bytes as an all-reduce, and its
all-gather takes three times as long as a send/receive pair. Both are therefore exchanged pairwise here: every rank
sends each peer the slice that the peer needs, directly between the flat buffers.

Order of sums: on CPU, and in `sum_in_rank_order` anywhere, the order of the ranks, so that results depend on neither
timing nor ZeRO stage. NCCL's reduce-scatter sums in the order of its own algorithm: around a ring from the neighbour of
the rank that keeps the slice, or in the switches between GPUs. NCCL chooses the algorithm by size, topology and
version; --deterministic=1 pins it (`startup.NCCL_RING`), so that equal sizes on the same GPUs repeat bit by bit.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.distributed.cpu_collectives import PairwiseSum, Works
from megatron_lite.distributed.progress import Progress
from megatron_lite.distributed.step_watch import POLL_S, Event, StepWatch
from megatron_lite.distributed.traffic import Handle, Traffic
from megatron_lite.errors import is_lost_peer, lost_peer

# A pairwise reduction receives into a ring of chunks per peer: small enough to be added while they are in the cache,
# and enough of them to keep the exchange going during the computation.
REDUCTION_CHUNK_NUMEL = 2**18
REDUCTION_SLOTS = 8


class Group(Protocol):
    """The ranks that a stage is partitioned over. A dry run implements this without processes."""

    rank: int
    world_size: int
    device: torch.device

    def all_gather(self, buffer: Tensor, kind: str = "gather") -> Handle: ...

    def reduce_scatter(self, buffer: Tensor, kind: str = "reduce") -> Handle: ...

    def reduction_scratch_bytes(self, shard_numel: int, dtype: torch.dtype) -> int: ...

    def wait_for(self, event: Event) -> None: ...


class Distributed:
    """This process among its peers: rank, device, and the collectives over all data-parallel ranks.

    Args:
        local_world_size: number of ranks on this machine.
        cpu_group: gloo, with the long time-out, for agreements between hosts.
        group: NCCL or gloo, for the collectives of a step.
        watch: of the steps on a GPU; None on CPU, where the collectives of a step have the time-out themselves.
        progress: what this rank is doing, for other threads.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        local_world_size: int,
        device: torch.device,
        cpu_group: Any,
        group: Any,
        watch: StepWatch | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.rank, self.world_size, self.local_world_size, self.device = rank, world_size, local_world_size, device
        self.sharing_cores = local_world_size  # ranks that may use a core of this one, itself included
        self._cpu_group, self.group, self._watch = cpu_group, group, watch
        self.progress = progress or Progress()
        self.traffic = Traffic(world_size, self.progress)
        self._tag = 0
        self._scratch: Tensor | None = None
        self._reduction: Handle | None = None

    def close(self) -> None:
        """Leave the process groups for good, after the last collective was waited for.

        After a collective, a gloo thread drops its references to the tensors and needs Python's lock for that. If the
        thread still waits for the lock when the interpreter exits, Python kills it inside a destructor, and the process
        dies of SIGABRT. A group joins its threads when the last reference to it goes; `destroy_process_group` drops
        torch's own.
        """
        del self.group, self._cpu_group
        dist.destroy_process_group()

    # -- the three collectives of a training step ---------------------------------------------------------------

    def all_gather(self, buffer: Tensor, kind: str = "gather") -> Handle:
        """Complete a flat buffer, (world_size * n,), in place; each rank holds slice `rank`."""
        slices = buffer.view(self.world_size, -1)
        if self.device.type == "cuda":
            work = _nccl("all_gather_single", "all_gather_into_tensor")(
                buffer, slices[self.rank], group=self.group, async_op=True
            )
            return self.traffic.started(kind, buffer, work)
        tag, peers = self._next_tag(1), [peer for peer in range(self.world_size) if peer != self.rank]
        sends: list[Any] = [dist.isend(slices[self.rank], group=self.group, group_dst=peer, tag=tag) for peer in peers]
        receives: list[Any] = [dist.irecv(slices[peer], group=self.group, group_src=peer, tag=tag) for peer in peers]
        return self.traffic.started(kind, buffer, Works([*receives, *sends]))

    def reduce_scatter(self, buffer: Tensor, kind: str = "reduce") -> Handle:
        """Sum a flat buffer, (world_size * n,), over ranks into slice `rank`, in place; other slices become garbage.

        On CPU one reduction is in flight at a time, because it owns the scratch: starting the next one completes it.
        """
        if self.device.type == "cuda":
            own = buffer.view(self.world_size, -1)[self.rank]
            work = _nccl("reduce_scatter_single", "reduce_scatter_tensor")(own, buffer, group=self.group, async_op=True)
            return self.traffic.started(kind, buffer, work)
        if self._reduction is not None:
            self._reduction.wait()
        scratch = self._reduction_scratch(buffer)
        tag = self._next_tag(-(-buffer.numel() // (self.world_size * scratch.shape[-1])))
        work = PairwiseSum(buffer, scratch, self.rank, self.group, tag)
        self._reduction = self.traffic.started(kind, buffer, work)
        return self._reduction

    def sum_in_rank_order(self, values: Tensor) -> Tensor:
        """Return the sum of a small vector over ranks, bit-identical on all of them."""
        gathered = values.new_zeros(self.world_size, *values.shape)
        gathered[self.rank] = values
        self.all_gather(gathered.view(-1), "sum").wait()
        return gathered.sum(dim=0)

    def gather_tensors(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's tensor, all of one shape and dtype, in rank order, on every rank. For debugging."""
        gathered = tensor.new_empty(self.world_size, tensor.numel())
        gathered[self.rank] = tensor.detach().flatten()
        self.all_gather(gathered.view(-1), "debug").wait()
        return [row.view(tensor.shape) for row in gathered]

    # -- waiting for a GPU -------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """Mark the end of a step on the GPU, and wait for the end of the previous step.

        Raises:
            PeerError: if the previous step does not end within --distributed_timeout. So do the methods below.
        """
        if self._watch is not None:
            self._watch.end_step()

    def wait_for_device(self) -> None:
        """Wait for everything queued so far; call this before the host reads the device, which has no time-out."""
        if self._watch is not None:
            self._watch.end_step()
            self._watch.finish()

    def check_step(self) -> None:
        """Raise if the newest step is late; call this while the host waits for anything else."""
        if self._watch is not None:
            self._watch.has_ended()

    def wait_for(self, event: Event) -> None:
        """Wait for a point inside the step that the host is queueing."""
        assert self._watch is not None, f"no events on {self.device.type}"
        self._watch.wait_for(event)

    def reduction_scratch_bytes(self, shard_numel: int, dtype: torch.dtype) -> int:
        """Return the scratch bytes that `reduce_scatter` allocates for shards of this size."""
        return reduction_scratch_bytes(self.device.type, self.world_size, shard_numel, dtype)

    def _reduction_scratch(self, buffer: Tensor) -> Tensor:
        shape = reduction_scratch_shape(self.world_size, buffer.numel() // self.world_size)
        size = math.prod(shape) * buffer.itemsize
        if self._scratch is None or self._scratch.numel() < size:
            self._scratch = buffer.new_empty(size, dtype=torch.uint8)
        return self._scratch[:size].view(buffer.dtype).view(shape)

    def _next_tag(self, count: int) -> int:
        tag, self._tag = self._tag, (self._tag + count) % 2**30
        return tag

    # -- agreement between hosts, over gloo, with the long time-out ----------------------------------------------

    def agree_max(self, value: int) -> int:
        """Return the largest value of any rank. Also keeps ranks within one step of each other while data is slow."""
        tensor = torch.tensor([value], dtype=torch.int64)
        self._finish(lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._cpu_group, async_op=True))
        return int(tensor)

    def agree_sum(self, values: Sequence[int]) -> list[int]:
        """Return the sums of the ranks' values, of which all ranks have equally many."""
        tensor = torch.tensor(values, dtype=torch.int64)
        self._finish(lambda: dist.all_reduce(tensor, group=self._cpu_group, async_op=True))
        return list(map(int, tensor.tolist()))

    def barrier(self) -> None:
        """Wait for every rank."""
        self.agree_max(0)

    def wait_for_peers(self, limit_s: float) -> None:
        """Wait for every rank before a failed run ends, but not for long: a peer may be gone."""
        with contextlib.suppress(Exception):
            work = dist.all_reduce(torch.zeros(1), group=self._cpu_group, async_op=True)
            work.wait(datetime.timedelta(seconds=limit_s))

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the JSON-able values of all ranks, in rank order, on every rank."""
        data = json.dumps(value).encode()
        size = self.agree_max(len(data))
        rows = [torch.zeros(size, dtype=torch.uint8) for _ in range(self.world_size)]
        padded = torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8)
        self._finish(lambda: dist.all_gather(rows, padded, group=self._cpu_group, async_op=True))
        return [json.loads(bytes(row.numpy()).decode()) for row in rows]

    def broadcast_object(self, value: Any) -> Any:
        """Return the JSON-able value of rank 0 on every rank."""
        return self.gather_objects(value if self.rank == 0 else None)[0]

    def _finish(self, start: Callable[[], Any]) -> None:
        """Start a collective over the CPU group and wait for it, or for the time-out of a step on the GPU."""
        self.progress.started("agreement", 0)
        with peer_errors():
            work = start()
            while self._watch is not None and not work.is_completed():
                self.check_step()
                time.sleep(POLL_S)
            work.wait()


def reduction_scratch_bytes(device_type: str, world_size: int, shard_numel: int, dtype: torch.dtype) -> int:
    """Return the scratch bytes of reductions of shards of this size: receive chunks on CPU, nothing on a GPU."""
    if device_type == "cuda":
        return 0
    return math.prod(reduction_scratch_shape(world_size, shard_numel)) * dtype.itemsize


def reduction_scratch_shape(world_size: int, shard_numel: int) -> tuple[int, int, int]:
    """Return (slots, peers, elements per chunk) for shards of this size."""
    chunk_numel = min(shard_numel, REDUCTION_CHUNK_NUMEL)
    chunks = -(-shard_numel // chunk_numel) if shard_numel else 0
    return min(REDUCTION_SLOTS, chunks), world_size - 1, chunk_numel


class peer_errors:  # noqa: N801 - reads as a statement
    """Turn a backend's error about a dead or silent peer into a PeerError."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and is_lost_peer(error):
            raise lost_peer(error) from error


def _nccl(name: str, older_name: str) -> Callable[..., Handle]:
    """Return a collective by its name in torch >= 2.13, else by its older name, which 2.13 deprecates."""
    return getattr(dist, name, None) or getattr(dist, older_name)
