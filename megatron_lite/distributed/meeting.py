"""The meeting of the ranks, before any of them can wait for another inside of a library: who came, and from where.

The ranks meet in a store, a small server on torchrun's first node, or in rank 0 without torchrun. Here each wait is a
poll, so that a rank on this machine that has died, or the end of the store, is noticed within seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import json
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_lite.distributed import peers
from megatron_lite.distributed.peers import Place
from megatron_lite.errors import PeerError, UsageError, is_lost_peer, shorten

POLL_S = 0.1
LOOK_S = 1.0  # between looks at the processes of this machine


@dataclass(frozen=True)
class MeetingPoint:
    """The store of a start."""

    host: str
    port: int
    hosted: bool  # by rank 0; otherwise by torchrun
    prefix: str  # of all keys
    one_machine: bool = False  # whether all ranks are on one

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def owner(self) -> str:
        """The process that the store is in."""
        return "rank 0" if self.hosted else "torchrun on the first node"


def open_store(point: MeetingPoint, rank: int, world_size: int, timeout_s: float) -> Any:
    """Return this rank's connection to the store; rank 0 opens the store if torchrun has none.

    Raises:
        OSError: EADDRINUSE, or RuntimeError with that word, if the port is in use.
    """
    if not point.hosted or rank != 0:
        return connect(point, world_size, timeout_s)
    with _listening(point) as server:
        descriptor = None if server is None else server.fileno()
        store = connect(point, world_size, timeout_s, hosts=True, descriptor=descriptor)
        if server is not None:
            server.detach()  # the store closes it
    return store


def connect(
    point: MeetingPoint, world_size: int, timeout_s: float, hosts: bool = False, descriptor: int | None = None
) -> Any:
    """Return a connection. A thread that waits in it blocks all others in it, but in no other connection.

    hosts: open the store first, at the socket `descriptor` or at all addresses of this machine.
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
    """Yield a socket for the store at the address of its host only; None if other machines may look for it elsewhere.

    torch itself would listen at all addresses, for anybody. Where ranks are on several machines, the name of rank 0's
    may mean loopback on that machine alone.
    """
    family, address = _address(point)
    here_only = point.host in ("localhost", address) and address and ipaddress.ip_address(address).is_loopback
    if not address or not (here_only or point.one_machine):
        yield None
        return
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a start that has just ended
        try:
            server.bind((address, point.port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            address = ""  # of another machine, or of none, which passes connections on
        yield server if address else None


def _address(point: MeetingPoint) -> tuple[socket.AddressFamily, str]:
    """Return the address of the store's host, IPv4 if it has one; an empty one if its name is unknown."""
    try:
        found = socket.getaddrinfo(point.host, point.port, type=socket.SOCK_STREAM)
    except OSError:
        return socket.AF_INET, ""
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, str(address[0])


class Meeting:
    """All ranks of a start have met.

    Raises:
        PeerError: if not all of them come within the time-out, or one that came is gone.
        UsageError: if another process came as this rank.
    """

    def __init__(
        self, point: MeetingPoint, store: Any, own: Place, world_size: int, local_ranks: Sequence[int], timeout_s: float
    ) -> None:
        """store: this rank's connection. local_ranks: ranks that may be on this machine."""
        self.point, self.store, self.world_size, self.rank = point, store, world_size, own.rank
        self._own, self._local_ranks, self.timeout_s = own, local_ranks, timeout_s
        with self._store_is_there():
            self._enter()
            self._wait()
            rows = self.store.multi_get([_key(rank) for rank in range(world_size)])
        self.places = [_parsed(row) for row in rows]

    def _enter(self) -> None:
        mine = json.dumps(self._own.fields())
        entered = self.store.compare_set(_key(self.rank), "", mine).decode()
        if entered != mine:
            question = "does another run use the same MASTER_PORT?"
            if not self.point.hosted:  # the store outlives the ranks
                question += " Or did torchrun start the ranks again (--max-restarts)? That works on one node only"
                question += "; on several, start the whole job again"
            error = UsageError(
                f"two processes say that they are rank {self.rank} at {self.point}: this one and {_parsed(entered)}; "
                f"{question}"
            )
            error.agreed = False
            raise error
        self.store.add("came", 1)

    def _wait(self) -> None:
        deadline_s, look_s = time.monotonic() + self.timeout_s, 0.0
        while (came := self.store.add("came", 0)) < self.world_size:
            now_s = time.monotonic()
            if now_s > deadline_s:
                raise PeerError(
                    f"{came} of {self.world_size} ranks met at {self.point} within --startup_timeout="
                    f"{self.timeout_s:g} s; missing: {self._missing()}. See the messages of the others, or start them"
                )
            if now_s > look_s:
                self._look()
                look_s = now_s + LOOK_S
            time.sleep(POLL_S)

    def _look(self) -> None:
        """Raise if a rank of this machine has come and gone."""
        came = [_key(rank) for rank in self._local_ranks if self.store.check([_key(rank)])]
        beside = peers.beside([_parsed(row) for row in self.store.multi_get(came)], self._own)
        if lost := [place for place in beside if peers.has_ended(place.pid)]:
            names = shorten([str(place) for place in lost], limit=3)
            raise PeerError(f"lost {names} while the ranks were meeting; see its own message")

    def _missing(self) -> str:
        missing = [f"rank {rank}" for rank in range(self.world_size) if not self.store.check([_key(rank)])]
        return shorten(missing)

    @contextlib.contextmanager
    def _store_is_there(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            lost = PeerError(f"lost {self.point.owner}, where the ranks meet ({self.point}); see its own message")
            lost.detail = " ".join(str(error).split())[:500]
            raise lost from error


def _key(rank: int) -> str:
    return f"came/{rank}"


def _parsed(row: bytes | str) -> Place:
    return Place(*json.loads(row))
