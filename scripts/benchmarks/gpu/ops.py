"""The operations of megatron_lite/kernels on a GPU, against what the device can do at best.

    python -m scripts.benchmarks.gpu.ops --output=FILE               all operations; --only=rms_norm,adamw: some
    python -m scripts.benchmarks.gpu.ops --ceilings --output=FILE    copy bandwidth and matrix products alone
    python -m scripts.benchmarks.gpu.ops --describe                  the device, as one line of JSON

Each variant of an operation (Triton, the torch reference, the reference compiled) is timed; its bytes, each counted
once where it has to be read and once where it has to be written, over the time, are held against the bandwidth of a
large copy and of a copy of as many bytes, its arithmetic against a large matrix product. The file is written before and
after every operation, and operations that are in it are left out: started again after a crash, the program goes on
behind it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.gpu.measure import Clock, ceilings, describe
from scripts.benchmarks.gpu.ops_table import OPS, Op, Shape

# After one of these nothing that this process does on the device succeeds any more.
FATAL = ("CUDA error", "device-side assert", "illegal memory access", "misaligned address", "launch failure")
RESTART = 3  # the exit code that asks for a new process


def measure_op(op: Op, shape: Shape, clock: Clock, copy_bytes_per_s: float) -> dict[str, Any]:
    """All variants of an operation; a variant that fails says why."""
    variants: dict[str, Any] = {}
    calls = op.make(shape)
    for name in list(calls):
        # What a call returns is dropped at once; what it closes over goes with it.
        variants[name] = measure_variant(calls.pop(name), op, shape, clock, copy_bytes_per_s)
    return {
        "status": "ok" if all("failed" not in variant for variant in variants.values()) else "failed",
        "shape": op.describe(shape),
        "memory_bound": op.memory_bound,
        "bytes": op.bytes(shape),
        "flops": op.flops(shape),
        "variants": variants,
    }


def measure_variant(
    call: Callable[[], Any], op: Op, shape: Shape, clock: Clock, copy_bytes_per_s: float
) -> dict[str, Any]:
    """Time, rates and memory of one variant."""
    try:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        ms = clock.ms(call)
    except Exception as error:
        if any(word in str(error) for word in FATAL):
            raise
        return {"failed": f"{type(error).__name__}: {error}"[:500]}
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
    """Measure what is not in the file yet; returns the exit code."""
    result: dict[str, Any] = json.loads(output.read_text("utf-8")) if output.exists() else {"ops": {}}
    for entry in result["ops"].values():
        if entry["status"] == "started":
            entry.update(status="failed", variants={"": {"failed": "the process ended during this operation"}})
    clock = Clock()
    if "ceilings" not in result:
        result["ceilings"] = ceilings(clock)
    for op in ops:
        if op.name in result["ops"]:
            continue
        result["ops"][op.name] = {"status": "started"}
        write(output, result)
        try:
            entry = measure_op(op, Shape(), clock, result["ceilings"]["copy_bytes_per_s"])
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            entry = {"status": "failed", "variants": {"": {"failed": reason[:500]}}}
        result["ops"][op.name] = entry
        write(output, result)
        print(json.dumps({op.name: entry}), flush=True)
        if any(word in str(entry["variants"].get("", "")) for word in FATAL):
            return RESTART
        gc.collect()
        torch.cuda.empty_cache()
    return int(any(entry["status"] != "ok" for entry in result["ops"].values()))


def write(output: Path, result: dict[str, Any]) -> None:
    """Aside, then renamed: the file is whole if this process is stopped."""
    aside = output.with_name(output.name + ".part")
    aside.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    aside.replace(output)


def main(argv: Sequence[str]) -> int:
    """Measure and write, or describe the device."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--describe", action="store_true")
    parser.add_argument("--ceilings", action="store_true")
    parser.add_argument("--only", default="", help="comma-separated operations")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    wanted = [name.strip() for name in options.only.split(",") if name.strip()]
    unknown = set(wanted) - {op.name for op in OPS}
    if unknown:
        parser.error(f"--only: no operation is called {sorted(unknown)}; there are {[op.name for op in OPS]}")
    if not torch.cuda.is_available():
        print("gpu_ops: no CUDA device here", file=sys.stderr)
        return 1
    if options.describe:
        print(json.dumps(describe()))
        return 0
    if options.output is None:
        parser.error("--output is missing")
    torch.manual_seed(0)
    if options.ceilings:
        write(options.output, ceilings(Clock()))
        return 0
    return run([op for op in OPS if not wanted or op.name in wanted], options.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
