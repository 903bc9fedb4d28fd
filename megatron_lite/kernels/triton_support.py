"""Triton, where it is installed: kernels run on a GPU, or, for tests, on a CPU under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # not made for every platform: the torch references do without
    triton = tl = None


class _Absent:
    """In place of a kernel where Triton is not installed."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = function.__name__

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError(f"kernel {self._name} needs Triton, which is not installed")


def jit(function: Callable[..., Any]) -> Any:
    """`triton.jit`."""
    return _Absent(function) if triton is None else triton.jit(function)


def is_interpreted() -> bool:
    """Whether kernels run under Triton's interpreter, on CPU tensors and slowly."""
    return triton is not None and bool(triton.knobs.runtime.interpret)


def runs_on(device: torch.device) -> bool:
    """Whether Triton kernels take tensors of this device here."""
    return triton is not None and (device.type == "cuda" or is_interpreted())


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is not below n."""
    return 1 << max(n - 1, 0).bit_length()
