"""How the operations of ops.py are timed, and the two ceilings that they are held against.

Every call is timed by a pair of events. Before each, a buffer larger than the second-level cache is written, so that
nothing is found there that a training step would not find, and the device sleeps for a moment, so that the host has
queued the whole call by the time that it begins. Inputs are random: zeros compute faster than what training computes.
"""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import megatron_lite

COPY_BYTES = 4 * 2**30  # read; as many are written
GEMM_SIZE = 8192
FLUSH_BYTES = 256 * 2**20  # several times the second-level cache
SLEEP_CYCLES = 1_000_000  # about half a millisecond
WARM_UP_CALLS = 3
LEAST_CALLS, MOST_CALLS = 5, 100


class Clock:
    """Times calls on the current CUDA device."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._copies: dict[int, float] = {}

    def ms(self, call: Callable[[], Any], for_ms: float = 60.0) -> dict[str, Any]:
        """Median and quartiles of the milliseconds of a call, over as many calls as take about `for_ms`."""
        for _ in range(WARM_UP_CALLS):
            call()
        first = self._events(call, 3)
        calls = min(max(int(for_ms / max(statistics.median(first), 1e-3)), LEAST_CALLS), MOST_CALLS)
        times = sorted(self._events(call, calls))
        low, median, high = statistics.quantiles(times, n=4)
        return {"median": median, "quartiles": [low, high], "least": times[0], "calls": calls}

    def _events(self, call: Callable[[], Any], calls: int) -> list[float]:
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(calls)]
        for before, after in pairs:
            self._flush.zero_()
            torch.cuda._sleep(SLEEP_CYCLES)
            before.record()
            call()
            after.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairs]

    def copy_ms(self, bytes_: int) -> float:
        """Of a copy that moves `bytes_`, read and written together: an operation of this size cannot do better.

        Small ones are slower by the byte: the device has hardly begun when it is done.
        """
        half = max(bytes_ // 2 // 2**20, 1) * 2**20
        if half not in self._copies:
            self._copies[half] = copy_spread(self, half)["median"]
        return self._copies[half] * bytes_ / (2 * half)


def copy_spread(clock: Clock, count: int, for_ms: float = 60.0) -> dict[str, Any]:
    """The time of a copy of `count` random bytes."""
    source = torch.randint(-128, 128, (count,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return clock.ms(lambda: target.copy_(source), for_ms)


def ceilings(clock: Clock) -> dict[str, Any]:
    """What the device does at best: bytes per second of a large copy, operations per second of a large product."""
    copy = copy_spread(clock, COPY_BYTES, for_ms=100)
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, dtype=torch.bfloat16, device="cuda") for _ in "ab")
    gemm = clock.ms(lambda: a @ b, for_ms=200)
    return {
        "copy_ms": copy,
        "copy_bytes": 2 * COPY_BYTES,
        "copy_bytes_per_s": 2 * COPY_BYTES / copy["median"] * 1e3,
        "gemm_ms": gemm,
        "gemm_size": GEMM_SIZE,
        "gemm_flop_per_s": 2 * GEMM_SIZE**3 / gemm["median"] * 1e3,
    }


def describe() -> dict[str, Any]:
    """The device and the versions of all that computes on it."""
    device = torch.cuda.get_device_properties(0)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": _triton_version(),
        "megatron_lite": megatron_lite.__version__,
        "commit": _asked("git", "rev-parse", "HEAD"),
    }
    return {
        "machine": {
            "device": device.name,
            "capability": f"{device.major}.{device.minor}",
            "memory_bytes": device.total_memory,
            "multiprocessors": device.multi_processor_count,
            "l2_bytes": getattr(device, "L2_cache_size", None),
            "driver": _asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        },
        "versions": versions,
    }


def _triton_version() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def _asked(*command: str) -> str | None:
    """The first line that a program prints; None where there is no such program or it fails."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0] if done.returncode == 0 and lines else None
