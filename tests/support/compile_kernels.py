"""Compile every Triton kernel for a GPU on a machine without one; test_compilation.py runs this
program.

    python tests/support/compile_kernels.py [--arch=90] [--dtype=bfloat16] [--all]

The program calls the operations with meta tensors, which have shapes but no memory, and makes
Triton compile instead of launching: for an H100 or H200 (--arch=90), a B200 (--arch=100) or another
GPU. Every kernel is compiled to machine code with the types, block sizes and specializations that
it has on that GPU, at the shapes of scripts/benchmarks/gpu/ops_table.py and, with --all, at odd
shapes. Prints one JSON line per kernel.
"""

import argparse
import importlib
import itertools
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

import megatron_lite.kernels  # noqa: E402
from megatron_lite.kernels import adamw as optimizer  # noqa: E402
from megatron_lite.kernels import weight_shard  # noqa: E402
from megatron_lite.kernels.adamw import adamw_moments, adamw_weights  # noqa: E402
from megatron_lite.kernels.cross_entropy import Sums, sweep  # noqa: E402
from megatron_lite.kernels.eight_bit import LARGEST, round_values  # noqa: E402
from megatron_lite.kernels.embedding import embedding  # noqa: E402
from megatron_lite.kernels.gradient_norm import squared_norms  # noqa: E402
from megatron_lite.kernels.heads import HeadKind, split_heads  # noqa: E402
from megatron_lite.kernels.mlp import FUNCTIONS, activate, activate_backward  # noqa: E402
from megatron_lite.kernels.normalization import Kind, Weights, add_norm  # noqa: E402
from megatron_lite.kernels.rotary import angle_table, wavelengths  # noqa: E402
from scripts.benchmarks.gpu.operation import Op, Shape, backward  # noqa: E402
from scripts.benchmarks.gpu.ops_table import OPS  # noqa: E402


class Device:
    """Stands in for the driver of a GPU. arch: 90 is compute capability 9.0."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def name_of(kernel: JITFunction) -> str:
    return f"{kernel.__module__}.{kernel.__name__}"


def all_kernels() -> dict[str, JITFunction]:
    """Return all kernels and parts of kernels in megatron_lite/kernels by name."""
    found = {}
    for module in pkgutil.iter_modules(megatron_lite.kernels.__path__):
        members = vars(importlib.import_module(f"megatron_lite.kernels.{module.name}")).values()
        found |= {name_of(member): member for member in members if isinstance(member, JITFunction)}
    return found


def resources(cubin: bytes) -> dict[str, int]:
    """Return registers, bytes of stack (spilled registers) and so on from the disassembler that
    comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True
        ).stdout
    return {
        name.lower(): int(value)
        for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)
    }


class Recorder:
    """Compiles kernels instead of launching them, and records their resources."""

    def __init__(self) -> None:
        self.launched: dict[str, dict[str, Any]] = {}
        self.common = True  # the sizes are those of the table of operations
        self._run = JITFunction.run

    def __call__(
        self, kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any
    ) -> Any:
        """Stand in for `JITFunction.run`."""
        compiled = self._run(
            kernel, *args, grid=grid, warmup=True, enable_fp_fusion=True, **options
        )  # as `jit` launches
        if compiled.hash not in self.launched:
            self.launched[compiled.hash] = {
                "kernel": name_of(kernel),
                "shapes": [
                    list(tensor.shape) for tensor in args if isinstance(tensor, torch.Tensor)
                ],
                "common": self.common,
                "warps": compiled.metadata.num_warps,
                "shared_bytes": compiled.metadata.shared,
                **resources(compiled.asm["cubin"]),
            }
        return compiled


def with_parts(kernel: JITFunction) -> Iterator[str]:
    """Yield the names of a kernel and of the parts that it calls, which are compiled into it."""
    yield name_of(kernel)
    for name in kernel.fn.__code__.co_names:
        part = kernel.fn.__globals__.get(name)
        if isinstance(part, JITFunction):
            yield from with_parts(part)


def run_triton(op: Op, shape: Shape) -> None:
    """Call the Triton variant of an operation if it has one."""
    call = op.make(shape).get("triton")
    if call is not None:
        call()


