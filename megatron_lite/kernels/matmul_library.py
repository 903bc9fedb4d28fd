"""The library for large fp32 products on a CPU: PyTorch's BLAS (MKL) or oneDNN.

oneDNN is faster where MKL does not use the processor's widest instructions: 5 to 20 percent on AMD Zen 4, more on
Zen 5. On Intel's Sapphire Rapids it is 1 to 4 percent slower with one thread and 7 to 10 percent with two; with only
AVX2 both are equal. `faster_library` times both; a run does so once and keeps the choice, which determines the
last bits. `use_library` applies it.

Setting `torch.backends.mkldnn.matmul.fp32_precision` to "bf16" sends every plain product through oneDNN, in-place
additions and transposed operands included. The setting permits rounding the factors to bf16, but without matrix units
(AMX) oneDNN computes in fp32 throughout and only the order of the sums differs; `onednn_is_exact` checks that with
products whose exact values are known. The setting belongs to the process and slows small products down (attention's
blocks take 1.5 times as long), so it is set for one large product at a time and then restored. If the BLAS was chosen,
it is "ieee" otherwise, which permits no rounding.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Iterator
from typing import Any

import torch

from megatron_lite.errors import UsageError

# Number of multiplications above which oneDNN repays its call overhead of 15 microseconds.
SMALLEST_ONEDNN_PRODUCT = 2**24
# The products that `faster_library` times: at most this many tokens and channels, alternating between the libraries.
# oneDNN is chosen only if it takes less than this share of the BLAS's time, so that noise does not decide.
PROBE_TOKENS, PROBE_CHANNELS, PROBE_ROUNDS, CLEARLY_FASTER = 256, 512, 6, 0.95


@contextlib.contextmanager
def through_onednn() -> Iterator[None]:
    """Send this process's fp32 products through oneDNN, even if it rounds the factors."""
    switch = _onednn_switch()
    before, switch.fp32_precision = switch.fp32_precision, "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before


def goes_through_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether large products in `dtype` on `device` go through oneDNN: if it is exact and was not excluded."""
    is_possible = device.type == "cpu" and dtype == torch.float32 and onednn_is_exact()
    return is_possible and _onednn_switch().fp32_precision != "ieee"


def use_library(name: str) -> None:
    """Choose this process's library for large fp32 products on a CPU: "blas", or "onednn" if that is exact."""
    _onednn_switch().fp32_precision = "ieee" if name == "blas" else "none"


def check_library(name: str) -> None:
    """Reject oneDNN if it would round the factors.

    Raises:
        UsageError: naming the flag.
    """
    if name == "onednn" and not onednn_is_exact():
        raise UsageError(
            "--cpu_matmul=onednn: oneDNN rounds fp32 factors on this processor, or PyTorch lacks it; write blas, or "
            "leave the flag out"
        )


def faster_library(tokens: int, inputs: int, outputs: int) -> tuple[str, str]:
    """Time the three products of a linear layer in both libraries, a few ms each; return the faster one and the reason.

    The input is (tokens, inputs), the weight (outputs, inputs).
    """
    if not onednn_is_exact():
        return "blas", "oneDNN rounds fp32 factors on this processor, or is absent"
    t, i, o = min(tokens, PROBE_TOKENS), min(inputs, PROBE_CHANNELS), min(outputs, PROBE_CHANNELS)
    x, weight, dy = torch.ones(t, i), torch.ones(o, i), torch.ones(t, o)
    y, dx, dweight = torch.empty(t, o), torch.empty(t, i), torch.empty(o, i)
    switch, fastest_s = _onednn_switch(), {"ieee": math.inf, "bf16": math.inf}
    before = switch.fp32_precision
    try:
        for _ in range(PROBE_ROUNDS):
            for setting in fastest_s:
                switch.fp32_precision, start_s = setting, time.perf_counter()
                torch.mm(x, weight.t(), out=y)
                torch.mm(dy, weight, out=dx)
                torch.mm(dy.t(), x, out=dweight)
                fastest_s[setting] = min(fastest_s[setting], time.perf_counter() - start_s)
    finally:
        switch.fp32_precision = before
    ratio = fastest_s["bf16"] / fastest_s["ieee"]
    return "onednn" if ratio < CLEARLY_FASTER else "blas", f"oneDNN takes {ratio:.2f} of the time of PyTorch's BLAS"


@functools.cache
def onednn_is_exact() -> bool:
    """Whether PyTorch has oneDNN, and its products stay in fp32 on this processor.

    oneDNN uses the matrix units for some shapes only: with AMX, factors of 64 x 64 stay exact and larger ones are
    rounded. So the products are as large as those that will go through oneDNN, and AMX alone rules oneDNN out.
    """
    if not torch.backends.mkldnn.is_available() or torch.cpu._is_amx_tile_supported():
        return False
    size, fine = round(SMALLEST_ONEDNN_PRODUCT ** (1 / 3)), 1 + 2.0**-23  # not representable in bf16
    factor, one = torch.full((size, size), fine), torch.eye(size)
    with through_onednn():
        return all(bool((product == fine).all()) for product in (factor @ one, factor @ one.t(), factor.t() @ one))


def _onednn_switch() -> Any:
    """Return the object with the `fp32_precision` setting."""
    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
