"""Time the operations of megatron_lite/kernels on a GPU and compare them with the ceilings of the
device.

    python -m scripts.benchmarks.gpu.ops --output=FILE               all operations; --only=rms_norm,adamw: some
    python -m scripts.benchmarks.gpu.ops --ceilings --output=FILE    copy bandwidth and matrix product only
    python -m scripts.benchmarks.gpu.ops --describe                  the device, as one line of JSON

Times each variant of an operation (Triton, the torch reference, the compiled reference). Its
bandwidth, with each input and output byte counted once, is compared with a large copy and a copy of
equal size; its FLOP/s with a large matrix product. Each call is timed by a pair of CUDA events.
Before each call a buffer larger than the L2 cache is written, so that the cache is as cold as in a
training step, and the device sleeps briefly, so that the host has queued the whole call before it
starts. The file is written after every operation.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.commands import matching, measuring_parser
from scripts.benchmarks.gpu.operation import Op, Shape
from scripts.benchmarks.gpu.ops_table import OPS
from scripts.benchmarks.pipeline import Result, Spread, reason_of, spread_of, write_json
from scripts.benchmarks.pipeline import describe as describe_run

COPY_BYTES = 4 * 2**30  # bytes read; as many are written
GEMM_SIZE = 8192
FLUSH_BYTES = 256 * 2**20  # several times the L2 cache
SLEEP_CYCLES = 1_000_000  # about half a millisecond
WARM_UP_CALLS = 3
MIN_CALLS, MAX_CALLS = 5, 100


class Clock:
    """Times calls on the current CUDA device."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._copies: dict[int, float] = {}

    def ms(self, call: Callable[[], Any], for_ms: float = 60.0) -> Spread:
        """Return median and quartiles of a call's time in ms, repeated for about `for_ms`."""
        for _ in range(WARM_UP_CALLS):
            call()
        first = self._events(call, 3)
        calls = min(max(int(for_ms / max(statistics.median(first), 1e-3)), MIN_CALLS), MAX_CALLS)
        measured = spread_of(self._events(call, calls))
        assert measured is not None
        return measured

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
        """Return the time in ms of a copy that moves `bytes_`, reads and writes together.

        Small copies are slower per byte, and they bound an operation of this size.
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
    """Return the device, and the driver and library versions; without a device only why it is
    `missing`."""
    if not torch.cuda.is_available():
        return {"missing": f"torch {torch.__version__} finds no CUDA device"}
    device = torch.cuda.get_device_properties(0)
    smi = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        lines = subprocess.run(smi, capture_output=True, text=True, timeout=10).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        lines = []
    described = describe_run("bash scripts/gpu_report.sh", (), {})["environment"]
    described["machine"] = {
        "device": device.name,
        "capability": f"{device.major}.{device.minor}",
        "memory_bytes": device.total_memory,
        "multiprocessors": device.multi_processor_count,
        "l2_bytes": getattr(device, "L2_cache_size", None),
        "driver": lines[0] if lines else None,
        "cores": described["machine"]["cores"],
    }
    described["versions"] |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return described


def measure_op(op: Op, shape: Shape, clock: Clock, copy_bytes_per_s: float) -> dict[str, Any]:
    """Measure all variants of an operation; a variant that fails records its error."""
    variants: dict[str, Any] = {}
    calls = op.make(shape)
    for name in list(calls):
        # `pop` frees the tensors of each call right after its measurement.
        variants[name] = measure_variant(calls.pop(name), op, shape, clock, copy_bytes_per_s)
    return {
        "status": "ok"
        if all("failed" not in variant for variant in variants.values())
        else "failed",
        "shape": op.describe(shape),
        "memory_bound": op.memory_bound,
        "bytes": op.bytes(shape),
        "flops": op.flops(shape),
        "variants": variants,
    }


def measure_variant(
    call: Callable[[], Any], op: Op, shape: Shape, clock: Clock, copy_bytes_per_s: float
) -> dict[str, Any]:
    """Measure the time, rates and peak memory of one variant."""
    try:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        # of up to 100 calls
        ms = {name: value for name, value in clock.ms(call).items() if name != "values"}
    except Exception as error:
        return {"failed": reason_of(error)}
    found: dict[str, Any] = {"ms": ms, "peak_bytes": peak}
    seconds, bytes_ = ms["median"] / 1e3, op.bytes(shape)
    if bytes_:
        found["bytes_per_s"] = bytes_ / seconds
        found["fraction_of_copy"] = bytes_ / seconds / copy_bytes_per_s
        found["fraction_of_equal_copy"] = clock.copy_ms(bytes_) / ms["median"]
    if op.flops(shape):
        found["flop_per_s"] = op.flops(shape) / seconds
    return found


def run(ops: Sequence[Op], output: Path) -> int:
    """Measure operations; return the exit code."""
    clock = Clock()
    result: Result = {"ops": {}, "ceilings": ceilings(clock)}
    for op in ops:
        try:
            entry = measure_op(op, Shape(), clock, result["ceilings"]["copy_bytes_per_s"])
        except Exception as error:
            entry = {"status": "failed", "variants": {"": {"failed": reason_of(error)}}}
        result["ops"][op.name] = entry
        write_json(output, result)
        gc.collect()
        torch.cuda.empty_cache()
    return int(any(entry["status"] != "ok" for entry in result["ops"].values()))


def main(argv: Sequence[str]) -> int:
    """Measure and write, or describe the device; return the exit code."""
    parser = measuring_parser(__doc__)
    parser.add_argument(
        "--describe", action="store_true", help="print the device and versions, and exit"
    )
    parser.add_argument(
        "--ceilings", action="store_true", help="measure only the ceilings of the device"
    )
    choices = partial(matching, [op.name for op in OPS], "operation")
    parser.add_argument(
        "--only", type=choices, default="", help="comma-separated operations; * and ? are wildcards"
    )
    options = parser.parse_args(argv)
    if options.describe:
        print(json.dumps(describe()))
        return 0
    if not torch.cuda.is_available():
        print("ops: no CUDA device found", file=sys.stderr)
        return 1
    if options.output is None:
        parser.error("--output is missing")
    torch.manual_seed(0)
    if options.ceilings:
        write_json(options.output, ceilings(Clock()))
        return 0
    return run([op for op in OPS if not options.only or op.name in options.only], options.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