def updates(shape: Shape, rows: int, split: bool, nesterov: bool, passes: int) -> None:
    """Run AdamW on a shard of `rows` parameters, in one pass or two."""
    numel = rows * optimizer.ALIGNMENT * 20
    values = [shape.random(numel, dtype=torch.float32) for _ in range(3)]
    rounded, gradient = shape.random(numel, dtype=torch.bfloat16), shape.random(numel)
    remainder = torch.empty(numel, dtype=torch.int16, device=shape.device)
    weights = weight_shard.WeightShard(*((None, rounded, remainder) if split else (values[0],)))
    shard = optimizer.Shard(weights, gradient, *values[1:])
    borders = range(0, numel, numel // rows)
    ranges = optimizer.Ranges(
        [optimizer.Range(start, start + numel // rows, 1.0, 1.0) for start in borders],
        values[0].device,
    )
    one = torch.ones((), device=shape.device)
    step = optimizer.StepNumbers(1e-4, 0.1, one, one, one)
    control = optimizer.Control(step, optimizer.Hyperparameters(0.9, 0.95, 1e-8, nesterov))
    if passes == 1:
        optimizer.adamw(shard, ranges, control, triton=True)
    else:
        adamw_moments(shard, ranges, control, triton=True)
        adamw_weights(shard, ranges, torch.ones(rows, device=shape.device), control, triton=True)


def capped_loss(shape: Shape) -> None:
    """Compute the loss over a large vocabulary with a soft cap on the logits."""
    labels = torch.zeros(4, dtype=torch.int64, device=shape.device)
    sums, scale = Sums.empty(4, labels.device), torch.ones((), device=shape.device)
    sweep(shape.random(4, 128256), labels, sums, scale, 1e-4, soft_cap=30.0, triton=True)


def rounded(shape: Shape, rows: int, columns: int, every: bool) -> None:
    """Round a factor and its transpose to formats of 8 bits, with a scale per row and with one:
    every one or some."""
    values = shape.random(rows, columns)
    for number, dtype in enumerate(LARGEST):
        for transposed, is_whole in itertools.product((False, True), repeat=2):
            if every or (transposed, is_whole) == (number % 2 == 1, number < 2):
                factor = values.t() if transposed else values
                scale = shape.random(1 if is_whole else len(factor), 1, dtype=torch.float32)
                round_values(factor, scale, dtype, triton=True)


def others(shape: Shape) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield what the table of operations omits: all activations, biases, odd sizes, sizes of one,
    very wide rows."""
    for name in FUNCTIONS:
        for gated in (False, True):
            before, grad = shape.random(5, 246 if gated else 123), shape.random(5, 123)
            yield f"{name} {gated}", partial(activate, before, name, gated, triton=True)
            yield (
                f"{name} {gated} backward",
                partial(activate_backward, grad, before, name, gated, True, triton=True),
            )
    clamped = ("quick_gelu", True)
    before, grad = shape.random(5, 246), shape.random(5, 123)
    yield "limit", partial(activate, before, *clamped, triton=True, limit=7.0)
    yield (
        "limit backward",
        partial(activate_backward, grad, before, *clamped, True, triton=True, limit=7.0),
    )
    for rows, width in ((1, 1), (5, 123), (7, 16384), (3, 32768)):
        x = shape.input(rows, width)
        weight = shape.parameter(width)
        bias = shape.parameter(width)
        grads = (shape.random(rows, width), shape.random(rows, width))
        for what, chosen in (("rms", None), ("layer", bias)):
            kind = Kind(1e-5, centered=chosen is not None)
            sum_and_norm = add_norm(x, shape.random(rows, width), weight, chosen, kind, triton=True)
            yield f"{what} norm {width}", backward(sum_and_norm, (x,), grads)
            wide = shape.random(rows, width, dtype=torch.float32).requires_grad_()
            sum_and_norm = add_norm(wide, x, None, None, kind, triton=True, dtype=shape.dtype)
            yield (
                f"{what} norm of a wide sum {width}",
                backward(sum_and_norm, (wide, x), (grads[0].float(), grads[1])),
            )
    for columns, start, accumulate, scaled in (
        (1, 0, True, True),
        (50257, 0, True, True),
        (300, 0, True, False),
        (300, 300, True, False),
        (300, 300, False, True),
    ):
        labels = torch.zeros(4, dtype=torch.int64, device=shape.device)
        sums = Sums.empty(4, labels.device)
        scale = torch.ones((), device=shape.device) if scaled else None
        inputs = (shape.random(4, columns), labels, sums, scale, 1e-4)
        options = dict(start=start, accumulate=accumulate)
        yield f"cross-entropy {columns} {start}", partial(sweep, *inputs, **options, triton=True)
    for vocab, width in ((1, 1), (50, 123)):
        rows = shape.parameter(vocab, width)
        tokens = torch.zeros(1, 5, dtype=torch.int64, device=shape.device)
        yield f"embedding {vocab}", embedding(rows, tokens, triton=True).sum().backward
    for length, heads, channels, turned in (
        (1, 1, 2, 2),
        (5, 3, 6, 6),
        (9, 4, 80, 80),
        (5, 3, 7, 4),
        (9, 4, 80, 32),
    ):
        projection = shape.input(1, length, 3 * heads * channels)
        table = angle_table(1.0 / wavelengths(turned, 1e4, projection.device), length)
        parts = split_heads(projection * 1, heads, heads, table, triton=True)
        grads = tuple(shape.random(*part.shape) for part in parts)
        yield f"rotary {length} {channels} {turned}", backward(parts, (projection,), grads)
        for zero_centered in (False, True):
            norms = (
                Weights(
                    shape.parameter(channels), shape.parameter(channels) if zero_centered else None
                ),
            ) * 2
            kind = HeadKind(1e-5, zero_centered, zero_centered)
            parts = split_heads(projection * 1, heads, heads, table, True, norms, kind)
            yield (
                f"norms of heads {channels} {turned} {zero_centered}",
                backward(parts, (projection,), grads),
            )
    for rows, split, nesterov, passes in itertools.product(
        (1, 9, 300), (False, True), (False, True), (1, 2)
    ):
        if rows < 300 or passes == 2:
            yield (
                f"adamw {rows} {split} {nesterov} {passes}",
                partial(updates, shape, rows, split, nesterov, passes),
            )
    yield "8 bits", partial(rounded, shape, 5, 123, True)
    for numel in (1, 1000):
        some = [shape.random(numel, dtype=torch.float32), shape.random(numel)]
        yield f"squared norm {numel}", partial(squared_norms, [some], some[0].device, triton=True)


def attempt(calls: Iterable[tuple[str, Callable[[], Any]]], failures: dict[str, str]) -> None:
    """Make the calls and record the ones that fail."""
    for name, call in calls:
        try:
            call()
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"


def main() -> int:
    """Compile everything and print one line per kernel, then failures and kernels that nothing
    launched."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", type=int, default=90)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    driver.set_active(Device(options.arch))
    recorder = Recorder()
    for kernel in all_kernels().values():
        del type(kernel).__getitem__  # which launches nothing on the meta device
    JITFunction.run = lambda kernel, *args, **more: recorder(kernel, *args, **more)
    shape = Shape(dtype=getattr(torch, options.dtype), device="meta")
    calls: dict[str, Callable[[], Any]] = {op.name: partial(run_triton, op, shape) for op in OPS}
    for split, nesterov in ((False, False), (True, True)):
        calls[f"clipped updates, {split}, {nesterov}"] = partial(
            updates, shape, 12, split, nesterov, 2
        )
    calls["8 bits"] = partial(rounded, shape, 8192, 4096, options.all)
    calls["soft-capped cross-entropy"] = partial(capped_loss, shape)
    failures: dict[str, str] = {}
    attempt(calls.items(), failures)
    if options.all:
        recorder.common = False
        attempt(others(shape), failures)
    kernels = all_kernels()
    launched = {entry["kernel"] for entry in recorder.launched.values()}
    compiled = {part for name in launched for part in with_parts(kernels[name])}
    for entry in recorder.launched.values():
        print(json.dumps(entry))
    print(json.dumps({"failures": failures, "never launched": sorted(set(kernels) - compiled)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
