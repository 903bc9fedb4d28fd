"""Ranks that are threads of this process: pipeline x data x tensor ranks without gloo, sockets or
processes.

One rank runs at a time, until it waits for others: threads that run together fight for Python's
lock, which takes five times as long. Collectives sum in the order of the ranks, as `Group` does on
CPU, so both give the same bits. They are complete when they return; `engine_runs.LateGroup` makes
them late.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import DistributedConfig
from megatron_lite.config.dimensions import GROUPS, RankGrid
from megatron_lite.distributed.cpu_collectives import Works
from megatron_lite.distributed.pipeline_group import PipelineGroup
from megatron_lite.distributed.traffic import FirstWait, Handle
from tests.support.threads import THREADS

TIMEOUT_S = 20.0


def rank_grid(world_size: int, options: DistributedConfig) -> Tensor:
    """The ranks by pipeline, data and tensor-parallel rank, (P, N, T)."""
    ranks, sizes = torch.arange(world_size), (options.pipeline_parallel, options.tensor_parallel)
    return (
        ranks.view(-1, *sizes).transpose(0, 1)
        if options.pipeline_first
        else ranks.view(sizes[0], -1, sizes[1])
    )


class AbandonedError(RuntimeError):
    """Another rank has failed, or does not take part in a collective."""


class Mail:
    """Messages of pipeline ranks to each other, in the order in which they were sent."""

    def __init__(self, turn: threading.Condition) -> None:
        self.turn, self.is_broken = turn, False
        self._sent: dict[tuple[int, int], list[Tensor]] = {}  # (from, to)
        self._received: dict[tuple[int, int], int] = {}

    def send(self, tensor: Tensor, sender: int, receiver: int) -> Handle:
        self._sent.setdefault((sender, receiver), []).append(tensor.detach().clone())
        self.turn.notify_all()
        return Works()

    def receive(self, tensor: Tensor, sender: int, receiver: int) -> Handle:
        pair = sender, receiver
        number = self._received.get(pair, 0)
        self._received[pair] = number + 1
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)  # garbage

        def wait() -> None:
            sent = self._sent.setdefault(pair, [])
            if (
                not self.turn.wait_for(lambda: len(sent) > number or self.is_broken, TIMEOUT_S)
                or self.is_broken
            ):
                raise AbandonedError(
                    f"message {number} of rank {sender} to {receiver} did not come"
                )
            assert tensor.shape == sent[number].shape and tensor.dtype == sent[number].dtype, (
                tensor,
                sent[number],
            )
            tensor.copy_(sent[number])

        return FirstWait(Works(), wait)


class Meeting:
    """Where the ranks of one group hand each other tensors. `turn`: its lock is held by the rank
    that runs."""

    def __init__(self, world_size: int, turn: threading.Condition) -> None:
        self.turn, self._is_broken = turn, False
        self._rounds: list[int] = [0] * world_size  # collectives so far, of each rank
        self._values: dict[int, dict[int, Tensor]] = {}  # round -> rank -> value

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        """Return copies of all ranks' values, in rank order, once all have come."""
        number, size = self._rounds[rank], len(self._rounds)
        self._rounds[rank] += 1
        values = self._values.setdefault(number, {})
        values[rank] = value.detach().clone()
        if len(values) == size:
            del self._values[number]
            if size > 1:
                self.turn.notify_all()
        elif not self.turn.wait_for(lambda: len(values) == size or self._is_broken, TIMEOUT_S):
            raise AbandonedError(f"only ranks {sorted(values)} of {size} came")
        if len(values) < size:
            raise AbandonedError("another rank failed")
        return [values[other] for other in range(size)]

    def abandon(self) -> None:
        """Wake the ranks that wait, after a failure of one."""
        self._is_broken = True


