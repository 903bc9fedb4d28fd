"""The meeting of the ranks, before any of them can wait for another inside of a library: who came, and from where.

The ranks meet in a store, a small server on torchrun's first node, or in rank 0 without torchrun. Here each wait is a
poll, so that a rank on this machine that has died, or the end of the store, is noticed within seconds.
"""

from __future__ import annotations

import contextlib
import datetime
import json
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

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def owner(self) -> str:
        """The process that the store is in."""
        return "rank 0" if self.hosted else "torchrun on the first node"


def open_store(point: MeetingPoint, rank: int, world_size: int, timeout_s: float) -> Any:
    """Return this rank's connection to the store; rank 0 opens the store if torchrun has none."""
    return connect(point, world_size, timeout_s, hosts=point.hosted and rank == 0)


def connect(point: MeetingPoint, world_size: int, timeout_s: float, hosts: bool = False) -> Any:
    """Return a connection. A thread that waits in it blocks all others in it, but in no other connection."""
    store = dist.TCPStore(
        point.host,
        point.port,
        world_size,
        hosts,
        timeout=datetime.timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )
    return dist.PrefixStore(point.prefix, store)


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
            error = UsageError(
                f"two processes say that they are rank {self.rank} at {self.point}: this one and {_parsed(entered)}; "
                "does another run use the same MASTER_PORT?"
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
