"""Ranks watch each other through a store: which have joined, which are lost, and what each is
doing.

The store is a small server on torchrun's first node, or in rank 0 without torchrun. The ranks meet
there before any of them can block on another inside a library. Every wait here polls, so that the
death of a local rank or of the store is noticed within seconds.

After the meeting a thread watches, because a collective notices a lost peer only when it reaches
that peer, and inside a library only after the timeout. Once a second the thread checks the local
processes, reads from the store whether another machine has lost a rank or received a stop, and
writes what this rank is doing. It does so whatever the rank waits for, even a hanging file system.
So a machine that is silent for --distributed_timeout is unreachable: rank 0 looks for such
machines, and other machines' ranks check that the store, on the first one, answers. Time is counted
in looks, so that neither a clock that jumps nor a pause of the watching process counts as silence.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import errno
import hashlib
import ipaddress
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from megatron_lite import errors
from megatron_lite.config.values import abridged
from megatron_lite.distributed import processes
from megatron_lite.distributed.in_time import in_time
from megatron_lite.distributed.processes import Place
from megatron_lite.distributed.traffic import Collective, Progress
from megatron_lite.errors import (
    PeerError,
    RunError,
    UnreachableError,
    UsageError,
    is_lost_peer,
    lost_peer,
    shorten,
)

POLL_S = 0.1  # between polls of the store while the ranks meet
LOOK_S = 1.0  # between checks of the local processes
# A collective may also notice, with the library's message, and a rank that failed by itself writes
# its reason.
GRACE_S = 2.0
READ_S = 2.0  # limit on reading the store while reporting a failure: the store itself may hang
END_S = 5.0  # limit on joining the thread, and on one attempt to connect
PART_S = 5.0  # limit on waiting for the others before the store closes; a dead rank never arrives
READ_OPTIONS_S = 30.0  # limit on reading a rank's options that differ


@dataclass(frozen=True)
class MeetingPoint:
    """The store's address."""

    host: str
    port: int
    hosted: bool  # by rank 0; otherwise by torchrun
    prefix: str  # of all keys
    one_machine: bool = False  # whether all ranks are on one machine

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def owner(self) -> str:
        """The process that opens the store, in words."""
        return "rank 0" if self.hosted else "torchrun on the first node"

    def lost(self, error: RuntimeError) -> PeerError:
        """Return the error to report when the store does not answer."""
        return lost_peer(
            error, f"lost {self.owner}, where the ranks meet ({self}); see its own message"
        )

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Convert a backend error to the one to report when the store does not answer."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            raise self.lost(error) from error


def open_store(point: MeetingPoint, rank: int, world_size: int, timeout_s: float) -> Any:
    """Return this rank's connection to the store; rank 0 opens the store if torchrun has none.

    Raises:
        UsageError: if the port is in use.
        PeerError: if the store does not answer within the timeout.
    """
    try:
        if not point.hosted or rank != 0:
            _wait_for_listener(point, timeout_s)
            return connect(point, world_size, timeout_s)
        with _listening(point) as server:
            descriptor = None if server is None else server.fileno()
            store = connect(point, world_size, timeout_s, hosts=True, descriptor=descriptor)
            if server is not None:
                server.detach()  # the store closes it
        return store
    except Exception as error:
        if "EADDRINUSE" in str(error) or getattr(error, "errno", None) == errno.EADDRINUSE:
            raise UsageError(
                f"MASTER_PORT={point.port} is in use by another program on this machine; choose another one (torchrun "
                "--rdzv-backend=c10d --rdzv-endpoint=localhost:0 finds a free port)"
            ) from error
        if not is_lost_peer(error):
            raise
        raise lost_peer(
            error,
            f"nobody answered at {point} within --startup_timeout={timeout_s:g} s, where {world_size} ranks were to "
            f"meet; missing: {point.owner}. See the messages of the others, or start them",
        ) from error


def _wait_for_listener(point: MeetingPoint, timeout_s: float) -> None:
    """Wait until a server listens at the point: torch would wait up to three times as long.

    Raises:
        RuntimeError: if none does within the timeout.
    """
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection((point.host, point.port), END_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"Timed out: {error}") from error
        time.sleep(POLL_S)


