"""Threads, cores and memory of a process, and settings of the C and OpenMP libraries. Imports no
torch.

The number of threads depends on the configuration and the machine (cores, ranks), never on the
current load: it changes the order of sums, and a resumed run must be bit-identical. The remedy for
load is to spin only briefly (`limit_spinning`). Otherwise OpenMP threads spin for milliseconds at
the end of every operation, on cores that another program needs: on 4 cores with 15 other busy
processes, a step of a 64-channel model took 14 s with two spinning threads, 0.9 s with one thread
and 0.12 s with two sleeping threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from megatron_lite.config import Config
from megatron_lite.config.values import counted
from megatron_lite.distributed.processes import own_cores
from megatron_lite.run.launch import requested_threads, thread_limit

# Multiplications of a square product (tokens x hidden x hidden) that justify a thread. A step of
# four blocks on 512 tokens takes with two threads, as a share of its time with one (AVX-512; AVX2):
# 0.83 and 0.72 at 64 channels (2**21), 0.75 and 0.63 at 128 (2**23), 0.62 at 192, 0.64 at 256
# (2**25); on 4,096 tokens 0.76 at 64 (2**24). With another program on one of the two cores it takes
# 2.8 at 64 and 1.9 at 256, where one thread loses nothing. A second thread is therefore used from
# 2**25 on: one is enough for small models.
WORK_OF_A_THREAD = 2**24

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")  # a container's, or the whole machine's

# The figures for the next two are for a step of a GPT-2 of 10.7M parameters with two threads on two
# cores. Iterations of the wait loop before a GNU OpenMP thread sleeps: 0.2 to 0.6 ms, depending on
# the processor. Alone and with another program on one of the two cores, a step took 216 and 438 ms
# with 3,000 turns, 205 and 540 with 10,000, 202 and 675 with 20,000, and 200 and over 1,600 with
# the library's default, 300,000.
SPINS = 10_000

MIB = 2**20
# Parameters of glibc's mallopt. By default glibc returns freed memory to the kernel and takes it
# again, up to 5,000 pages a step. With these values a step needs one new page, takes 0.98 of the
# time, and no more memory.
MALLOPT = {
    -3: 32
    * MIB,  # M_MMAP_THRESHOLD: smaller blocks come from the heap; the largest value that glibc accepts
    -1: 1024 * MIB,  # M_TRIM_THRESHOLD: free memory at the end of the heap that the process keeps
    -2: 64
    * MIB,  # M_TOP_PAD: memory that the heap takes from the kernel at a time; untouched pages cost nothing
}


class Threads(NamedTuple):
    """This process's number of threads, and the reason."""

    number: int
    reason: str


def choose_threads(config: Config, local_world_size: int, sharing_cores: int) -> Threads:
    """Choose this process's thread count: OMP_NUM_THREADS, or by model size, cores and local ranks.

    Args:
        sharing_cores: number of ranks that may use this rank's cores; 1 if the launcher binds each
            rank to its own. A CPU quota is shared by all local ranks, whatever cores they may use.
    """
    requested, limit = requested_threads(), thread_limit()
    threads = threads_of(
        config, available_cores(), sharing_cores if _quota() is None else local_world_size
    )
    if requested is not None:
        threads = Threads(requested, "OMP_NUM_THREADS")
    return (
        threads if limit is None or threads.number <= limit else Threads(limit, "OMP_THREAD_LIMIT")
    )


