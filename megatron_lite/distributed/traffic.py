"""Record a rank's collectives: their traffic, the time that computation waits for them, and the
rank's progress.

Traffic is counts, elements and bytes by kind. Progress is the phase, the iteration and the newest
collectives, for reports about a hanging rank.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

RECENT = 64  # collectives to remember
# Kinds of collectives, in words.
KINDS = {
    "gather": "gathers",  # of weights
    "reduce": "reductions",  # of gradients
    "expert gather": "gathers of experts",  # among the ranks with the same ones
    "expert reduce": "reductions of experts",
    "replica gather": "gathers across replicas",  # of hybrid shards
    "replica reduce": "reductions across replicas",
    "tensor gather": "tensor gathers",  # of hidden states
    "tensor reduce": "tensor reductions",
    "tensor sum": "tensor sums",  # of hidden states, and of gradients of replicated parameters
    "tensor scale": "tensor scales",  # of 8-bit factors
    "expert exchange": "exchanges of experts' tokens",  # their counts, results and gradients, too
    "muon gather": "muon gathers",
    "muon reduce": "muon reductions",
    "send": "messages to other pipeline ranks",  # hidden states and their gradients
    "receive": "messages from other pipeline ranks",
    "sum": "sums",  # of a few numbers
    "scale": "scales",  # of 8-bit factors
    "whole": "gathers of whole parameters",
    "debug": "gathers for debugging",
}


class Handle(Protocol):
    """A collective in flight. After `wait`, which may be called again, its buffers may be read and
    written."""

    def wait(self) -> None: ...


# (kind, bytes of the full buffer, handle) -> handle
Recorder = Callable[[str, int, Handle], Handle]


class Collective(NamedTuple):
    """A collective that a rank has started."""

    number: int  # from 1; equal on all ranks, which start the same collectives
    time_s: float
    kind: str
    size_bytes: int
    phase: str
    iteration: int

    def __str__(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.time_s))
        return f"{self.number} {when} {self.kind}, {self.size_bytes:,} bytes, {self.phase}, iteration {self.iteration}"

    def place(self) -> str:
        """Return the phase and iteration as text."""
        return f"{self.phase}, iteration {self.iteration}" if self.iteration else self.phase


class Progress:
    """This rank's progress. Other threads may read it at any time."""

    def __init__(self) -> None:
        self.phase, self.iteration = "the start", 0
        self.on_phase: Callable[[str], None] = lambda phase: None
        self.recent: deque[Collective] = deque(maxlen=RECENT)

    def enter(self, phase: str) -> None:
        """Record a phase of the set-up, and report it to `on_phase`."""
        self.phase = phase
        self.on_phase(phase)

    def at(self, phase: str, iteration: int) -> None:
        """Record the beginning of a phase. iteration: from 1."""
        self.phase, self.iteration = phase, iteration

    def started(self, kind: str, size_bytes: int) -> None:
        """Record the start of a collective."""
        number = self.status().number + 1
        self.recent.append(
            Collective(number, time.time(), kind, size_bytes, self.phase, self.iteration)
        )

    def status(self) -> Collective:
        """Return the newest collective (number 0 before the first one), with the current phase and
        iteration."""
        newest = self.recent[-1] if self.recent else Collective(0, 0.0, "", 0, "", 0)
        return newest._replace(phase=self.phase, iteration=self.iteration)


@dataclass
class Total:
    """Traffic of one kind of collective, on one rank, since the last `Traffic.take`."""

    collectives: int = 0
    elements: int = 0  # of the full buffers
    bytes: int = 0  # of the full buffers
    wire_bytes: int = 0  # sent by this rank
    waited_s: float = 0.0  # exposed communication time; 0 unless timed


class Traffic:
    """Counts a rank's collectives in all its groups, by kind: see `KINDS`."""

    def __init__(self, progress: Progress | None = None, device_type: str = "cpu") -> None:
        self.progress = progress or Progress()
        self.timed = False  # whether to time how long computation waits for each kind
        self._on_gpu = device_type == "cuda"
        self._totals: dict[str, Total] = {}
        self._paused = False
        self.recorder: Recorder | None = None  # set by a profile: wraps each collective's handle
        self._stalls: list[
            tuple[str, torch.cuda.Event, torch.cuda.Event]
        ] = []  # on a GPU: before and after a wait

    def started(self, kind: str, buffer: Tensor, work: Handle, wire_bytes: int) -> Handle:
        """Count a collective and return its handle, timed if `timed` is set.

        Args:
            buffer: the full buffer.
            wire_bytes: what this rank sends.
        """
        self.progress.started(kind, buffer.nbytes)
        if self._paused:
            return work
        total = self._totals.setdefault(kind, Total())
        total.collectives += 1
        total.elements += buffer.numel()
        total.bytes += buffer.nbytes
        total.wire_bytes += wire_bytes
        if self.recorder is not None:
            work = self.recorder(kind, buffer.nbytes, work)
        return FirstWait(work, lambda: self._wait(kind, work)) if self.timed else work

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count collectives that start inside the block: validation, checkpoints,
        exports."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def take(self) -> dict[str, Total]:
        """Return the totals by kind since the last call, and reset them. Timing on a GPU
        synchronizes with it."""
        for kind, before, after in self._stalls:
            after.synchronize()
            self._totals.setdefault(kind, Total()).waited_s += before.elapsed_time(after) / 1e3
        totals = self._totals
        self._totals = {}
        self._stalls = []
        return totals

    def _wait(self, kind: str, work: Handle) -> None:
        if self._on_gpu:  # the stream waits, not the host
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            work.wait()
            after.record()
            self._stalls.append((kind, before, after))
            return
        start_s = time.perf_counter()
        work.wait()
        self._totals.setdefault(kind, Total()).waited_s += time.perf_counter() - start_s


class FirstWait:
    """A collective in flight whose first `wait` calls a function, which waits and does more.

    The function is dropped before it is called, so that a finished handle keeps no memory alive.
    """

    def __init__(self, work: Handle, first_wait: Callable[[], None]) -> None:
        self._work = work
        self._first_wait: Callable[[], None] | None = first_wait

    def wait(self) -> None:
        first_wait, self._first_wait = self._first_wait, None
        (first_wait or self._work.wait)()
