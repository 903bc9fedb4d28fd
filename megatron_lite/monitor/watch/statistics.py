"""Statistics of a piece of a flat shard, on its device: sum of squares, largest element, zeros, histogram.

A histogram counts elements by sign and binary exponent, which are the upper bits of a float: bin edges are the powers
of two from 2**-64 to 2**16 on both sides of zero. Counts are integers, so the sum over ranks is exact.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_lite.kernels.gradient_norm import squared_norm

LOWEST, HIGHEST = -64, 16  # exponents of the smallest and largest edges
_SIDE = HIGHEST - LOWEST  # bins on each side of the one around zero
BINS = 2 * _SIDE + 1
EDGES = (
    *(-(2.0**power) for power in range(HIGHEST, LOWEST - 1, -1)),
    *(2.0**power for power in range(LOWEST, HIGHEST + 1)),
)
_BIAS, _EXPONENTS = 127, 256  # of fp32


def summarize(chunks: Iterable[Tensor], wide: bool, bins: Tensor | None) -> Tensor:
    """Return (sum of squares, largest absolute value, zeros) of flat tensors together, (3,) fp64; reads no device.

    wide: the elements are squares, whose own squares fp32 may lose. bins: from `bin_places`, to append a histogram, so
    that the result is (3 + BINS,).
    """
    squares, largest, zeros, counts = [], [], [], []
    for chunk in chunks:
        on_cpu = chunk.device.type == "cpu"
        squares.append(squared_norm([chunk]) if on_cpu and not wide else _squared_norm_fp64(chunk))
        largest.append(torch.stack(torch.aminmax(chunk)).abs().amax())
        zeros.append(chunk.numel() - torch.count_nonzero(chunk))
        if bins is not None:
            upper = (chunk.float().view(torch.int32) >> 23) & (2 * _EXPONENTS - 1)  # sign and exponent
            counts.append(torch.bincount(upper, minlength=2 * _EXPONENTS))
    parts = (torch.stack(squares).sum(), torch.stack(largest).amax(), torch.stack(zeros).sum())
    summary = torch.stack([part.double() for part in parts])
    if bins is None:
        return summary
    histogram = summary.new_zeros(BINS).index_add_(0, bins, torch.stack(counts).sum(0).double())
    return torch.cat([summary, histogram])


def _squared_norm_fp64(chunk: Tensor) -> Tensor:
    return torch.linalg.vector_norm(chunk, dtype=torch.float64).square()


def bin_places(device: torch.device) -> Tensor:
    """Return the bin of each sign and exponent, (512,) int64: infinities and NaN count as the largest numbers."""
    exponent = torch.arange(_EXPONENTS, device=device) - _BIAS
    distance = (exponent - LOWEST + 1).clamp_(0, _SIDE)
    return torch.cat([_SIDE + distance, _SIDE - distance])
