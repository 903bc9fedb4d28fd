"""Cores, load and resident memory from the kernel, and the libraries' instruction sets.

ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA and MKL_ENABLE_INSTRUCTIONS limit the instruction sets of
one library each. Linux only. Imports no torch.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple


def name() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
    ) or (platform.processor() or "unknown")


def cores() -> Collection[int]:
    """Return the cores that this process may use."""
    return (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )


def busy_seconds() -> float:
    """Return the CPU time of all processes on these cores since boot, or 0 if unknown."""
    own = {f"cpu{core}" for core in cores()}
    try:
        lines = [line.split() for line in Path("/proc/stat").read_text("ascii").splitlines()]
    except OSError:
        return 0.0
    used = (fields for fields in lines if fields and fields[0] in own)
    # user, nice, system, idle, iowait, irq, softirq, steal
    return sum(sum(map(int, (*fields[1:4], *fields[6:9]))) for fields in used) / os.sysconf(
        "SC_CLK_TCK"
    )


class Load(NamedTuple):
    """Clock, CPU seconds of the measured program and of all programs, at a moment or over a
    span."""

    elapsed_s: float
    own_s: float
    busy_s: float

    def since(self, before: Load) -> Load:
        """Return the span between two moments."""
        return Load(*(now - then for now, then in zip(self, before, strict=True)))

    @property
    def others(self) -> float:
        """The share of the cores used by other programs; at least 0, because the kernel counts in
        ticks."""
        return max(0.0, self.busy_s - self.own_s) / (self.elapsed_s * len(cores()))


def load(own_s: float | None = None) -> Load:
    """Return the current load. own_s: CPU seconds of the measured program (default: this
    process)."""
    return Load(
        time.perf_counter(), time.process_time() if own_s is None else own_s, busy_seconds()
    )


def memory_bytes(field: str, process: int | str = "self") -> int:
    """Return a field of a process's status: VmRSS (resident memory) or VmHWM (its peak); 0 if the
    process is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def reset_peak() -> int:
    """Reset VmHWM of this process; return the current resident memory."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory_bytes("VmRSS")


# Emulates a CPU with AVX2 only. MKL obeys its variable only on Intel CPUs.
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
ISAS: dict[str, dict[str, str]] = {"all": {}, "avx2": AVX2}
# One product each by MKL and oneDNN, so that both print a line with their instruction set.
_PROBE = """
import torch
print("torch", torch.backends.cpu.get_cpu_capability(), flush=True)
a = torch.ones(64, 64)
a @ a
torch._C._nn.mkldnn_linear(a.to_mkldnn(), a.to_mkldnn())
"""
_FOUND = {
    "torch": re.compile(r"^torch (\S+)", re.M),
    "oneDNN": re.compile(r"^(?:onednn|dnnl)_verbose.*,isa:(?:Intel )?([^\n,]+)", re.M),
    "MKL": re.compile(r"^MKL_VERBOSE .*?architecture (.+?)(?: enabled)?(?: processors)?, ", re.M),
}
UNKNOWN = "unknown"


def instruction_sets(
    environment: Mapping[str, str], python: str = sys.executable
) -> dict[str, str]:
    """Query each library's instruction set in a separate process; "unknown" if it prints none, as
    when torch is built without it."""
    verbose = {"ONEDNN_VERBOSE": "1", "MKL_VERBOSE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [python, "-c", _PROBE],
        env={**os.environ, **environment, **verbose},
        capture_output=True,
        text=True,
    )
    return instruction_sets_in(done.stdout)


def instruction_sets_in(output: str) -> dict[str, str]:
    """Parse the instruction sets from the libraries' verbose output."""
    found = {name: pattern.search(output) for name, pattern in _FOUND.items()}
    return {name: _short(match[1]) if match else UNKNOWN for name, match in found.items()}


def _short(name: str) -> str:
    """Shorten MKL's "... Advanced Vector Extensions 512 (Intel(R) AVX-512) with ..." to "AVX-512
    with ..."."""
    name = re.sub(r"Intel\(R\) ", "", name)
    return re.sub(r"^.*?\(([^)]+)\)", r"\1", name) if name.startswith("Advanced") else name
