"""Cores, load and resident memory, as the kernel tells them. Imports no torch. Linux."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Collection
from pathlib import Path


def name() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "") or (
        platform.processor() or "unknown"
    )


def cores() -> Collection[int]:
    """Return the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def busy_seconds() -> float:
    """Return the time that all processes have used on these cores since boot, or 0 if unknown."""
    own = {f"cpu{core}" for core in cores()}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text("ascii").splitlines()]
    except OSError:
        return 0.0
    used = (fields for fields in lines if fields and fields[0] in own)
    # user, nice, system, idle, iowait, irq, softirq, steal
    return sum(sum(map(int, (*fields[1:4], *fields[6:9]))) for fields in used) / os.sysconf("SC_CLK_TCK")


def share_of_cores(cpu_s: float, elapsed_s: float) -> float:
    """Return CPU seconds as a share of the cores; the kernel counts in ticks, so a short time may look negative."""
    return max(0.0, cpu_s) / (elapsed_s * len(cores()))


def wait_until_quiet(max_busy: float, at_most_s: float = 60.0, sample_s: float = 0.5) -> None:
    """Sleep until all processes together use less than a share of the cores, or the time is up."""
    deadline, busy_s = time.monotonic() + at_most_s, busy_seconds()
    while time.monotonic() < deadline:
        time.sleep(sample_s)
        before, busy_s = busy_s, busy_seconds()
        if share_of_cores(busy_s - before, sample_s) <= max_busy:
            return


def memory_bytes(field: str, process: int | str = "self") -> int:
    """Return a field of a process's status: VmRSS (resident memory) or VmHWM (its peak); 0 if the process is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def reset_peak() -> int:
    """Let VmHWM of this process start anew; return the resident memory of now."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes("VmRSS")