def threads_of(config: Config, cores: int, ranks: int) -> Threads:
    """Divide the cores among the ranks that use them, with at least `WORK_OF_A_THREAD` per
    thread."""
    batch = config.batch
    tokens = (batch.micro_batch_size or 1) * batch.sequence_length
    hidden_size, layer_ranks = config.model.hidden_size, config.distributed.tensor_parallel
    useful = useful_threads(tokens * hidden_size**2 // layer_ranks)
    share = max(1, cores // ranks)
    if useful < share:
        return Threads(
            useful,
            f"of {share}: --hidden_size and the tokens of a micro-batch are too few to occupy more",
        )
    shared = f"{counted(cores, 'core')} / {ranks} ranks"
    return Threads(share, shared if ranks > 1 else "all cores")


def useful_threads(work: int) -> int:
    """Return how many threads a square product of this many multiplications is worth."""
    return max(1, work // WORK_OF_A_THREAD)


@functools.cache
def available_cores() -> int:
    """Return the number of cores that this process may use: its affinity, limited by its cgroup's
    quota.

    Call this before torch is first imported: see `own_cores`.
    """
    cores = len(own_cores()) or os.cpu_count() or 1
    quota = _quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def _quota() -> float | None:
    """Return the cgroups' CPU quota in cores; None if unlimited or unknown."""
    return min(
        (grant for folder in _control_groups() if (grant := _grant(folder)) is not None),
        default=None,
    )


def _control_groups(
    root: Path = CONTROL_GROUP, own: Path = Path("/proc/self/cgroup"), controller: str = "cpu"
) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its ancestors; a folder may be absent in a
    container."""
    try:
        entries = [line.split(":", 2) for line in own.read_text("utf-8").splitlines()]
    except OSError:
        entries = []
    for _, controllers, path in [*entries, ["", "", "/"], ["", controller, "/"]]:
        if controllers == "" or controller in controllers.split(","):
            top = root / controller if controllers else root
            folder = top / path.lstrip("/")
            yield from (
                folder,
                *(parent for parent in folder.parents if parent.is_relative_to(top)),
            )


def _grant(folder: Path) -> float | None:
    """Return one cgroup's CPU quota in cores, version 2 or 1."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text("ascii").split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ((folder / name).read_text("ascii").strip() for name in names)
        return None if quota in ("max", "-1") else float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def available_bytes() -> int:
    """Return the available bytes of memory, within the limits of the cgroups; all memory without
    /proc."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError):
        if (
            line := re.search(r"^MemAvailable: +([0-9]+) kB$", MEMINFO.read_text(), re.M)
        ) is not None:
            found = int(line[1]) * 1024
    return min(found, *(_room(folder) for folder in _control_groups(controller="memory")))


def _room(folder: Path) -> int:
    """Return the bytes that one cgroup, version 2 or 1, may still take; without a limit, more than
    any machine has."""
    for limit, used, cache in (
        ("max", "current", "inactive_file"),
        ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # no limit reads "max"
            room = int((folder / f"memory.{limit}").read_text()) - int(
                (folder / f"memory.{used}").read_text()
            )
            cached = re.search(rf"^{cache} ([0-9]+)$", (folder / "memory.stat").read_text(), re.M)
            return max(0, room + (int(cached[1]) if cached else 0))
    return sys.maxsize


# -- library settings, before torch is imported; none changes a result
# ------------------------------------------------


def prepare_libraries() -> None:
    """Count cores and configure OpenMP, glibc and torch's allocator. Call this before importing
    torch."""
    available_cores()
    # OpenMP must never give fewer threads than requested: oneDNN would not compute a part of each
    # product, and a resumed run would sum in another order.
    for name in ("OMP_DYNAMIC", "OMP_MAX_ACTIVE_LEVELS"):
        os.environ.pop(name, None)
    limit_spinning()
    keep_freed_memory()
    # Wastes less GPU memory in holes: see `planner/runtime.py`.
    if (
        not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
        & os.environ.keys()
    ):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    # At warning and error level, torch's C++ prints 40-line stacks for connections that a lost rank
    # closes or never opens.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def limit_spinning() -> None:
    """Limit how long idle OpenMP threads spin, unless the user sets it."""
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
        if "KMP_BLOCKTIME" not in os.environ:  # for libraries without GOMP_SPINCOUNT
            os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step, unless the user sets its variables."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, size_bytes in MALLOPT.items():
            mallopt(parameter, size_bytes)


def limit_tokenizer_threads(threads: int) -> None:
    """Give tokenizers and fastokens this many threads in this process; call before the first text
    is encoded."""
    count, is_parallel = str(threads), "true" if threads > 1 else "false"
    os.environ |= {
        "TOKENIZERS_PARALLELISM": is_parallel,
        "RAYON_NUM_THREADS": count,
        "FASTOKENS_BPE_THREADS": count,
    }
