"""Collectives by pairwise exchange: their sums, their order, and that they hold on to nothing.

Ranks are threads, whose messages are copied when the receiver waits: a sender that overwrites what
it still sends, and a receiver that reads too early, are found.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_lite.distributed import cpu_collectives, rank_group
from megatron_lite.distributed.rank_group import Group, alone
from megatron_lite.distributed.traffic import Traffic
from tests.support.thread_ranks import TIMEOUT_S, ThreadRank, on_threads

CPU = torch.device("cpu")


class Sender(NamedTuple):
    """A process group, as this rank has it."""

    rank: int
    turn: Any


class Transfer:
    """A message, which is copied when sender or receiver waits for it and both have started."""

    def __init__(self, turn: Any) -> None:
        self._turn = turn
        self.sent: Tensor | None = None
        self.before: Tensor | None = None  # what it was when the sender started
        self.received: Tensor | None = None
        self.is_done = False

    def wait(self) -> None:
        has_started = self._turn.wait_for(
            lambda: self.sent is not None and self.received is not None, TIMEOUT_S
        )
        assert has_started, "nobody sent or received a message"
        if not self.is_done:
            assert self.sent is not None and self.before is not None and self.received is not None
            assert torch.equal(self.sent, self.before), "written while it is being sent"
            self.received.copy_(self.sent)
            self.sent = self.before = self.received = torch.empty(0)  # no memory of the buffers
            self.is_done = True


class Post:
    """The messages under way between ranks that are threads, in the place of
    `torch.distributed`."""

    def __init__(self) -> None:
        self.transfers: dict[tuple[Any, ...], list[Transfer]] = defaultdict(list)

    def isend(self, tensor: Tensor, group: Sender, group_dst: int, tag: int) -> Transfer:
        transfer = self._first("sent", group, (group.rank, group_dst, tag))
        transfer.sent, transfer.before = tensor, tensor.clone()
        return transfer

    def irecv(self, tensor: Tensor, group: Sender, group_src: int, tag: int) -> Transfer:
        tensor.fill_(float("nan"))  # anything, until it is waited for
        transfer = self._first("received", group, (group_src, group.rank, tag))
        transfer.received = tensor
        return transfer

    def _first(self, side: str, group: Sender, key: tuple[int, int, int]) -> Transfer:
        """Return the first transfer that this side has not started."""
        group.turn.notify_all()
        for transfer in self.transfers[key]:
            if getattr(transfer, side) is None:
                return transfer
        self.transfers[key].append(Transfer(group.turn))
        return self.transfers[key][-1]


@pytest.fixture(autouse=True)
def small_chunks_by_post(monkeypatch: pytest.MonkeyPatch) -> Iterator[Post]:
    """Let messages take the post, in chunks so small that a ring of them is used several times."""
    post = Post()
    for module in (rank_group, cpu_collectives):
        monkeypatch.setattr(module, "dist", post)
    monkeypatch.setattr(rank_group, "REDUCTION_CHUNK_NUMEL", 16)
    monkeypatch.setattr(rank_group, "REDUCTION_SLOTS", 3)
    yield post
    assert all(len(some) == 1 for some in post.transfers.values()), "two messages have one tag"
    assert all(transfer.is_done for some in post.transfers.values() for transfer in some), (
        "nobody waited"
    )


def on_ranks(count: int, function: Callable[[Group], Any]) -> list[Any]:
    def run(ranks: ThreadRank) -> Any:
        return function(Group(ranks.rank, count, CPU, Sender(ranks.rank, ranks.turn), Traffic()))

    return on_threads(1, count, run)


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return numbers whose sum depends on the order."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return (
        torch.randn(shape, generator=generator)
        * 10.0 ** torch.randint(-3, 4, shape, generator=generator)
    ).to(dtype)


def in_rank_order(parts: list[Tensor]) -> Tensor:
    total, *others = parts
    for other in others:
        total = total + other
    return total


SHAPES: list[tuple[int, ...]] = [(), (1,), (2,), (3,), (4,), (5,), (3, 5), (64,), (7, 29), (1000,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_reduce_sums_in_rank_order_for_any_size(ranks: int, dtype: torch.dtype) -> None:
    """The same bits on all ranks, in place, also where the size does not divide."""

    def reduced(group: Group) -> list[Tensor]:
        buffers = [values(group.rank, shape, dtype) for shape in SHAPES]
        for buffer in buffers:
            group.all_reduce(buffer, "test").wait()
        return buffers

    found = on_ranks(ranks, reduced)
    for place, shape in enumerate(SHAPES):
        expected = in_rank_order([values(rank, shape, dtype) for rank in range(ranks)])
        assert all(torch.equal(rank[place], expected) for rank in found), shape


def test_two_ranks_exchange_whole_buffers(small_chunks_by_post: Post) -> None:
    """In one message each, where more ranks send chunks and gather the sums."""
    on_ranks(2, lambda group: group.all_reduce(torch.ones(100), "test").wait())
    assert len(small_chunks_by_post.transfers) == 2


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_several_collectives_in_flight(ranks: int) -> None:
    """Waited for in another order than they started, twice, and completed by later ones; tags do
    not get mixed up."""

    def run(group: Group) -> list[Tensor]:
        first, second = (
            values(group.rank, (5 * ranks + 1,), torch.float32, seed) for seed in (1, 2)
        )
        third = values(group.rank, (40 * ranks,), torch.float32, 3)
        gathered = torch.zeros(ranks, 9)
        gathered[group.rank] = values(group.rank, (9,), torch.float32, 4)
        handles = [
            group.all_reduce(first, "test"),
            group.all_gather(gathered.view(-1)),
            group.all_reduce(second, "test"),
            group.reduce_scatter(third),
        ]
        for place in (1, 3, 0, 2, 2, 1):
            handles[place].wait()
        return [first, gathered, second, third.view(ranks, -1)[group.rank].clone()]

    for rank, (first, gathered, second, third) in enumerate(on_ranks(ranks, run)):
        sums = [
            in_rank_order([values(other, (size,), torch.float32, seed) for other in range(ranks)])
            for seed, size in ((1, 5 * ranks + 1), (2, 5 * ranks + 1), (3, 40 * ranks))
        ]
        assert torch.equal(first, sums[0]) and torch.equal(second, sums[1])
        assert torch.equal(third, sums[2].view(ranks, -1)[rank])
        assert torch.equal(
            gathered, torch.stack([values(other, (9,), torch.float32, 4) for other in range(ranks)])
        )


def test_small_sums_are_the_same_bits_everywhere() -> None:
    def run(group: Group) -> Tensor:
        return group.sum_in_rank_order(values(group.rank, (3,), torch.float64))

    first, *others = on_ranks(4, run)
    assert torch.equal(
        first, torch.stack([values(rank, (3,), torch.float64) for rank in range(4)]).sum(dim=0)
    )
    assert all(torch.equal(other, first) for other in others)


def test_traffic_counts_an_all_reduce_as_two_passes() -> None:
    def run(group: Group) -> Any:
        group.all_reduce(torch.ones(10), "both").wait()
        group.reduce_scatter(torch.ones(12), "one").wait()
        return {
            kind: (total.collectives, total.bytes, total.wire_bytes)
            for kind, total in group.traffic.take().items()
        }

    assert on_ranks(4, run) == [{"both": (1, 40, 60), "one": (1, 48, 36)}] * 4


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_a_finished_collective_keeps_no_buffer(name: str) -> None:
    """The last reduction is remembered, but not its memory, which may be that of all tokens'
    activations."""

    def run(group: Group) -> bool:
        buffer = torch.ones(64)
        memory = StorageWeakRef(buffer.untyped_storage())
        getattr(group, name)(buffer, "test").wait()
        del buffer
        return bool(memory.expired())

    assert on_ranks(2, run) == [True, True]


def test_a_group_of_one_sums_nothing() -> None:
    group, buffer = alone(CPU), torch.ones(3)
    group.all_reduce(buffer, "test").wait()
    assert torch.equal(buffer, torch.ones(3)) and group.sum_in_rank_order(buffer) is buffer
    assert not group.traffic.take()