def connect(
    point: MeetingPoint,
    world_size: int,
    timeout_s: float,
    hosts: bool = False,
    descriptor: int | None = None,
) -> Any:
    """Connect to the store. A blocked call blocks other threads on the same connection, but not on
    another.

    hosts: first open the store, on the socket `descriptor` or on all addresses of this machine.
    """
    store = dist.TCPStore(
        point.host,
        point.port,
        world_size,
        hosts,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=descriptor,
    )
    return dist.PrefixStore(point.prefix, store)


@contextlib.contextmanager
def _listening(point: MeetingPoint) -> Iterator[socket.socket | None]:
    """Yield a socket listening on the host's address only; None if other machines may connect to
    another address.

    torch itself would listen on all addresses, open to anybody. With several machines, rank 0's
    host name may resolve to loopback on its own machine.
    """
    family, address = socket.AF_INET, ""
    with contextlib.suppress(OSError):  # an unknown name
        found = socket.getaddrinfo(point.host, point.port, type=socket.SOCK_STREAM)
        # IPv4 if there is one
        family, _, _, _, (name, *_) = min(found, key=lambda one: one[0] != socket.AF_INET)
        address = str(name)
    here_only = (
        point.host in ("localhost", address)
        and address
        and ipaddress.ip_address(address).is_loopback
    )
    if not address or not (here_only or point.one_machine):
        yield None
        return
    with socket.socket(family, socket.SOCK_STREAM) as server:
        # a previous start may have just ended
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((address, point.port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            address = ""  # belongs to another machine, or to a proxy
        yield server if address else None


class Meeting:
    """The rendezvous of a start's ranks, which also announce its end to each other.

    store: this rank's connection. local_ranks: ranks that may be on this machine. options: values
    that must match on all ranks, by name: [value, value as typed]. places: all ranks' processes;
    empty before they have met. talk: another connection, for any thread, whose calls do not block.
    silence_s: after which a machine is unreachable.
    """

    def __init__(
        self,
        point: MeetingPoint,
        store: Any,
        own: Place,
        world_size: int,
        local_ranks: Sequence[int],
        timeout_s: float,
        options: Mapping[str, Sequence[str]] = MappingProxyType({}),
        silence_s: float = math.inf,
    ) -> None:
        self.silence_s = silence_s
        self.point = point
        self.store = store
        self.world_size = world_size
        self.rank = own.rank
        values = json.dumps({name: value for name, (value, _) in options.items()}).encode()
        self._own = own._replace(
            options=hashlib.blake2b(values, digest_size=8).hexdigest() if options else ""
        )
        self._local_ranks = local_ranks
        self.timeout_s = timeout_s
        self._options = options
        self.places: Sequence[Place] = ()
        self._entered = (
            False  # before that, the store may be another run's, which must not learn of this rank
        )
        with point.errors():
            self.talk = connect(point, world_size, timeout_s)

    def wait(self, deadline_s: float | None = None) -> None:
        """Return when all ranks have joined.

        deadline_s: of the monotonic clock; None: after the timeout from now on.

        Raises:
            PeerError: if a rank does not join before the deadline, or dies meanwhile.
            UsageError: on every rank, if two ranks' options differ.
            RunError: as announced by another rank.
        """
        with self.point.errors():
            self._wait(deadline_s or time.monotonic() + self.timeout_s)
            self.places = self._came(range(self.world_size))
            self._compare(self._options)

    def announce(self, error: RunError) -> RunError:
        """Announce to all ranks why the start ends; return the first reason that any rank has
        announced."""
        if not self._entered:
            return error
        is_common = isinstance(error, PeerError) or self.places
        message = str(error) if is_common else f"rank {self.rank}: {error}"
        said = json.dumps([type(error).__name__, message])
        return (
            error
            if self.talk.compare_set("end", "", said).decode() == said
            else self.announced() or error
        )

    def announced(self) -> RunError | None:
        """Return the announced reason for the start's end; None while it continues. Rank 0 records
        it."""
        if not self.talk.check(["end"]):
            return None
        kind, message = json.loads(self.talk.get("end"))
        error: RunError = getattr(errors, kind)(message)
        error.agreed, error.recorded = True, self.rank == 0
        return error

    def part(self) -> None:
        """Let the others end first if the store ends with this rank."""
        self.talk.add("parted", 1)
        deadline_s = time.monotonic() + PART_S
        while self.rank == 0 and self.point.hosted and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)  # also for a rank that is just arriving
            if self.talk.add("parted", 0) >= self.talk.add("came", 0):
                return

    def bounded(self, action: Callable[[], Any], limit_s: float = READ_S) -> Any:
        """Call a store action in a thread; return None if the store fails, or does not answer in
        time."""
        with contextlib.suppress(RuntimeError, TimeoutError):
            return in_time(action, limit_s)
        return None

    def enter(self) -> None:
        """Join as this rank.

        Raises:
            UsageError: if another process joined as this rank.
        """
        entered = json.loads(self.store.compare_set(f"came/{self.rank}", "", json.dumps(self._own)))
        if (other := Place(*entered)) != self._own:
            question = "does another run use the same MASTER_PORT?"
            if not self.point.hosted:  # the store outlives the ranks
                question += " Or did torchrun start the ranks again (--max-restarts)? That works on one node only"
                question += "; on several, start the whole job again"
            error = UsageError(
                f"two processes say that they are rank {self.rank} at {self.point}: this one and {other}; {question}"
            )
            error.agreed = False
            raise error
        self._entered = True
        self.store.set(f"at/{self.rank}", json.dumps([*Progress().status(), 0]))
        self.store.add("came", 1)

    def _wait(self, deadline_s: float) -> None:
        look_s = 0.0
        while (end := self.announced()) is None and (
            came := self.store.add("came", 0)
        ) < self.world_size:
            now_s = time.monotonic()
            if now_s > deadline_s:
                here = {place.rank for place in self._came(range(self.world_size))}
                missing = [f"rank {rank}" for rank in range(self.world_size) if rank not in here]
                raise PeerError(
                    f"{came} of {self.world_size} ranks met at {self.point} within --startup_timeout="
                    f"{self.timeout_s:g} s; missing: {shorten(missing)}. See the messages of the others, or start them"
                )
            if now_s > look_s:
                near = processes.neighbors(self._came(self._local_ranks), self._own)
                # If rank 0 hosts the store, the next call above fails and reports its death, on
                # every machine.
                lost = [
                    place
                    for place in processes.gone(near)
                    if place.rank > 0 or not self.point.hosted
                ]
                if lost:
                    raise PeerError(
                        f"lost {processes.names(lost)} while the ranks were meeting; see its own message"
                    )
                look_s = now_s + LOOK_S
            time.sleep(POLL_S)
        if end is not None:
            raise end

    def _compare(self, options: Mapping[str, Sequence[str]]) -> None:
        """Refuse options that differ between ranks, which would hang, update wrongly or crash
        inside a library."""
        first = self.places[0]
        other = next((place for place in self.places if place.options != first.options), None)
        if other is None:
            return
        self.store.set(f"options/{self.rank}", json.dumps(dict(options)))
        keys, absent = ["options/0", f"options/{other.rank}"], ["nothing"] * 2
        self.store.wait(keys, datetime.timedelta(seconds=READ_OPTIONS_S))
        ours, theirs = (json.loads(self.store.get(key)) for key in keys)
        pairs = {name: (theirs.get(name, absent), ours.get(name, absent)) for name in ours | theirs}
        pairs = {name: pair for name, pair in pairs.items() if pair[0][0] != pair[1][0]}
        # Options that were not typed derive from those that were.
        pairs = {name: (a, b) for name, (a, b) in pairs.items() if a[1] != b[1]} or pairs
        shown = [
            f"{name}={abridged(a)} on {other}, but {abridged(b)} on {first}"
            for name, ((a, _), (b, _)) in pairs.items()
        ]
        raise UsageError(
            f"{shorten(shown, limit=3)}; start every rank with the same options and versions"
        )

    def _came(self, ranks: Sequence[int]) -> list[Place]:
        """Return the places of these ranks, if they have joined."""
        keys = [f"came/{rank}" for rank in ranks]
        if not self.store.check(keys):
            keys = [key for key in keys if self.store.check([key])]
        return [Place(*json.loads(row)) for row in self.store.multi_get(keys)]


def statuses(rows: Sequence[bytes]) -> list[Collective]:
    """Return the ranks' activity up to a second before the request, see `PeerWatch.rows`."""
    return [Collective(*json.loads(row)[:-1]) for row in rows]


class PeerWatch:
    """The watching thread. Every rank must call `finish` before the first rank exits.

    on_lost: called in the thread when a rank is lost or has announced the end; ends the process.
    on_request: called in the thread when a rank requests all ranks' stacks.
    """

    def __init__(
        self,
        meeting: Meeting,
        progress: Progress,
        on_lost: Callable[[RunError], None],
        on_request: Callable[[], None],
    ) -> None:
        self._meeting = meeting
        self._progress = progress
        self._on_lost = on_lost
        self._on_request = on_request
        self._neighbors = processes.neighbors(meeting.places, meeting.places[meeting.rank])
        self._requests = 0
        self._store = meeting.talk
        own = meeting.places[meeting.rank].machine
        self._far = (
            [place for place in meeting.places if place.machine != own] if meeting.rank == 0 else []
        )
        self._rows: dict[Place, bytes] = {}  # last row from each rank
        self._missed = collections.Counter[str]()  # consecutive looks without news from a machine
        self._looks = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="peer-watch")
        self._thread.start()
        if own != meeting.places[0].machine:
            threading.Thread(target=self._watch_store, daemon=True, name="store-watch").start()

    def finish(self) -> None:
        """Stop the thread; the caller handles lost ranks from here on."""
        self._done.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)

    def request_stacks(self) -> None:
        """Request all ranks' stacks; return within READ_S."""
        self._meeting.bounded(lambda: self._meeting.store.add("requests", 1))

    def rows(self) -> list[bytes]:
        """Return every rank's last row, in rank order, see `statuses`; empty if the store is
        silent."""
        keys = [f"at/{place.rank}" for place in self._meeting.places]
        return self._meeting.bounded(lambda: self._meeting.store.multi_get(keys)) or []

    def heard(self, rows: Sequence[bytes]) -> set[Place]:
        """Return this machine's ranks, and those that have written since `rows` were read, a few
        seconds earlier."""
        places = self._meeting.places
        moved = {
            place
            for place, before, now in zip(places, rows, self.rows(), strict=False)
            if before != now
        }
        return moved | set(self._neighbors)

    def _run(self) -> None:
        lost: RunError | None = None
        try:
            while lost is None:
                status = [*self._progress.status(), self._looks]
                self._store.set(f"at/{self._meeting.rank}", json.dumps(status))
                lost = self._look()
                self._looks += 1
                if self._done.wait(LOOK_S if lost is None else GRACE_S):
                    return
        except RuntimeError as error:
            if self._done.wait(GRACE_S):
                return
            lost = self._meeting.point.lost(error)
        if isinstance(lost, PeerError):
            lost.names_rank = True
        self._on_lost(lost)

    def _look(self) -> RunError | None:
        """Return why the start ends, or None; announce local losses and read remote ones."""
        requests = self._store.add("requests", 0)
        if requests != self._requests:
            self._requests = requests
            self._on_request()
        end = self._meeting.announced()
        if end is None and (lost := processes.gone(self._neighbors)):
            return self._meeting.announce(PeerError(f"lost {processes.names(lost)}"))
        if end is None and (silent := self._silent()):
            return self._meeting.announce(self._unreachable(processes.names(silent)))
        return end

    def _silent(self) -> list[Place]:
        """Return the ranks of machines that have been silent for too long."""
        rows = (
            self._store.multi_get([f"at/{place.rank}" for place in self._far]) if self._far else []
        )
        heard = {
            place.machine
            for place, row in zip(self._far, rows, strict=True)
            if self._rows.get(place) != row
        }
        self._rows = dict(zip(self._far, rows, strict=True))
        for machine in {place.machine for place in self._far}:
            self._missed[machine] = 0 if machine in heard else self._missed[machine] + 1
        return [place for place in self._far if self._is_over(self._missed[place.machine])]

    def _watch_store(self) -> None:
        """End this rank if the store stays silent: its connection may neither answer nor break."""
        missed, looks = 0, 0
        while not self._done.wait(LOOK_S):
            missed, looks = missed + 1 if looks == self._looks else 0, self._looks
            if self._is_over(missed):
                point = self._meeting.point
                return self._on_lost(
                    self._unreachable(f"{point.owner}, where the ranks meet ({point}),")
                )

    def _is_over(self, missed_looks: int) -> bool:
        return missed_looks * LOOK_S > self._meeting.silence_s

    def _unreachable(self, who: str) -> UnreachableError:
        limit = f"--distributed_timeout={self._meeting.silence_s:g} s"
        return UnreachableError(
            f"{who} cannot be reached, or the machine hangs: nothing was heard for {limit}"
        )
