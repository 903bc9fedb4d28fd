"""Multiply bf16 or fp16 matrices via fp32 copies, on CPUs without instructions for the dtype.

PyTorch computes such products 10 to 50 times slower than in fp32. Converting the factors, a block
at a time, takes 10 to 20 percent of the time of an fp32 product. fp32 totals are never rounded, and
a result in the narrow dtype is rounded once, as elsewhere. `computes_in_fp32` decides once per
process, by processor features rather than by timing, so that a resumed run computes the same bits
under any load.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_lite.kernels.matmul_library import in_its_library, onednn_supports

# Elements of a temporary on a CPU: few enough to be in the cache still when used.
TEMPORARY_ELEMENTS = 2**21
# Rows and columns below which a converted block would make the product slow.
SMALLEST_BLOCK = 64
HALVES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@functools.cache
def computes_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products in `dtype` use fp32 copies: on a CPU without fast instructions for
    `dtype`."""
    if device.type != "cpu" or dtype not in HALVES:
        return False
    return not (
        onednn_supports(HALVES[dtype]) and (dtype != torch.bfloat16 or _has_bf16_dot_product())
    )


def _has_bf16_dot_product() -> bool:
    """Return whether bf16 products use the processor's bf16 dot-product instructions, not emulation
    in fp32.

    oneDNN also emulates bf16 (AVX-512 without its bf16 extension), four times slower than fp32. The
    real instructions, on x86 and Arm, flush subnormal factors to zero; fp32 arithmetic does not.
    """
    tiny, large = (
        torch.full((256, 256), number, dtype=torch.bfloat16) for number in (0.0, 2.0**40)
    )
    tiny[0] = 2.0**-130  # one row: all of them take 60 ms. PyTorch computes smaller products itself
    return not (tiny @ large).any()


def multiply_in_fp32(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    addend: Tensor | None = None,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> Tensor:
    """Compute out (m, n) = alpha a (m, k) b (k, n) + beta addend, (m, n) or (n,), in fp32; round it
    once to `out`.

    The addend may be `out` itself. Only one block of each factor and of the result exists in fp32
    at a time.
    """
    k = max(1, a.shape[1])
    for columns in _parts(b.shape[1], k):
        wide_b = b[:, columns].float()
        for rows in _parts(a.shape[0], max(k, wide_b.shape[1])):
            wide_a, target = a[rows].float(), out[rows, columns]
            wide = (
                target
                if out.dtype == torch.float32
                else torch.empty_like(target, dtype=torch.float32)
            )
            cost = wide.device, wide.dtype, wide.numel() * k
            if addend is None:
                in_its_library(torch.mm, *cost)(wide_a, wide_b, out=wide)
            else:
                part = target  # in fp32 the same tensor object, or torch copies the total first
                if addend is not out:
                    part = addend[columns] if addend.dim() == 1 else addend[rows, columns]
                add = in_its_library(torch.addmm, *cost)
                add(part.float(), wide_a, wide_b, beta=beta, alpha=alpha, out=wide)
            if wide is not target:
                target.copy_(wide)
            del wide_a, wide  # before the next ones are allocated
    return out


def _parts(length: int, other: int) -> Iterator[slice]:
    """Split a dimension into slices whose blocks, `other` in the other dimension, are small
    temporaries."""
    step = max(SMALLEST_BLOCK, temporary_rows(other))
    return (slice(start, start + step) for start in range(0, length, step))


def temporary_rows(columns: int) -> int:
    """Return the number of rows in a narrow temporary on a CPU."""
    return max(1, TEMPORARY_ELEMENTS // columns)
