"""Compile every Triton kernel for a GPU on a machine that has none; a program of its own, run by test_compilation.py.

    python tests/kernels/compile_kernels.py [--dtype=bfloat16] [--only=names]

The operations are called with meta tensors, which have shapes and no memory, and Triton is told that its device is
an H100 or H200 and that it should compile, not launch. So each kernel is compiled with the types, block sizes and
specialisations that it will have there, down to machine code. Prints one JSON line per kernel.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
import triton  # noqa: E402
from gpu_ops_table import OPS, Shape  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

import megatron_lite.kernels  # noqa: E402


class Hopper:
    """In place of the driver of a device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def is_kernel(member: Any) -> bool:
    return isinstance(member, JITFunction)


def all_kernels() -> dict[str, JITFunction]:
    """Name -> kernel or part of one, of all modules of megatron_lite/kernels."""
    found = {}
    for module in pkgutil.iter_modules(megatron_lite.kernels.__path__):
        members = vars(importlib.import_module(f"megatron_lite.kernels.{module.name}")).values()
        found |= {f"{member.__module__}.{member.__name__}": member for member in members if is_kernel(member)}
    return found


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, bytes of stack (spilled registers) and so on, as the disassembler that comes with Triton has them."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    return {name.lower(): int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}


class Recorder:
    """Compiles what is launched."""

    def __init__(self) -> None:
        self.launched: dict[str, dict[str, Any]] = {}
        self._run = JITFunction.run

    def __call__(self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        """In place of `JITFunction.run`."""
        compiled = self._run(kernel, *args, grid=grid, warmup=True, **options)
        name = f"{kernel.__module__}.{kernel.__name__}"
        key = f"{name}:{compiled.hash}"
        if key not in self.launched:
            self.launched[key] = {
                "kernel": name, "warps": compiled.metadata.num_warps, "shared_bytes": compiled.metadata.shared,
                **resources(compiled.asm["cubin"]),
            }  # fmt: skip
        return compiled


def called_by(names: set[str], kernels: dict[str, JITFunction]) -> Iterator[str]:
    """These kernels and the parts that they call, which are compiled into them."""
    for name in names:
        yield name
        source = kernels[name].src
        parts = {other for other in kernels if other != name and re.search(rf"\b{other.split('.')[-1]}\(", source)}
        yield from called_by(parts, kernels)


def main() -> int:
    """Compile, print, and fail if a kernel is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    driver.set_active(Hopper())
    recorder = Recorder()
    JITFunction.run = lambda kernel, *args, **more: recorder(kernel, *args, **more)
    shape = Shape(dtype=getattr(torch, options.dtype), device="meta")
    failures = {}
    for op in OPS:
        if options.only and op.name not in options.only.split(","):
            continue
        try:
            call = op.make(shape).get("triton")
            if call is not None:
                call()
        except Exception as error:
            failures[op.name] = f"{type(error).__name__}: {error}"
    kernels = all_kernels()
    compiled = set(called_by({entry["kernel"] for entry in recorder.launched.values()}, kernels))
    for entry in recorder.launched.values():
        print(json.dumps(entry))
    print(json.dumps({"failures": failures, "never launched": sorted(set(kernels) - compiled)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
