"""Triton, if it is installed and usable, and functions shared by kernels.

Kernels run on a GPU or, in tests, in Triton's interpreter. Elsewhere importing Triton would only
delay startup.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from megatron_lite.distributed.triton_mode import kernels_can_run

if kernels_can_run() or "triton" in sys.modules:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        # Triton does not exist for every platform; the torch references do not need it
        triton = tl = None
else:
    triton = tl = None


class _Absent:
    """Placeholder for a kernel where Triton is not installed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = function.__name__

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(f"kernel {self._name} needs Triton, which is not installed")


def jit(function: Callable[..., Any]) -> Any:
    """Apply `triton.jit`; without Triton, return an object that raises when launched.

    Both are no-ops for meta tensors, which have no memory.
    """
    kernel = _Absent(function) if triton is None else triton.jit(function)
    kind = type(kernel)

    def launcher(self: Any, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **options: Any) -> Any:
            # AdamW takes a shard's tensors as one argument
            given = args[0] if isinstance(args[0], tuple) else args[:1]
            is_meta = next(tensor.is_meta for tensor in given if tensor is not None)
            if is_meta:
                return tell(function.__name__, *args)
            # Explicit, because Triton 3.9 announces another default for 3.10, with other bits.
            return kind.__getitem__(self, grid)(*args, enable_fp_fusion=True, **options)

        return launch

    kernel.__class__ = type(kind.__name__, (kind,), {"__slots__": (), "__getitem__": launcher})
    return kernel


def tell(event: str, *args: Any) -> None:
    """Report to a torch mode (such as a plan's) an event that it cannot see: a kernel's launch (by
    name), "attention", or "repeat".

    After "repeat", x, more, fewer, everything that follows counts `more` / `fewer` times; loops may
    nest.
    """
    if has_torch_function(args):
        handle_torch_function(tell, args, event, *args)


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter: slowly, on CPU tensors."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def runs_on(device: torch.device) -> bool:
    """Return whether Triton kernels can run on this device's tensors."""
    return triton is not None and (device.type == "cuda" or is_interpreted())


def generator_for(x: Tensor) -> torch.Generator:
    """Return a random number generator for a tensor's device; for a plan's meta tensors, an unused
    CPU one."""
    return torch.Generator("cpu" if x.is_meta else x.device)


def turns(loop: range, x: Tensor) -> Iterator[int]:
    """Yield a loop's iterations; in a plan, only the first two and the last, which allocate the
    most.

    The plan counts the second for those that are skipped.
    """
    if len(loop) <= 3:
        yield from loop
        return
    yield loop[0]
    tell("repeat", x, len(loop) - 2, 1)
    yield loop[1]
    tell("repeat", x, 1, len(loop) - 2)
    yield loop[-1]


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 not below n."""
    return 1 << max(n - 1, 0).bit_length()


@jit
def tanh(x):
    """Compute tanh of fp32 values to a few units in the last place; Triton's interpreter has no
    tanh.

    |x| < 0.3: the Taylor series, because 1 - e loses digits there; else sign(x) (1 - e) / (1 + e),
    e = exp(-2 |x|). NaN stays NaN, infinities become 1 and -1.
    """
    square = x * x
    series = x + x * square * (
        -0.3333333333333333
        + square
        * (0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203))
    )
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.3, series, tl.where(x < 0.0, -far, far))


@jit
def narrow(values, dtype: tl.constexpr):
    """Convert fp32 values to another floating dtype, rounding to nearest even.

    bf16 is rounded bit by bit, because Triton's interpreter would truncate: tests match a GPU.
    """
    if dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        bits = tl.where(values == values, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return values.to(dtype)
