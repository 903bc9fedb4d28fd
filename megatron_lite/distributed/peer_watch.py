"""Ranks watch each other through a store: which have joined, which are lost, and what each is doing.

The store is a small server on torchrun's first node, or in rank 0 without torchrun. The ranks meet there before any of
them can block on another inside a library. Every wait here polls, so that the death of a local rank or of the store is
noticed within seconds.

After the meeting a thread watches, because a collective notices a lost peer only when it reaches that peer, and inside
a library only after the time-out. Once a second the thread checks the local processes, reads from the store whether
another machine has lost a rank, and writes there what this rank is doing. It never gives up a remote rank that is
merely silent: a file system may hang for minutes, and time-outs handle that.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import hashlib
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from megatron_lite.config.values import abridged
from megatron_lite.distributed import processes
from megatron_lite.distributed.processes import Place
from megatron_lite.distributed.traffic import Collective, Progress
from megatron_lite.errors import PeerError, UsageError, is_lost_peer, lost_peer, shorten

POLL_S = 0.1  # between polls of the store while the ranks meet
LOOK_S = 1.0  # between checks of the local processes
# A collective may notice too, with the library's message, and a rank that failed by itself writes its reason.
GRACE_S = 2.0
READ_S = 2.0  # limit on reading the store while reporting a failure: the store's process may be the one that hangs
END_S = 5.0  # limit on joining the thread
READ_OPTIONS_S = 30.0  # limit on reading the options of a rank whose options differ


@dataclass(frozen=True)
class MeetingPoint:
    """The address of the store."""

    host: str
    port: int
    hosted: bool  # by rank 0; otherwise by torchrun
    prefix: str  # of all keys
    one_machine: bool = False  # whether all ranks are on one machine

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def lost(self, error: RuntimeError) -> PeerError:
        """Return the error to report when the store does not answer."""
        owner = "rank 0" if self.hosted else "torchrun on the first node"
        return lost_peer(error, f"lost {owner}, where the ranks meet ({self}); see its own message")


def open_store(point: MeetingPoint, rank: int, world_size: int, timeout_s: float) -> Any:
    """Return this rank's connection to the store; rank 0 opens the store if torchrun has none.

    Raises:
        UsageError: if the port is in use.
        PeerError: if the store does not answer within the time-out.
    """
    try:
        if not point.hosted or rank != 0:
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
            "meet: see the messages of the others, or start them",
        ) from error


def connect(
    point: MeetingPoint, world_size: int, timeout_s: float, hosts: bool = False, descriptor: int | None = None
) -> Any:
    """Connect to the store. A blocked call blocks other threads on the same connection, but not on another.

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
    """Yield a socket listening on the host's address only; None if other machines may connect to another address.

    torch itself would listen on all addresses, open to anybody. With several machines, rank 0's host name may resolve
    to loopback on its own machine.
    """
    family, address = socket.AF_INET, ""
    with contextlib.suppress(OSError):  # an unknown name
        found = socket.getaddrinfo(point.host, point.port, type=socket.SOCK_STREAM)
        family, _, _, _, (name, *_) = min(found, key=lambda one: one[0] != socket.AF_INET)  # IPv4 if it has one
        address = str(name)
    here_only = point.host in ("localhost", address) and address and ipaddress.ip_address(address).is_loopback
    if not address or not (here_only or point.one_machine):
        yield None
        return
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a previous start may have just ended
        try:
            server.bind((address, point.port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            address = ""  # belongs to another machine, or to a proxy
        yield server if address else None


class Meeting:
    """The rendezvous of all ranks of a start; the constructor returns when all have joined.

    store: this rank's connection. local_ranks: ranks that may be on this machine. options: what all ranks must have
    alike, by name: [value, value as typed].

    Raises:
        PeerError: if a rank does not join within the time-out, or dies meanwhile.
        UsageError: if another process joined as this rank; on every rank, if the options of two differ.
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
    ) -> None:
        self.point, self.store, self.world_size, self.rank = point, store, world_size, own.rank
        values = json.dumps({name: value for name, (value, _) in options.items()}).encode()
        self._own = own._replace(options=hashlib.blake2b(values, digest_size=8).hexdigest() if options else "")
        self._local_ranks, self.timeout_s = local_ranks, timeout_s
        try:
            self._enter()
            self._wait()
            self.places = self._came(range(world_size))
            self._compare(options)
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            raise point.lost(error) from error

    def _enter(self) -> None:
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
        self.store.add("came", 1)

    def _wait(self) -> None:
        deadline_s, look_s = time.monotonic() + self.timeout_s, 0.0
        while (came := self.store.add("came", 0)) < self.world_size:
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
                # If rank 0 hosts the store, the next call above fails and reports its death, on every machine.
                lost = [place for place in processes.gone(near) if place.rank > 0 or not self.point.hosted]
                if lost:
                    raise PeerError(f"lost {processes.names(lost)} while the ranks were meeting; see its own message")
                look_s = now_s + LOOK_S
            time.sleep(POLL_S)

    def _compare(self, options: Mapping[str, Sequence[str]]) -> None:
        """Refuse options that differ between ranks: a hang, a wrong update or a crash inside a library would follow."""
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
        # What was not typed is derived from what was.
        pairs = {name: (a, b) for name, (a, b) in pairs.items() if a[1] != b[1]} or pairs
        shown = [
            f"{name}={abridged(a)} on {other}, but {abridged(b)} on {first}" for name, ((a, _), (b, _)) in pairs.items()
        ]
        came, deadline_s = self.store.add("compared", 1), time.monotonic() + READ_OPTIONS_S
        while self.rank == 0 and came < self.world_size and time.monotonic() < deadline_s:  # its end may be the store's
            time.sleep(POLL_S)
            came = self.store.add("compared", 0)
        raise UsageError(f"{shorten(shown, limit=3)}; start every rank with the same options and versions")

    def _came(self, ranks: Sequence[int]) -> list[Place]:
        """Return the places of the given ranks that have joined."""
        keys = [f"came/{rank}" for rank in ranks]
        if not self.store.check(keys):
            keys = [key for key in keys if self.store.check([key])]
        return [Place(*json.loads(row)) for row in self.store.multi_get(keys)]


class PeerWatch:
    """The watching thread. Every rank must call `finish` before the first rank exits.

    on_lost: called in the thread when a rank is lost; ends the process. on_request: called in the thread when a rank
    requests all ranks' stacks.
    """

    def __init__(
        self, meeting: Meeting, progress: Progress, on_lost: Callable[[PeerError], None], on_request: Callable[[], None]
    ) -> None:
        self._meeting, self._progress, self._on_lost, self._on_request = meeting, progress, on_lost, on_request
        self._neighbors = processes.neighbors(meeting.places, meeting.places[meeting.rank])
        self._requests = 0
        self._store = connect(meeting.point, meeting.world_size, meeting.timeout_s)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="peer-watch")
        self._thread.start()

    def finish(self) -> None:
        """Stop the thread; the caller handles lost ranks from here on."""
        self._done.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)

    def request_stacks(self) -> None:
        """Request the stacks of all ranks; return within READ_S."""
        self._bounded(lambda store: store.add("requests", 1))

    def statuses(self) -> list[Collective]:
        """Return what every rank was doing up to a second ago, in rank order; empty if the store does not answer."""
        keys = [f"at/{rank}" for rank in range(self._meeting.world_size)]
        rows = self._bounded(lambda store: store.multi_get(keys) if store.check(keys) else [])
        return [Collective(*json.loads(row)) for row in rows or []]

    def _bounded(self, action: Callable[[Any], Any]) -> Any:
        """Call the action in a thread with the groups' connection; return None after READ_S."""
        results: list[Any] = []

        def work() -> None:
            with contextlib.suppress(RuntimeError):
                results.append(action(self._meeting.store))

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(READ_S)
        return results[0] if results else None

    def _run(self) -> None:
        lost: PeerError | None = None
        try:
            while lost is None:
                self._store.set(f"at/{self._meeting.rank}", json.dumps(self._progress.status()))
                lost = self._look()
                if self._done.wait(LOOK_S if lost is None else GRACE_S):
                    return
        except RuntimeError as error:
            if self._done.wait(GRACE_S):
                return
            lost = self._meeting.point.lost(error)
        lost.names_rank = True
        self._on_lost(lost)

    def _look(self) -> PeerError | None:
        """Return the error about a lost rank, or None; share local losses through the store and read remote ones."""
        requests = self._store.add("requests", 0)
        if requests != self._requests:
            self._requests = requests
            self._on_request()
        if lost := processes.gone(self._neighbors):
            self._store.set("lost", f"lost {processes.names(lost)}")
            self._store.add("losses", 1)
        elif not self._store.add("losses", 0):
            return None
        return PeerError(self._store.get("lost").decode())
