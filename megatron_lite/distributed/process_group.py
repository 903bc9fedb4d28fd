"""A rank's process groups, and agreement between all ranks. `startup.py` joins the groups."""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_lite.config import DistributedConfig
from megatron_lite.distributed.grid import Groups, divide
from megatron_lite.distributed.step_watch import POLL_S, StepWatch
from megatron_lite.distributed.traffic import Progress, Traffic
from megatron_lite.errors import is_lost_peer, lost_peer


class Distributed(Groups):
    """The group of all ranks: rank, device, collectives, and the groups that divide it.

    Args:
        local_world_size: number of ranks on this machine.
        cpu_group: gloo group with the long timeout, for agreement between hosts.
        group: NCCL or gloo group for the collectives of a step.
        watch: enforces the step timeout on a GPU; None on CPU, where collectives enforce the
            timeout themselves.
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
        super().__init__(rank, world_size, device, group, Traffic(progress, device.type), watch)
        self.progress = self.traffic.progress
        self.local_world_size = local_world_size
        self.sharing_cores = (
            local_world_size  # ranks that may use this rank's cores, itself included
        )
        self._cpu_group = cpu_group
        divide(self, dist.new_group, DistributedConfig())  # into one
        self.nodes = (
            1  # machines with equally many ranks each, if --data_parallel_shard relies on them
        )

    def close(self) -> None:
        """Destroy the process groups, after the last collective has finished.

        After a collective, a gloo thread drops its references to the tensors, which needs the GIL.
        If the thread still waits for the GIL when the interpreter exits, Python kills it inside a
        destructor, and the process dies of SIGABRT. A group joins its threads when its last
        reference is dropped; `destroy_process_group` drops torch's own.
        """
        for group in self.groups:
            group.group = None
        self.pipeline.messages = ()
        del self._cpu_group
        dist.destroy_process_group()

    # -- waiting for a GPU
    # -------------------------------------------------------------------------------------------

    def end_step(self, compiles: bool = False) -> None:
        """Mark the end of a step on the GPU and wait for the end of the previous step.

        Raises:
            PeerError: if the previous step does not end in time (see `StepWatch`); the methods
            below raise it too.
        """
        if self.watch is not None:
            self.watch.end_step(compiles)

    def wait_for_device(self) -> None:
        """Wait for all queued work; call this before the host reads the device, because a read has
        no timeout."""
        if self.watch is not None:
            self.watch.end_step()
            self.watch.finish()

    def check_step(self) -> None:
        """Raise if the newest step is late; call this while the host waits for something else."""
        if self.watch is not None:
            self.watch.has_ended()

    # -- agreement between hosts, over gloo, with the long timeout
    # ------------------------------------------------

    def agree_max(self, value: int) -> int:
        """Return the maximum over ranks. Also keeps ranks within one step of each other while data
        is slow."""
        return self._reduced([value], dist.ReduceOp.MAX)[0]

    def agree_sum(self, values: Sequence[int]) -> list[int]:
        """Return the elementwise sums over ranks; every rank passes equally many values."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def barrier(self) -> None:
        """Wait for every rank."""
        self.agree_max(0)

    def wait_for_peers(self, limit_s: float) -> None:
        """Wait for every rank before a failed run ends, for at most `limit_s`: a peer may be
        gone."""
        with contextlib.suppress(Exception):
            work = dist.all_reduce(torch.zeros(1), group=self._cpu_group, async_op=True)
            work.wait(datetime.timedelta(seconds=limit_s))

    def gather_objects(self, value: Any) -> list[Any]:
        """Return all ranks' JSON-able values, in rank order, on every rank."""
        data = json.dumps(value).encode()
        size = self.agree_max(len(data))
        rows = [torch.zeros(size, dtype=torch.uint8) for _ in range(self.world_size)]
        padded = torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8)
        self._finish(lambda: dist.all_gather(rows, padded, group=self._cpu_group, async_op=True))
        return [json.loads(bytes(row.numpy()).decode()) for row in rows]

    def broadcast_object(self, value: Any) -> Any:
        """Return rank 0's JSON-able value on every rank."""
        return self.gather_objects(value if self.rank == 0 else None)[0]

    def _reduced(self, values: Sequence[int], operation: Any) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64)
        self._finish(
            lambda: dist.all_reduce(tensor, operation, group=self._cpu_group, async_op=True)
        )
        return list(map(int, tensor.tolist()))

    def _finish(self, start: Callable[[], Any]) -> None:
        """Start a collective over the CPU group and wait for it, or until a step on the GPU times
        out."""
        self.progress.started("agreement", 0)
        with peer_errors():
            work = start()
            while self.watch is not None and not work.is_completed():
                self.check_step()
                time.sleep(POLL_S)
            work.wait()


@contextlib.contextmanager
def peer_errors() -> Iterator[None]:
    """Convert a backend error about a dead or silent peer to a PeerError."""
    try:
        yield
    except Exception as error:
        if is_lost_peer(error):
            raise lost_peer(error) from error
        raise
