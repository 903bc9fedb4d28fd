"""The ranks' watch over each other, in a thread: a lost rank ends the run within seconds, whatever the others wait for.

Collectives notice a lost peer only when they come to it, and inside of a library not before their time-out. Once a
second the thread looks at the processes of this machine, reads in the store whether another machine has lost a rank,
and writes there what this rank is doing. A rank of another machine that is only silent is never given up here: its
file system may hang for minutes, and the time-outs are there for that.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any

from megatron_lite.distributed import peers
from megatron_lite.distributed.meeting import Meeting, connect
from megatron_lite.distributed.progress import Progress, Status
from megatron_lite.errors import PeerError, shorten

POLL_S = 1.0
# A collective may notice as well, and knows the library's words; a rank that failed by itself writes its reason.
GRACE_S = 2.0
READ_S = 2.0  # limit on reading the store while a failure is reported: its process may be the one that hangs
END_S = 5.0  # limit on the thread's end


class PeerWatch:
    """The thread, from the meeting of the ranks until `finish`, which every rank calls before the first one ends.

    on_lost: called in the thread with a PeerError if a rank is lost; it ends the process. on_request: called in the
    thread if a rank asks all ranks for their stacks.
    """

    def __init__(
        self, meeting: Meeting, progress: Progress, on_lost: Callable[[PeerError], None], on_request: Callable[[], None]
    ) -> None:
        self._meeting, self._progress, self._on_lost, self._on_request = meeting, progress, on_lost, on_request
        self._beside = peers.beside(meeting.places, meeting.places[meeting.rank])
        self._requests = 0
        self._store = connect(meeting.point, meeting.world_size, meeting.timeout_s)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="peer-watch")
        self._thread.start()

    def finish(self) -> None:
        """End the thread; lost ranks are the caller's business from here on."""
        self._done.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(END_S)

    def request_stacks(self) -> None:
        """Ask all ranks for their stacks; returns within READ_S."""
        self._bounded(lambda store: store.add("requests", 1))

    def statuses(self) -> list[Status]:
        """Return what every rank was doing up to a second ago, in rank order; empty if the store does not answer."""
        keys = [_key(rank) for rank in range(self._meeting.world_size)]
        rows = self._bounded(lambda store: store.multi_get(keys) if store.check(keys) else [])
        return [Status(*json.loads(row)) for row in rows or []]

    def _bounded(self, action: Callable[[Any], Any]) -> Any:
        """Call the action with the connection that the groups used, in a thread; None if READ_S is not enough."""
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
                self._store.set(_key(self._meeting.rank), json.dumps(self._progress.status()))
                lost = self._look()
                if self._done.wait(POLL_S if lost is None else GRACE_S):
                    return
        except RuntimeError as error:
            if self._done.wait(GRACE_S):
                return
            lost = PeerError(f"lost {self._meeting.point.owner}, with which the ranks met; see its own message")
            lost.names_rank, lost.detail = True, " ".join(str(error).split())[:500]
        self._on_lost(lost)

    def _look(self) -> PeerError | None:
        """Return what another machine says about a lost rank, or tell the others of one that is lost here."""
        requests = self._store.add("requests", 0)
        if requests != self._requests:
            self._requests = requests
            self._on_request()
        if ended := [place for place in self._beside if peers.has_ended(place.pid)]:
            self._store.set("lost", f"lost {shorten([str(place) for place in ended], limit=3)}")
            self._store.add("losses", 1)
        elif not self._store.add("losses", 0):
            return None
        lost = PeerError(self._store.get("lost").decode())
        lost.names_rank = True
        return lost


def _key(rank: int) -> str:
    return f"at/{rank}"
