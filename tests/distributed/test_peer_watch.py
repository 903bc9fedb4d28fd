"""A rank learns within seconds that another one died, on its machine or elsewhere, and what all ranks are doing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lite.distributed import peer_watch
from megatron_lite.distributed.meeting import MeetingPoint, open_store
from megatron_lite.distributed.peer_watch import PeerWatch
from megatron_lite.distributed.peers import Place, own_place
from megatron_lite.distributed.progress import Progress, Status
from megatron_lite.errors import PeerError
from tests.support.launch import free_port


class Watched:
    """Three ranks of two machines in this process; the second one is a child that can be killed."""

    def __init__(self) -> None:
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        here = own_place(0)
        places = [here, Place(1, here.host, here.machine, self.child.pid), Place(2, "node1", "another", 1)]
        point = MeetingPoint("localhost", free_port(), hosted=True, prefix="test")
        self._store = open_store(point, 0, 3, 10.0)
        self.progress = [Progress() for _ in places]
        self.lost: list[PeerError | None] = [None] * 3
        self.asked = [threading.Event() for _ in places]
        self.known = [threading.Event() for _ in places]
        self.watches: dict[int, PeerWatch] = {}
        for rank in (0, 2):
            meeting: Any = SimpleNamespace(
                point=point, store=self._store, rank=rank, world_size=3, places=places, timeout_s=10.0
            )
            self.watches[rank] = PeerWatch(meeting, self.progress[rank], self._knows(rank), self.asked[rank].set)
        self._store.set("at/1", '[7, "the step", 3, "reduce"]')

    def _knows(self, rank: int) -> Any:
        def knows(error: PeerError) -> None:
            self.lost[rank] = error
            self.known[rank].set()

        return knows


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(peer_watch, "POLL_S", 0.02)
    monkeypatch.setattr(peer_watch, "GRACE_S", 0.1)
    one = Watched()
    yield one
    for watch in one.watches.values():
        watch.finish()
    one.child.kill()
    one.child.wait()


def test_a_rank_that_died_is_known_on_all_machines(watched: Watched) -> None:
    """Its machine sees the process, the other one reads about it; both know its name, without any collective."""
    watched.child.kill()
    for rank in (0, 2):
        assert watched.known[rank].wait(10)
        error = watched.lost[rank]
        assert error is not None and error.names_rank
        assert str(error).startswith(f"lost rank 1 (process {watched.child.pid} on ")


def test_after_the_end_nobody_is_missed(watched: Watched) -> None:
    """Ranks end one after the other."""
    for watch in watched.watches.values():
        watch.finish()
    watched.child.kill()
    watched.child.wait()
    assert not watched.known[0].wait(0.3) and not watched.known[2].is_set()


def test_what_all_ranks_are_doing(watched: Watched) -> None:
    """A rank reports its phase and its newest collective; the one that came least far is the one to look at."""
    watched.progress[2].at("the save", 4)
    watched.progress[2].started("gather", 100)
    expected = [Status(0, "the start", 0, ""), Status(7, "the step", 3, "reduce"), Status(1, "the save", 4, "gather")]
    for _ in range(200):
        if watched.watches[0].statuses() == expected:
            break
        threading.Event().wait(0.02)
    assert watched.watches[0].statuses() == expected
    assert not watched.known[0].is_set()


def test_a_rank_can_ask_all_for_their_stacks(watched: Watched) -> None:
    watched.watches[2].request_stacks()
    assert watched.asked[0].wait(10) and watched.asked[2].wait(10)
