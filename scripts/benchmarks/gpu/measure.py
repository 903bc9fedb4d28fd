"""Timing of single GPU operations, and the two ceilings of a device: a large copy and a large matrix product.

Each call is timed by a pair of CUDA events. Before each call a buffer larger than the L2 cache is written, so that the
call finds no more in the cache than it would in a training step, and the device sleeps for a moment, so that the host
has queued the whole call before it starts. Inputs are random, because zeros compute faster than training data.
"""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable
from typing import Any

import torch

from scripts.benchmarks.processor import cores
from scripts.benchmarks.results import Spread, environment, spread_of

COPY_BYTES = 4 * 2**30  # read; as many are written
GEMM_SIZE = 8192
FLUSH_BYTES = 256 * 2**20  # several times the L2 cache
SLEEP_CYCLES = 1_000_000  # about half a millisecond
WARM_UP_CALLS = 3
MIN_CALLS, MAX_CALLS = 5, 100


class Clock:
    """A timer of calls on the current CUDA device."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._copies: dict[int, float] = {}

    def ms(self, call: Callable[[], Any], for_ms: float = 60.0) -> Spread:
        """Return median and quartiles of the milliseconds of a call, repeated for about `for_ms`."""
        for _ in range(WARM_UP_CALLS):
            call()
        first = self._events(call, 3)
        calls = min(max(int(for_ms / max(statistics.median(first), 1e-3)), MIN_CALLS), MAX_CALLS)
        times = self._events(call, calls)
        return spread_of(times)

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
        """Return the milliseconds of a copy that moves `bytes_`, reads and writes together.

        Small copies are slower per byte, and an operation of this size cannot be faster.
        """
        half = max(bytes_ // 2 // 2**20, 1) * 2**20
        if half not in self._copies:
            self._copies[half] = copy_spread(self, half)["median"]
        return self._copies[half] * bytes_ / (2 * half)


def copy_spread(clock: Clock, count: int, for_ms: float = 60.0) -> Spread:
    """Time a copy of `count` random bytes."""
    source = torch.randint(-128, 128, (count,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    return clock.ms(lambda: target.copy_(source), for_ms)


def ceilings(clock: Clock) -> dict[str, Any]:
    """Return the bytes per second of a large copy and the FLOP/s of a large matrix product."""
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
    """Return the device and the versions of everything that computes on it."""
    device = torch.cuda.get_device_properties(0)
    smi = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        lines = subprocess.run(smi, capture_output=True, text=True, timeout=10).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        lines = []
    described = environment("bash scripts/gpu_report.sh", ())
    described["machine"] = {
        "device": device.name,
        "capability": f"{device.major}.{device.minor}",
        "memory_bytes": device.total_memory,
        "multiprocessors": device.multi_processor_count,
        "l2_bytes": getattr(device, "L2_cache_size", None),
        "driver": lines[0] if lines else None,
        "cores": len(cores()),
    }
    described["versions"] |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return described
