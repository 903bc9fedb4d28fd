"""Time the operations of megatron_lite/kernels on a GPU and compare them with the ceilings of the device.

    python -m scripts.benchmarks.gpu.ops --output=FILE               all operations; --only=rms_norm,adamw: some
    python -m scripts.benchmarks.gpu.ops --ceilings --output=FILE    copy bandwidth and matrix product only
    python -m scripts.benchmarks.gpu.ops --describe                  the device, as one line of JSON

Times each variant of an operation (Triton, the torch reference, the compiled reference). The bytes that it must read
and write, each counted once, over its time are compared with a large copy and with a copy of equal size; its FLOPs with
a large matrix product. The file is written before and after every operation. Operations already in the file are
skipped, so a restart after a crash continues with the next one.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from scripts.benchmarks.gpu.measure import Clock, ceilings, describe
from scripts.benchmarks.gpu.ops_table import OPS, Op, Shape
from scripts.benchmarks.results import Result, argument_parser, names_in, read_json, reason_of, write_json

# After one of these errors the process can no longer use the device.
FATAL = ("CUDA error", "device-side assert", "illegal memory access", "misaligned address", "launch failure")
RESTART = 3  # the exit code that asks for a new process


def measure_op(op: Op, shape: Shape, clock: Clock, copy_bytes_per_s: float) -> dict[str, Any]:
    """Measure all variants of an operation; a variant that fails records its error."""
    variants: dict[str, Any] = {}
    calls = op.make(shape)
    for name in list(calls):
        # `pop` frees the tensors of each call right after it was measured.
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
    """Measure time, rates and peak memory of one variant."""
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
    """Measure the operations that are not in the file yet; return the exit code."""
    result: Result = read_json(output) or {"ops": {}}
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
        write_json(output, result)
        try:
            entry = measure_op(op, Shape(), clock, result["ceilings"]["copy_bytes_per_s"])
        except Exception as error:
            entry = {"status": "failed", "variants": {"": {"failed": reason_of(error)}}}
        result["ops"][op.name] = entry
        write_json(output, result)
        print(json.dumps({op.name: entry}), flush=True)
        if any(word in str(entry["variants"].get("", "")) for word in FATAL):
            return RESTART
        gc.collect()
        torch.cuda.empty_cache()
    return int(any(entry["status"] != "ok" for entry in result["ops"].values()))


def main(argv: Sequence[str]) -> int:
    """Measure and write, or describe the device; return the exit code."""
    parser = argument_parser(__doc__)
    parser.add_argument("--describe", action="store_true", help="print the device and versions, and exit")
    parser.add_argument("--ceilings", action="store_true", help="measure only the ceilings of the device")
    parser.add_argument("--only", default="", help="comma-separated operations")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args(argv)
    wanted, known = names_in(options.only), [op.name for op in OPS]
    unknown = sorted(set(wanted) - set(known))
    if unknown:
        parser.error(f"--only: no operation is called {unknown}; choose from {known}")
    if not torch.cuda.is_available():
        print("ops: no CUDA device found", file=sys.stderr)
        return 1
    if options.describe:
        print(json.dumps(describe()))
        return 0
    if options.output is None:
        parser.error("--output is missing")
    torch.manual_seed(0)
    if options.ceilings:
        write_json(options.output, ceilings(Clock()))
        return 0
    return run([op for op in OPS if not wanted or op.name in wanted], options.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
