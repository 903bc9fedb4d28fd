"""Threads of a process on a CPU: how many, and how they wait for each other.

The number follows from the configuration and the machine (cores, ranks), never from the momentary load: with other
threads, sums are taken in another order, and a resumed run must be bit-identical. The remedy for load is to spin only
shortly (`libraries.limit_spinning`). OpenMP's threads otherwise spin for milliseconds at the end of every operation, on
cores that another program needs: on 4 cores with 15 other busy processes, a step of a model of 64 channels took 14 s
with two spinning threads, 0.9 s with one thread and 0.12 s with two that sleep.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_lite.config import Config
from megatron_lite.distributed.processes import own_cores
from megatron_lite.run.launch import requested_threads, thread_limit

# Multiplications of a square product (tokens x hidden x hidden) that a thread needs. A step of four blocks on 512
# tokens takes with two threads, as a share of its time with one (AVX-512; AVX2): 0.83 and 0.72 at 64 channels (2**21),
# 0.75 and 0.63 at 128 (2**23), 0.62 at 192, 0.64 at 256 (2**25); on 4,096 tokens 0.76 at 64 (2**24). Beside another
# program on one of the two cores it takes 2.8 at 64 and 1.9 at 256, where one thread loses nothing. A second thread
# therefore comes at 2**25: small models finish soon with one.
WORK_OF_A_THREAD = 2**24


class Threads(NamedTuple):
    """The number of threads of this process, and why."""

    number: int
    reason: str


def choose_threads(config: Config, local_world_size: int, sharing_cores: int) -> Threads:
    """Choose this process's threads: OMP_NUM_THREADS, or by the size of the model, cores and ranks of this machine.

    Args:
        sharing_cores: number of ranks that may use this rank's cores: 1 where the launcher binds each to its own. A
            quota of time counts all ranks of the machine, whatever cores they may use.
    """
    requested, limit = requested_threads(), thread_limit()
    threads = threads_of(config, available_cores(), sharing_cores if _quota() is None else local_world_size)
    if requested is not None:
        threads = Threads(requested, "OMP_NUM_THREADS")
    return threads if limit is None or threads.number <= limit else Threads(limit, "OMP_THREAD_LIMIT")


def threads_of(config: Config, cores: int, ranks: int) -> Threads:
    """Share the cores among the ranks that use them, but give no thread less than `WORK_OF_A_THREAD`."""
    batch = config.batch
    tokens = (batch.micro_batch_size or 1) * batch.sequence_length
    work = tokens * config.model.hidden_size**2 // config.distributed.tensor_parallel
    useful = max(1, work // WORK_OF_A_THREAD)
    share = max(1, cores // ranks)
    if useful < share:
        return Threads(useful, f"of {share}: --hidden_size and the tokens of a micro-batch give no work to more")
    shared = f"{cores} core{'s' if cores > 1 else ''} / {ranks} ranks"
    return Threads(share, shared if ranks > 1 else "all cores")


@functools.cache
def available_cores() -> int:
    """Return the number of cores that this process may use: its affinity, within the quota of its control group.

    Call this before torch is imported for the first time, as `own_cores`.
    """
    cores = len(own_cores()) or os.cpu_count() or 1
    quota = _quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _quota() -> float | None:
    """Return the CPUs' time per time that the control groups grant; None if unlimited or unknown."""
    return min((grant for folder in _control_groups() if (grant := _grant(folder)) is not None), default=None)


def _control_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> Iterator[Path]:
    """Yield the folder of this process's control group and of each around it; a folder may be absent in a container."""
    try:
        entries = [line.split(":", 2) for line in own.read_text("utf-8").splitlines()]
    except OSError:
        entries = []
    for _, controllers, path in [*entries, ["", "", "/"], ["", "cpu", "/"]]:
        if controllers == "" or "cpu" in controllers.split(","):
            top = root / "cpu" if controllers else root
            folder = top / path.lstrip("/")
            yield from (folder, *(parent for parent in folder.parents if parent.is_relative_to(top)))


def _grant(folder: Path) -> float | None:
    """Return the quota of one control group, of version 2 or 1."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text("ascii").split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ((folder / name).read_text("ascii").strip() for name in names)
        return None if quota in ("max", "-1") else float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
