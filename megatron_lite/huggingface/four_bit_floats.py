"""Decode weights in MXFP4 (OCP Microscaling Formats 1.0, 2023), the form of the published gpt-oss.

32 adjacent inputs of an output share a scale, 2^(byte - 127). Each is a float of 4 bits: a sign, and
one of eight magnitudes. 16 bytes hold the 32 floats, each byte two, the low half first. A tensor
`name` is two: `name_blocks`, bytes (..., rows, inputs / 32, 16), and `name_scales`, bytes (..., rows,
inputs / 32).
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32  # floats with one scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the weights (rows, inputs) in fp64 of blocks (rows, inputs / 32, 16) and scales (rows,
    inputs / 32), bytes."""
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], dtype=torch.float64)
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # (rows, inputs / 32, 32)
    factors = torch.ldexp(torch.ones((), dtype=torch.float64), scales.double() - 127.0)
    return (values[halves.long()] * factors[..., None]).flatten(1)
