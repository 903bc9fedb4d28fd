"""The progress of a rank: phase, iteration and newest collectives, for messages and files about one that hangs."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

RECENT = 64  # collectives in memory


class Collective(NamedTuple):
    """A collective that this rank has started."""

    number: int  # from 1; the same on all ranks, which start the same collectives
    time_s: float
    kind: str
    size_bytes: int
    phase: str
    iteration: int

    def __str__(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.time_s))
        return f"{self.number} {when} {self.kind}, {self.size_bytes:,} bytes, {self.phase}, iteration {self.iteration}"


class Status(NamedTuple):
    """The progress of a rank at one moment."""

    number: int  # of the newest collective that it has started; 0 before the first one
    phase: str
    iteration: int
    kind: str  # of that collective

    def place(self) -> str:
        """Return where in the run that was."""
        return f"{self.phase}, iteration {self.iteration}" if self.iteration else self.phase


class Progress:
    """Where this rank is. Other threads read this at any time."""

    def __init__(self) -> None:
        self.phase, self.iteration = "the start", 0
        self.recent: deque[Collective] = deque(maxlen=RECENT)

    def at(self, phase: str, iteration: int) -> None:
        """Note the beginning of a phase of an iteration, counted from 1."""
        self.phase, self.iteration = phase, iteration

    def started(self, kind: str, size_bytes: int) -> None:
        """Note the start of a collective."""
        number = self.recent[-1].number + 1 if self.recent else 1
        self.recent.append(Collective(number, time.time(), kind, size_bytes, self.phase, self.iteration))

    def status(self) -> Status:
        """Return what this rank is doing now."""
        newest = self.recent[-1] if self.recent else None
        return Status(newest.number if newest else 0, self.phase, self.iteration, newest.kind if newest else "")
