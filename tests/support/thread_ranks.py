"""Ranks that are threads of this process: data x tensor ranks without gloo, sockets or processes.

One rank runs at a time, until it waits for others: threads that run together fight for Python's lock, which takes five
times as long. Collectives sum in the order of the ranks, as `Group` does on CPU, so both give the same bits. They
are complete when they return; `engine_runs.LateGroup` makes them late.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lite.distributed.cpu_collectives import Works
from megatron_lite.distributed.traffic import Handle
from tests.support.threads import THREADS

TIMEOUT_S = 20.0


class AbandonedError(RuntimeError):
    """Another rank has failed, or does not take part in a collective."""


class Meeting:
    """Where the ranks of one group hand each other tensors. `turn`: its lock is held by the rank that runs."""

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

    def __init__(self, rank: int, world_size: int, meeting: Meeting) -> None:
        self.rank, self.world_size, self._meeting, self.turn = rank, world_size, meeting, meeting.turn

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
        super().__init__(rank, meetings.data * meetings.tensor, meetings.of_all)
        data_rank, tensor_rank = divmod(rank, meetings.tensor)
        self.data = ThreadGroup(data_rank, meetings.data, meetings.of_data[tensor_rank])
        self.tensor = ThreadGroup(tensor_rank, meetings.tensor, meetings.of_tensor[data_rank])

    def gather_objects(self, value: Any) -> list[Any]:
        data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(bytes(other.tolist())) for other in self._meeting.exchange(self.rank, data)]

    def broadcast_object(self, value: Any) -> Any:
        return self.gather_objects(value)[0]

    def agree_max(self, value: int) -> int:
        return max(self.gather_objects(value))

    def wait_for_device(self) -> None:
        """Return at once, as on CPU."""


class Meetings:
    """Those of all groups of data x tensor ranks."""

    def __init__(self, data: int, tensor: int) -> None:
        self.data, self.tensor, self.turn = data, tensor, threading.Condition()
        self.of_all = Meeting(data * tensor, self.turn)
        self.of_data = [Meeting(data, self.turn) for _ in range(tensor)]
        self.of_tensor = [Meeting(tensor, self.turn) for _ in range(data)]

    def abandon(self) -> None:
        """Wake all ranks after a failure of one, which holds the lock."""
        for meeting in (self.of_all, *self.of_data, *self.of_tensor):
            meeting.abandon()
        self.turn.notify_all()


def on_threads(data: int, tensor: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call function(rank, *args) on data x tensor ranks; return the results in rank order."""
    meetings = Meetings(data, tensor)
    results: list[Any] = [None] * (data * tensor)
    errors: list[Exception] = []

    def run(rank: int) -> None:
        torch.set_num_threads(THREADS)
        with meetings.turn:
            try:
                results[rank] = function(ThreadRank(rank, meetings), *args)
            except Exception as error:
                errors.append(error)
                meetings.abandon()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(data * tensor)]
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
