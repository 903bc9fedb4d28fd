"""Local processes and their ranks, to name a rank whose connection was lost. Imports no torch."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron_lite.errors import shorten

# The kernel closes a process's connections before the process is gone; freeing a GPU's memory takes
# seconds.
LEAVING_S = 2.0
POLL_S = 0.05
PROC = Path("/proc")


class Place(NamedTuple):
    """One rank's process."""

    rank: int
    host: str
    machine: str  # distinguishes machines, and containers with their own PID namespace
    pid: int
    oom_kills: int = 0  # on the machine when the ranks met
    cores: int = 0  # bit i: the process may use core i; 0 if unknown
    options: str = ""  # digest of the options that must match on all ranks

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


def own_place(rank: int) -> Place:
    """Return this process's place."""
    cores = sum(1 << core for core in own_cores())
    return Place(rank, socket.gethostname(), machine_name(), os.getpid(), oom_kills(), cores)


@functools.cache
def own_cores() -> frozenset[int]:
    """Return the cores that this process may use; empty if unknown.

    Call this before torch is first imported: with OMP_PROC_BIND, OMP_PLACES or GOMP_CPU_AFFINITY,
    OpenMP then binds this thread to one core.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    return frozenset(affinity(0)) if affinity is not None else frozenset()


def sharing_cores(places: Sequence[Place], rank: int, local_ranks: Sequence[int]) -> int:
    """Count the ranks, including `rank`, that may use a core of `rank`.

    local_ranks: the ranks that the launcher starts on this machine; each may be in a container,
    which looks like a separate machine.
    """
    own = places[rank]
    near = [place for place in places if place.rank in local_ranks or place.machine == own.machine]
    known = all(place.cores for place in near)
    shares = [
        place for place in near if place.rank != rank and (not known or place.cores & own.cores)
    ]
    return min(1 + len(shares), len(local_ranks))


def neighbors(places: Sequence[Place], own: Place) -> list[Place]:
    """Return the other ranks on the machine of `own`."""
    return [place for place in places if place.rank != own.rank and place.machine == own.machine]


def gone(near: Sequence[Place], limit_s: float = 0.0) -> list[Place]:
    """Return the local ranks whose process has ended; wait up to `limit_s` for the first."""
    deadline_s = time.monotonic() + limit_s
    while True:
        found = [place for place in near if has_ended(place.pid)]
        if found or time.monotonic() > deadline_s:
            return found
        time.sleep(POLL_S)


def stopped(near: Sequence[Place]) -> list[Place]:
    """Return the local ranks whose process was stopped by a signal or a debugger."""
    return [place for place in near if process_state(place.pid) in ("T", "t")]


def names(places: Sequence[Place]) -> str:
    """Return names of some ranks for a message."""
    return shorten([str(place) for place in places], limit=3)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, even if its parent has not reaped it yet."""
    return process_state(pid) in ("", "Z", "X")


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process state (proc(5)): Z dead, T stopped, ...; empty if it
    is gone."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:  # it exists
        pass
    return next(iter(stat_fields(pid)), "R")  # R without /proc


def start_ticks(pid: int) -> str:
    """Return when a process started, in the kernel's ticks since boot; empty if it is gone or
    without /proc."""
    return "".join(stat_fields(pid)[19:20])


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on (proc(5)); empty if it is gone or
    without /proc."""
    return proc_file(pid, "stat").decode("utf-8", "replace").rpartition(")")[2].split()


def proc_file(pid: int | str, name: str) -> bytes:
    """Return the content of /proc/<pid>/<name>; empty if it does not exist or may not be read."""
    with contextlib.suppress(OSError):
        return (PROC / str(pid) / name).read_bytes()
    return b""


def kill_children(program: str) -> None:
    """Kill this process's direct children that run `program` (a file name). Linux only."""
    for thread in PROC.glob("self/task/*"):  # any thread may have started a child
        for child in proc_file("self", f"task/{thread.name}/children").split():
            words = proc_file(int(child), "cmdline").split(b"\0")
            with contextlib.suppress(OSError):
                if os.path.basename(words[0]) == program.encode():
                    os.kill(int(child), signal.SIGKILL)


def oom_kills() -> int:
    """Return how many processes this machine's out-of-memory killer has ended; 0 if unknown."""
    lines = proc_file("", "vmstat").decode().splitlines()
    return next((int(line[9:]) for line in lines if line.startswith("oom_kill ")), 0)


def machine_name() -> str:
    """Return an identifier of this machine and PID namespace; the host name without /proc."""
    with contextlib.suppress(OSError):
        return (PROC / "sys/kernel/random/boot_id").read_text().strip() + os.readlink(
            PROC / "self/ns/pid"
        )
    return socket.gethostname()
