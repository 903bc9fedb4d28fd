"""Ranks meet and watch each other in a real store, each in a thread: a rank that died is known
everywhere at once."""

import dataclasses
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest

from megatron_lite.distributed import peer_watch
from megatron_lite.distributed.peer_watch import (
    Meeting,
    MeetingPoint,
    PeerWatch,
    connect,
    open_store,
    statuses,
)
from megatron_lite.distributed.processes import Place, own_place
from megatron_lite.distributed.traffic import Progress
from megatron_lite.errors import PeerError, RunError, StoppedError, UnreachableError, UsageError
from tests.support.launch import ended_process, free_port
from tests.support.mirrors import wait_until
from tests.support.s3_server import Proxy

TIMEOUT_S, THREAD = 30.0, "meeting of a rank"
SILENCE_S = 4.0


@pytest.fixture
def point() -> MeetingPoint:
    return MeetingPoint("localhost", free_port(), hosted=True, prefix="test")


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_watch, "POLL_S", 0.01)
    monkeypatch.setattr(peer_watch, "LOOK_S", 0.02)
    monkeypatch.setattr(peer_watch, "GRACE_S", 0.1)


@pytest.fixture(autouse=True)
def all_threads_end() -> Iterator[None]:
    """A thread that is inside the store while the interpreter ends aborts the process, whose tests
    all passed."""
    yield
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(5.0)
            assert not thread.is_alive(), "a rank still waits in the store"


def meet(
    point: MeetingPoint,
    store: Any,
    place: Place,
    world_size: int,
    timeout_s: float = TIMEOUT_S,
    options: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Callable[[], Meeting]:
    """Let a rank come, in a thread; return a function that waits for the end of its meeting."""
    results: list[Any] = []

    def work() -> None:
        try:
            meeting = Meeting(
                point, store, place, world_size, range(world_size), timeout_s, options
            )
            meeting.enter()
            meeting.wait()
            results.append(meeting)
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work, daemon=True, name=THREAD)
    thread.start()

    def end() -> Meeting:
        thread.join(TIMEOUT_S)
        assert results, "no end"
        if isinstance(results[0], Exception):
            raise results[0]
        met: Meeting = results[0]
        return met

    return end


def hosts_of(server: Any) -> str:
    return "all" if server is None else str(server.getsockname()[0])


