"""Where the ranks of a run are, and which of those on this machine are gone: a lost connection names neither."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
    cores: int = 0  # that the process may use: bit i is core i; 0 where unknown

    def fields(self) -> tuple[int, str, str, int, int, int]:
        """Return the values, in the order of the constructor."""
        return self.rank, self.host, self.machine, self.pid, self.oom_kills, self.cores

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def own_place(rank: int) -> Place:
    """Return the place of this process."""
    cores = sum(1 << core for core in own_cores())
    return Place(rank, socket.gethostname(), machine_name(), os.getpid(), oom_kills(), cores)


@functools.cache
def own_cores() -> frozenset[int]:
    """Return the cores that this process may use; empty where the system does not say.

    Call this before torch is imported for the first time: with OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY, OpenMP
    then binds this thread to one of the cores.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    return frozenset(affinity(0)) if affinity is not None else frozenset()


def sharing_cores(places: Sequence[Place], rank: int, local_ranks: Sequence[int]) -> int:
    """Count the ranks, `rank` included, that may use a core which `rank` may use.

    local_ranks: those that the launcher puts on its machine. Each of them may be in a container, which looks like a
    machine of its own.
    """
    own = places[rank]
    near = [place for place in places if place.rank in local_ranks or place.machine == own.machine]
    known = all(place.cores for place in near)
    shares = [place for place in near if place.rank != rank and (not known or place.cores & own.cores)]
    return min(1 + len(shares), len(local_ranks))


def gone(places: Sequence[Place], rank: int, limit_s: float) -> list[Place]:
    """Return the ranks on the machine of `rank` whose process has ended, as soon as there is one."""
    deadline_s = time.monotonic() + limit_s
    while True:
        found = [place for place in neighbours(places, rank) if has_ended(place.pid)]
        if found or time.monotonic() > deadline_s:
            return found
        time.sleep(POLL_S)


def stopped(places: Sequence[Place], rank: int) -> list[Place]:
    """Return the ranks on the machine of `rank` whose process was stopped by a signal or a debugger."""
    return [place for place in neighbours(places, rank) if process_state(place.pid) in ("T", "t")]


def neighbours(places: Sequence[Place], rank: int) -> list[Place]:
    """Return the other ranks on the machine of `rank`."""
    return beside(places, places[rank])


def beside(places: Sequence[Place], own: Place) -> list[Place]:
    """Return those of these ranks that are others than `own`, on its machine."""
    return [place for place in places if place.rank != own.rank and place.machine == own.machine]


def has_ended(pid: int) -> bool:
    """Whether a process has ended, even if its parent has not noticed yet."""
    return process_state(pid) in ("", "Z", "X")


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
