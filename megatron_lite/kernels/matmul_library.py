"""Choose the library for large fp32 products on a CPU: PyTorch's BLAS (MKL) or oneDNN.

oneDNN is faster where MKL does not use the processor's widest instructions: on AMD's Zen 4 MKL runs
its AVX2 kernels, and whole steps with oneDNN take 0.86 to 0.95 of the time; on Zen 5, less. On
Intel's Sapphire Rapids it is 1 to 4 percent slower with one thread and 7 to 10 percent with two;
with only AVX2 both are equal. `library_for` decides by these facts, never by a clock: the libraries
differ in the last bits, and a command must repeat its bits under any load. `use_library` applies
the choice.

Setting `torch.backends.mkldnn.matmul.fp32_precision` to "bf16" sends every plain product through
oneDNN, in-place additions and transposed operands included. The setting permits rounding the
factors to bf16, but without matrix units (AMX) oneDNN computes in fp32 throughout and only the
order of the sums differs; `onednn_is_exact` checks that with products whose exact values are known.
With `blas`, products of any size go through the BLAS. Those of experts: oneDNN compiles code for
each shape and keeps that of the last 1,024 shapes, half a MiB or more each, and each step brings
new numbers of rows; steps took 1.1 times the time, and memory grew by 900 MiB. Sums of adapters: to
add a product of rank 16 to 2,048 rows, oneDNN takes 1.5 to 1.9 times the time.

The setting belongs to the process and slows small products down (attention's blocks take 1.5 times
as long), so `in_its_library` sets it for one large product at a time and then restores it. With the BLAS, the setting
is "ieee" otherwise, which permits no rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_lite.errors import UsageError

# Number of multiplications above which oneDNN repays its call overhead of 15 microseconds.
SMALLEST_ONEDNN_PRODUCT = 2**24
CPU_INFO = Path("/proc/cpuinfo")


@functools.lru_cache(maxsize=4096)
def in_its_library(
    operation: Callable[..., Any], device: torch.device, dtype: torch.dtype, multiplications: int
) -> Callable[..., Any]:
    """Return the operation, bound to the chosen library if it computes a large fp32 product on a
    CPU.

    Cached and no context manager: right after a product, which evicts everything from the caches,
    each Python call costs several us.
    """
    if multiplications < SMALLEST_ONEDNN_PRODUCT or not goes_through_onednn(device, dtype):
        return operation
    return functools.partial(through_onednn, operation)


def through_onednn(operation: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    """Compute an fp32 product with oneDNN, even if it rounds the factors."""
    switch = _onednn_switch()
    before, switch.fp32_precision = switch.fp32_precision, "bf16"
    try:
        return operation(*operands, **options)
    finally:
        switch.fp32_precision = before


@functools.cache
def goes_through_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether large products in `dtype` on `device` go through oneDNN: if it is exact and
    not excluded.

    Cached because reading the setting takes as long as a small product.
    """
    is_possible = (
        device.type == "cpu"
        and dtype == torch.float32
        and _onednn_switch().fp32_precision != "ieee"
    )
    return is_possible and onednn_is_exact()


def use_library(name: str) -> None:
    """Choose this process's library for large fp32 products on a CPU: "blas", or "onednn" if that
    is exact."""
    _onednn_switch().fp32_precision = "ieee" if name == "blas" else "none"
    goes_through_onednn.cache_clear()
    in_its_library.cache_clear()


def library_for(wanted: str) -> str:
    """Return the library for --cpu_matmul; "auto" takes oneDNN where it is exact and faster, else
    the BLAS.

    Raises:
        UsageError: naming the flag, if oneDNN is wanted and would round the factors.
    """
    if wanted == "onednn" and not onednn_is_exact():
        raise UsageError(
            "--cpu_matmul=onednn: oneDNN rounds fp32 factors on this processor, or PyTorch lacks it; write blas, or "
            "leave the flag out"
        )
    if wanted != "auto":
        return wanted
    return "onednn" if _mkl_is_narrow() and onednn_is_exact() else "blas"


def _mkl_is_narrow() -> bool:
    """Return whether MKL takes its AVX2 kernels (on AMD) where oneDNN and PyTorch use AVX-512."""
    # from AVX-512 on
    has_avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512" and onednn_supports("bf16")
    if not has_avx512 or not torch.backends.mkl.is_available():
        return False
    try:
        with CPU_INFO.open(encoding="ascii", errors="replace") as file:
            return "AuthenticAMD" in file.read(200)
    except OSError:
        return False


def onednn_supports(name: str) -> bool:
    """Return whether PyTorch sends products in "bf16" or "fp16" to oneDNN on this processor; False
    without oneDNN."""
    supported = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return supported is not None and bool(supported())


@functools.cache
def onednn_is_exact() -> bool:
    """Return whether PyTorch has oneDNN, and its products stay in fp32 on this processor.

    oneDNN uses the matrix units for some shapes only: with AMX, factors of 64 to 192 rows and
    columns stay exact and larger ones (256) are rounded. So the products are as large as those that
    will go through oneDNN, and AMX alone rules it out.
    """
    if not torch.backends.mkldnn.is_available() or torch.cpu._is_amx_tile_supported():
        return False
    # not representable in bf16
    size = round(SMALLEST_ONEDNN_PRODUCT ** (1 / 3))
    fine = 1 + 2.0**-23
    factor, one = torch.full((size, size), fine), torch.eye(size)
    operands = (factor, one), (factor, one.t()), (factor.t(), one)
    return all(bool((through_onednn(torch.mm, *pair) == fine).all()) for pair in operands)


def _onednn_switch() -> Any:
    """Return the object with the `fp32_precision` setting."""
    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