@pytest.mark.parametrize(
    ("host", "resolved", "one_machine", "listens"),
    [
        ("localhost", ["::1", "127.0.0.1"], False, "127.0.0.1"),
        ("127.0.0.1", ["127.0.0.1"], False, "127.0.0.1"),
        ("node1", ["127.0.1.1"], True, "127.0.1.1"),  # as Debian calls itself
        ("node1", ["127.0.1.1"], False, "all"),  # the others know it by another address
        ("node1", ["192.0.2.1"], True, "all"),  # not an address of this machine
        ("node1", [], True, "all"),
    ],
)
def test_where_the_store_of_rank_0_listens(
    host: str, resolved: list[str], one_machine: bool, listens: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the address of its host only, where all ranks must find it: no stranger in the network
    reaches the store."""

    def look_up(name: str, port: int, type: int) -> list[Any]:
        if name != host or not resolved:
            raise socket.gaierror(-2, "unknown")
        families = {True: socket.AF_INET6, False: socket.AF_INET}
        return [(families[":" in address], type, 6, "", (address, port)) for address in resolved]

    monkeypatch.setattr(peer_watch.socket, "getaddrinfo", look_up)
    with peer_watch._listening(MeetingPoint(host, 0, True, "test", one_machine)) as server:
        assert hosts_of(server) == listens


def test_every_rank_knows_the_places_of_all(point: MeetingPoint) -> None:
    stores = [open_store(point, rank, 3, TIMEOUT_S) for rank in range(3)]
    ends = [meet(point, stores[rank], own_place(rank), 3) for rank in range(3)]
    places = [end().places for end in ends]
    assert places[0] == places[1] == places[2] == [own_place(rank) for rank in range(3)]
    assert places[0][0].pid == os.getpid()


def test_a_rank_that_came_and_died_is_named_at_once(point: MeetingPoint) -> None:
    """The third rank may come in an hour: the first need not wait so long to say that the second is
    gone."""
    store = open_store(point, 0, 3, TIMEOUT_S)
    gone = Place(1, own_place(1).host, own_place(1).machine, ended_process())
    meet(point, connect(point, 3, TIMEOUT_S), gone, 3, timeout_s=0.2)
    begun_s = time.monotonic()
    with pytest.raises(
        PeerError, match=rf"lost rank 1 \(process {gone.pid} on .*\) while the ranks were meeting"
    ):
        meet(point, store, own_place(0), 3)()
    assert time.monotonic() - begun_s < 5


def test_the_death_of_rank_0_is_that_of_its_store(point: MeetingPoint) -> None:
    """All machines notice it by the store, so all say the same, whichever sign comes first; not
    with torchrun's."""
    gone = Place(0, own_place(0).host, own_place(0).machine, ended_process())
    store = open_store(point, 0, 5, TIMEOUT_S)  # which answers as long as it is referred to
    meet(point, store, gone, 5, timeout_s=0.2)
    of_torchrun = dataclasses.replace(point, hosted=False)
    for where, words in ((point, "2 of 5 ranks met"), (of_torchrun, r"lost rank 0 \(process")):
        with pytest.raises(PeerError, match=words):
            meet(where, connect(point, 5, TIMEOUT_S), own_place(1), 5, timeout_s=0.5)()


def test_the_end_of_the_store_is_the_end_of_rank_0(point: MeetingPoint) -> None:
    """Rank 0 keeps the store; without rank 0 the others would ask it until --startup_timeout."""
    program = (
        "import sys, time; from megatron_lite.distributed.peer_watch import *; "
        "point = MeetingPoint('localhost', int(sys.argv[1]), True, 'test'); "
        "store = open_store(point, 0, 3, 30); print('open', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(point.port)], stdout=subprocess.PIPE
    ) as rank_0:
        assert rank_0.stdout is not None and rank_0.stdout.readline()
        end = meet(point, open_store(point, 1, 3, TIMEOUT_S), own_place(1), 3)
        time.sleep(0.1)
        rank_0.kill()
    with pytest.raises(
        PeerError, match=f"lost rank 0, where the ranks meet \\(localhost:{point.port}\\)"
    ):
        end()


def test_ranks_that_do_not_come_are_named(point: MeetingPoint) -> None:
    store = open_store(point, 0, 3, TIMEOUT_S)
    meet(point, connect(point, 3, TIMEOUT_S), own_place(2), 3, timeout_s=0.2)
    with pytest.raises(
        PeerError, match=r"2 of 3 ranks met .* within --startup_timeout=0.2 s; missing: rank 1\."
    ):
        meet(point, store, own_place(0), 3, timeout_s=0.2)()


def test_a_store_that_nobody_opens_is_rank_0(point: MeetingPoint) -> None:
    """It never came; the limit holds once, not once for each of torch's attempts."""
    begun_s = time.monotonic()
    with pytest.raises(
        PeerError, match=r"nobody answered .* within --startup_timeout=0.5 s, .*; missing: rank 0\."
    ):
        open_store(point, 1, 3, 0.5)
    assert time.monotonic() - begun_s < 10


def test_the_first_announced_reason_ends_all(point: MeetingPoint) -> None:
    """Of any class; a rank that comes later hears it too. Rank 0 records it, and is the last to
    leave its store."""
    store = open_store(point, 0, 3, TIMEOUT_S)
    first, second = (
        Meeting(point, store, own_place(rank), 3, range(3), TIMEOUT_S) for rank in (0, 1)
    )
    first.enter()
    second.enter()
    own = UsageError("no GPU")
    assert second.announced() is None
    assert second.announce(own) is own
    heard = first.announce(StoppedError("stopped"))
    assert (type(heard), str(heard), heard.recorded, heard.agreed) == (
        UsageError,
        "rank 1: no GPU",
        True,
        True,
    )
    with pytest.raises(UsageError, match="rank 1: no GPU") as caught:
        meet(point, store, own_place(2), 3)()
    assert not caught.value.recorded
    leaving = threading.Thread(target=first.part, daemon=True)
    leaving.start()
    for _ in range(2):  # ranks 1 and 2
        leaving.join(0.1)
        assert leaving.is_alive()
        second.part()
    leaving.join(10)
    assert not leaving.is_alive()


def test_a_stranger_ends_nobody(point: MeetingPoint) -> None:
    """The rank of another run with the same MASTER_PORT is refused before it can announce
    anything."""
    store = open_store(point, 0, 2, TIMEOUT_S)
    first = Meeting(point, store, own_place(0), 2, range(2), TIMEOUT_S)
    first.enter()
    stranger = Meeting(point, store, Place(0, "elsewhere", "b", 1), 2, range(2), TIMEOUT_S)
    with pytest.raises(UsageError, match="two processes say that they are rank 0") as caught:
        stranger.enter()
    assert stranger.announce(caught.value) is caught.value
    assert first.announced() is None


def test_a_second_process_of_one_rank_is_refused(point: MeetingPoint) -> None:
    """Two jobs with one MASTER_PORT would otherwise train with each other's ranks, or wait for each
    other. The store of a torchrun on several nodes still knows the ranks that it started first."""
    store = open_store(point, 0, 3, TIMEOUT_S)
    meet(point, store, own_place(0), 3, timeout_s=0.5)
    time.sleep(0.1)
    of_torchrun = dataclasses.replace(point, hosted=False)
    with pytest.raises(
        UsageError, match=r"two processes say that they are rank 0 .* same MASTER_PORT\?$"
    ):
        meet(point, connect(point, 3, TIMEOUT_S), Place(0, "elsewhere", "b", 1), 3)()
    with pytest.raises(
        UsageError,
        match=r"\(--max-restarts\)\? That works on one node only; .* the whole job again$",
    ):
        meet(of_torchrun, connect(point, 3, TIMEOUT_S), Place(0, "elsewhere", "b", 1), 3)()


# -- after they have met
# ----------------------------------------------------------------------------------------------


class Watched:
    """Three ranks of two machines in this process; the second one is a child that can be killed."""

    def __init__(self) -> None:
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        here = own_place(0)
        places = [
            here,
            Place(1, here.host, here.machine, self.child.pid),
            Place(2, "node1", "another", 1),
        ]
        point = MeetingPoint("localhost", free_port(), hosted=True, prefix="test")
        self._store = open_store(point, 0, 3, 10.0)
        self.cable = Proxy(point.port).listen()  # of the second machine
        elsewhere = dataclasses.replace(point, port=self.cable.port)
        self.progress = [Progress() for _ in places]
        self.lost: list[RunError | None] = [None] * 3
        self.asked = [threading.Event() for _ in places]
        self.known = [threading.Event() for _ in places]
        self.watches: dict[int, PeerWatch] = {}
        self.meetings: dict[int, Meeting] = {}
        for rank in (0, 2):
            own = self._store if rank == 0 else open_store(elsewhere, rank, 3, 10.0)
            meeting = Meeting(
                elsewhere if rank else point,
                own,
                places[rank],
                3,
                range(3),
                10.0,
                silence_s=SILENCE_S,
            )
            meeting.enter()
            meeting.places = places
            self.meetings[rank] = meeting
            self.watches[rank] = PeerWatch(
                meeting, self.progress[rank], self._knows(rank), self.asked[rank].set
            )
        self._store.set("at/1", '[7, 0.0, "reduce", 8, "the step", 3, 0]')

    def _knows(self, rank: int) -> Any:
        def knows(error: RunError) -> None:
            self.lost[rank] = error
            self.known[rank].set()

        return knows


@pytest.fixture
def watched() -> Iterator[Watched]:
    one = Watched()
    yield one
    one.cable.open.set()
    for watch in one.watches.values():
        watch.finish()
    one.cable.__exit__()
    one.child.kill()
    one.child.wait()


def test_a_machine_that_cannot_be_reached_is_known_on_both_sides(watched: Watched) -> None:
    """A cable that is pulled closes no connection: only silence shows it, wherever the ranks
    wait."""
    rows = watched.watches[0].rows()
    wait_until(lambda: {place.rank for place in watched.watches[0].heard(rows)} == {0, 1, 2})
    watched.cable.open.clear()
    for rank in (0, 2):
        assert watched.known[rank].wait(60)
        error = watched.lost[rank]
        assert isinstance(error, UnreachableError) and error.names_rank
        who = "rank 0, where the ranks meet" if rank else "rank 2 (process 1 on node1)"
        assert str(error).startswith(
            who
        ) and "cannot be reached, or the machine hangs: nothing was h" in str(error)
    assert 2 not in {place.rank for place in watched.watches[0].heard(watched.watches[0].rows())}


def test_a_pause_is_no_silence(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing moves for most of the limit, and the clocks jump by an hour."""
    hour = 3600.0
    clock = time.monotonic
    wall = time.time
    for _ in range(2):
        looks = watched.watches[0]._looks
        watched.cable.open.clear()
        wait_until(lambda: watched.watches[0]._looks > looks + 0.6 * SILENCE_S / peer_watch.LOOK_S)  # noqa: B023
        watched.cable.open.set()
        monkeypatch.setattr(time, "monotonic", lambda: clock() + hour)
        monkeypatch.setattr(time, "time", lambda: wall() - hour)
        seen = watched.watches[2]._looks
        wait_until(lambda: watched.watches[2]._looks > seen + 2)  # noqa: B023
        monkeypatch.undo()
        monkeypatch.setattr(peer_watch, "LOOK_S", 0.02)
    assert watched.lost == [None] * 3


def test_a_rank_that_died_is_known_on_all_machines(watched: Watched) -> None:
    """Its machine sees the process, the other one reads about it; both know its name, without any
    collective."""
    watched.child.kill()
    for rank in (0, 2):
        assert watched.known[rank].wait(10)
        error = watched.lost[rank]
        assert isinstance(error, PeerError) and error.names_rank
        assert str(error).startswith(f"lost rank 1 (process {watched.child.pid} on ")


def test_a_stop_is_known_on_all_machines(watched: Watched) -> None:
    """Before there is anything to save, a signal to one rank ends all."""
    watched.meetings[2].announce(StoppedError("stopped by SIGTERM in the loading"))
    assert watched.known[0].wait(10)
    assert isinstance(watched.lost[0], StoppedError) and str(watched.lost[0]).startswith(
        "stopped by SIGTERM"
    )


def test_after_the_end_nobody_is_missed(watched: Watched) -> None:
    """Ranks end one after the other."""
    for watch in watched.watches.values():
        watch.finish()
    watched.child.kill()
    watched.child.wait()
    assert not watched.known[0].wait(0.3) and not watched.known[2].is_set()


def test_what_all_ranks_are_doing(watched: Watched) -> None:
    """A rank reports its phase and its newest collective; the one that came least far is the one to
    look at."""
    watched.progress[2].at("the save", 4)
    watched.progress[2].started("gather", 100)
    expected = [(0, "", "the start", 0), (7, "reduce", "the step", 3), (1, "gather", "the save", 4)]
    for _ in range(200):
        found = [
            (one.number, one.kind, one.phase, one.iteration)
            for one in statuses(watched.watches[0].rows())
        ]
        if found == expected:
            break
        threading.Event().wait(0.02)
    assert found == expected
    assert not watched.known[0].is_set()


def test_a_rank_can_ask_all_for_their_stacks(watched: Watched) -> None:
    watched.watches[2].request_stacks()
    assert watched.asked[0].wait(10) and watched.asked[2].wait(10)


def test_options_that_differ_end_all_ranks_with_one_message(point: MeetingPoint) -> None:
    """Another version comes first, then what was typed; not what follows from that. Rank 0 leaves
    last, as its end is the store's."""
    ours = {
        "torch": ["2.13", "2.13"],
        "--lr_decay_iters": ["6", "none"],
        "--train_iters": ["6", "6"],
    }
    theirs = {
        "torch": ["2.12", "2.12"],
        "--lr_decay_iters": ["7", "none"],
        "--train_iters": ["7", "7"],
    }
    stores = [open_store(point, rank, 3, TIMEOUT_S) for rank in range(3)]
    places = [own_place(rank) for rank in range(3)]
    ends = [
        meet(point, stores[rank], places[rank], 3, options=theirs if rank == 2 else ours)
        for rank in range(3)
    ]
    said = f"torch=2.12 on {places[2]}, but 2.13 on {places[0]}; --train_iters=7 on {places[2]}, but 6 on {places[0]}; "
    for end in ends:
        with pytest.raises(UsageError) as caught:
            end()
        assert str(caught.value).startswith(said) and caught.value.agreed
        assert "decay" not in str(caught.value)
