"""What the benchmark reads of the machine: traffic, load, memory, versions, and how fast its GPU could be."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from typing import Any

import torch

import megatron_lite


def loopback_bytes() -> int | None:
    """Bytes sent over the loopback device since boot, by all processes; None where that cannot be read."""
    try:
        with open("/proc/net/dev", encoding="ascii") as file:
            fields = {name.strip(): values.split() for name, _, values in (line.partition(":") for line in file)}
        return int(fields["lo"][8])
    except (OSError, KeyError, IndexError, ValueError):
        return None


def peak_rss_bytes() -> int | None:
    """The most memory that this process has had resident; None where that cannot be read."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            (line,) = [line for line in file if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None


def busy_seconds() -> float:
    """CPU time that the whole machine has spent since boot, in seconds; 0 where that cannot be read."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return 0.0
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def wait_until_quiet(max_busy: float, at_most_s: float = 60.0, sample_s: float = 0.5) -> None:
    """Sleep until all processes together take less than a share of the CPUs, or the time is up."""
    deadline, busy_s = time.monotonic() + at_most_s, busy_seconds()
    while time.monotonic() < deadline:
        time.sleep(sample_s)
        before, busy_s = busy_s, busy_seconds()
        if busy_s - before <= max_busy * sample_s * (os.cpu_count() or 1):
            return


def load_average() -> list[float] | None:
    """Of the last 1, 5 and 15 minutes."""
    try:
        return list(os.getloadavg())
    except OSError:
        return None


def versions() -> dict[str, str]:
    """Of everything that computes, as far as it is installed."""
    known = {"python": platform.python_version(), "torch": torch.__version__}
    known["megatron_lite"] = megatron_lite.__version__
    if torch.version.cuda is not None:
        known |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    for name in ("triton", "transformers", "liger_kernel", "torchtitan"):
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known


def describe(device: torch.device, load_before: list[float] | None) -> dict[str, Any]:
    """The processor or GPU, and how busy the machine was."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    if device.type == "cpu" and os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        name = names[0] if names else name
    return {"device": name, "cores": os.cpu_count(), "load_before": load_before, "load_after": load_average()}


def set_switches(threads: int, fp32_matmul: str) -> None:
    """What holds for the whole process, and so for all configurations alike."""
    torch.set_num_threads(threads)
    if fp32_matmul == "onednn":
        # Rounds to bf16 only where the CPU has AMX.
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    elif fp32_matmul == "tf32":
        torch.set_float32_matmul_precision("high")
    # Rows share the code of their blocks: torch.compile must not give up on one because it has compiled many.
    torch._dynamo.config.recompile_limit = 64


def is_crowded(parameters: int, rows: int, device: torch.device) -> bool:
    """Whether so many configurations, of at least 18 bytes per parameter, may not fit the GPU side by side."""
    if device.type != "cuda":
        return False
    return 18 * parameters * rows > 0.5 * torch.cuda.get_device_properties(device).total_memory