class ThreadGroup:
    """One rank's view of a group; see `distributed.rank_group.Group`."""

    device = torch.device("cpu")
    symmetric_memory = None

    def __init__(
        self, rank: int, world_size: int, meeting: Meeting, mail: Mail | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._meeting = meeting
        self.turn = meeting.turn
        self._mail = mail

    from_owner = PipelineGroup.from_owner

    def send(self, tensor: Tensor, peer: int) -> Handle:
        assert self._mail is not None
        return self._mail.send(tensor, self.rank, peer)

    def receive(self, tensor: Tensor, peer: int) -> Handle:
        assert self._mail is not None
        return self._mail.receive(tensor, peer, self.rank)

    def all_gather(self, buffer: Tensor, kind: str = "gather") -> Handle:
        slices = buffer.view(self.world_size, -1)
        torch.stack(self._meeting.exchange(self.rank, slices[self.rank]), out=slices)
        return Works()

    def reduce_scatter(self, buffer: Tensor, kind: str = "reduce") -> Handle:
        slices = buffer.view(self.world_size, -1)
        total = _sum([value[self.rank] for value in self._meeting.exchange(self.rank, slices)])
        slices.fill_(float("nan"))  # garbage
        slices[self.rank] = total
        return Works()

    def all_reduce(self, buffer: Tensor, kind: str) -> Handle:
        if self.world_size > 1:
            buffer.copy_(_sum(self._meeting.exchange(self.rank, buffer)))
        return Works()

    def all_to_all(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> tuple[Tensor, Handle]:
        sizes = self._meeting.exchange(self.rank, torch.tensor(sent))
        every = self._meeting.exchange(self.rank, rows)
        assert [int(size[self.rank]) for size in sizes] == [*received]
        parts = [own.split(size.tolist()) for own, size in zip(every, sizes, strict=True)]
        return torch.cat([part[self.rank] for part in parts]), Works()

    def read(self, values: Tensor) -> Any:
        return values.tolist()

    def sum_in_rank_order(self, values: Tensor) -> Tensor:
        return torch.stack(self._meeting.exchange(self.rank, values)).sum(dim=0)

    def largest(self, values: Tensor, kind: str) -> Tensor:
        return torch.stack(self._meeting.exchange(self.rank, values)).amax(dim=0)

    def reduction_scratch_bytes(self, shard_numel: int, dtype: torch.dtype) -> int:
        return 0

    def wait_for(self, event: Any) -> None:
        raise AssertionError("there are no events on CPU")


class ThreadRank(ThreadGroup):
    """One rank of a run, with its groups; see `distributed.process_group.Distributed`."""

    local_world_size = sharing_cores = 1

    def __init__(self, rank: int, meetings: Meetings) -> None:
        self.grid = meetings.grid
        super().__init__(rank, self.grid.world_size, meetings.of_all)
        for name, number in self.grid.place(rank).items():
            meeting, mail = meetings.of_some[name, rank]
            setattr(self, name, ThreadGroup(number, self.grid.size(name), meeting, mail))

    def gather_objects(self, value: Any) -> list[Any]:
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        return [
            json.loads(bytes(other.tolist())) for other in self._meeting.exchange(self.rank, data)
        ]

    def broadcast_object(self, value: Any) -> Any:
        return self.gather_objects(value)[0]

    def agree_max(self, value: int) -> int:
        return max(self.gather_objects(value))

    def wait_for_device(self) -> None:
        """Return at once, as on CPU."""


class Meetings:
    """Those of all groups of a grid of ranks; those of a group by its name and each of its ranks."""

    def __init__(self, grid: RankGrid) -> None:
        self.grid, self.turn = grid, threading.Condition()
        self.of_all = Meeting(grid.world_size, self.turn)
        self.of_some: dict[tuple[str, int], tuple[Meeting, Mail]] = {}
        for name in GROUPS:
            for ranks in grid.ranks(name):
                both = Meeting(len(ranks), self.turn), Mail(self.turn)
                self.of_some.update({(name, rank): both for rank in ranks})

    def abandon(self) -> None:
        """Wake all ranks after a failure of one, which holds the lock."""
        self.of_all.abandon()
        for meeting, mail in self.of_some.values():
            meeting.abandon()
            mail.is_broken = True
        self.turn.notify_all()


def on_threads(
    data: int,
    tensor: int,
    function: Callable[..., Any],
    *args: Any,
    pipeline: int = 1,
    shard: int = 0,
    expert: int = 1,
) -> list[Any]:
    """Call function(rank, *args) on pipeline x data x tensor ranks; return the results in rank
    order.

    shard: data-parallel ranks in a group of hybrid shards; 0: all. expert: those that share out the
    experts.
    """
    options = DistributedConfig(
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        data_parallel_shard=shard,
        expert_parallel=expert,
    )
    meetings = Meetings(RankGrid(pipeline * data * tensor, options))
    results: list[Any] = [None] * meetings.grid.world_size
    errors: list[Exception] = []

    def run(rank: int) -> None:
        torch.set_num_threads(THREADS)
        with meetings.turn:
            try:
                results[rank] = function(ThreadRank(rank, meetings), *args)
            except Exception as error:
                errors.append(error)
                meetings.abandon()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, AbandonedError)), errors[0])
    return results


def _sum(values: Sequence[Tensor]) -> Tensor:
    total, *others = values
    for other in others:
        total = total + other
    return total
