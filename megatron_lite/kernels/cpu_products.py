"""Which library computes fp32 matrix products on a CPU.

PyTorch sends them to its BLAS (MKL). oneDNN is faster where MKL does not use the processor's widest instructions: 5 to
20 percent on AMD Zen 4, more on Zen 5. PyTorch has one switch that sends plain products, additions to what is there and
transposed operands included, through oneDNN: `torch.backends.mkldnn.matmul.fp32_precision = "bf16"`. It permits oneDNN
to round the factors to bf16; without the matrix units (AMX) that would profit, it computes in fp32 throughout, and only
the order of the sums differs. Whether that holds is found out by a product whose exact value is known.

The switch belongs to the process, so it is set around single products and set back: attention's small blocks, for one,
take half as long again with it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Multiplications from which the library's own call is worth its overhead of some 15 microseconds.
SMALLEST = 2**24


@contextlib.contextmanager
def through_onednn(factor: Tensor, columns: int) -> Iterator[None]:
    """A large fp32 product on CPU inside goes through oneDNN, where that is exact.

    Args:
        factor: one of its operands.
        columns: the dimension of the product that this operand does not have.
    """
    if factor.numel() * columns < SMALLEST or not goes_through_onednn(factor.device, factor.dtype):
        yield
        return
    switch = _switch()
    before, switch.fp32_precision = switch.fp32_precision, "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before


def goes_through_onednn(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether large products of such tensors do."""
    return device.type == "cpu" and dtype == torch.float32 and onednn_is_exact()


@functools.cache
def onednn_is_exact() -> bool:
    """Whether the switch exists and leaves products in fp32 on this processor; asked once."""
    switch = _switch()
    if switch is None or not torch.backends.mkldnn.is_available():
        return False
    fine = 1 + 2.0**-23  # bf16 has no such number
    before, switch.fp32_precision = switch.fp32_precision, "bf16"
    try:
        result = torch.full((64, 64), fine) @ torch.eye(64)
    finally:
        switch.fp32_precision = before
    return bool((result == fine).all())


def _switch() -> Any:
    """The object whose `fp32_precision` is the switch; None in a PyTorch without it."""
    return getattr(torch.backends.mkldnn, "matmul", None)
