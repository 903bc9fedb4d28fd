"""Where the ranks of a run are, and which of those on this machine are gone: a lost connection names neither."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed

# The kernel closes the connections of a process before the process is gone; freeing a GPU's memory takes seconds.
LEAVING_S = 2.0
POLL_S = 0.05
VMSTAT = Path("/proc/vmstat")


@dataclass(frozen=True)
class Place:
    """The process of one rank."""

    rank: int
    host: str
    machine: str  # tells apart machines, and containers with process numbers of their own
    pid: int
    oom_kills: int = 0  # on the machine when the ranks met

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def all_places(distributed: Distributed) -> list[Place]:
    """Return the place of every rank, in rank order. All ranks call this together."""
    own = (socket.gethostname(), machine_name(), os.getpid(), oom_kills())
    return [Place(rank, *place) for rank, place in enumerate(distributed.gather_objects(own))]


def gone(places: Sequence[Place], rank: int, limit_s: float) -> list[Place]:
    """Return the ranks on the machine of `rank` whose process has ended, as soon as there is one."""
    deadline_s = time.monotonic() + limit_s
    while True:
        found = [place for place in neighbours(places, rank) if process_state(place.pid) in ("", "Z", "X")]
        if found or time.monotonic() > deadline_s:
            return found
        time.sleep(POLL_S)


def stopped(places: Sequence[Place], rank: int) -> list[Place]:
    """Return the ranks on the machine of `rank` whose process was stopped by a signal or a debugger."""
    return [place for place in neighbours(places, rank) if process_state(place.pid) in ("T", "t")]


def neighbours(places: Sequence[Place], rank: int) -> list[Place]:
    """Return the other ranks on the machine of `rank`."""
    return [place for place in places if place.rank != rank and place.machine == places[rank].machine]


def process_state(pid: int) -> str:
    """Return the kernel's letter for the state of a process (proc(5)): Z dead, T stopped, ...; empty if it is gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:  # it exists
        pass
    with contextlib.suppress(OSError):  # without /proc
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "R"


def start_ticks(pid: int) -> str:
    """Return when a process started, in the kernel's ticks since the boot; empty if it is gone or without /proc."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has ended on this machine; 0 if it does not tell."""
    with contextlib.suppress(OSError, ValueError):
        return next((int(line[9:]) for line in VMSTAT.read_text().splitlines() if line.startswith("oom_kill ")), 0)
    return 0


def machine_name() -> str:
    """Return what identifies this machine and its process numbers; no more than its name where there is no /proc."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return socket.gethostname()
