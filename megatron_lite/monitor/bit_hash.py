"""A hash of all bits of a tensor, computed on its device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

CHUNK_NUMEL = 2**20  # elements hashed at a time: 24 MiB of temporary integers
# Integers by width in bytes, to read the bits of floating-point numbers.
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_hash(flat: Tensor, prepare: Callable[[Tensor], Tensor] = lambda chunk: chunk) -> Tensor:
    """Return the hash of a tensor (n,), () int64 on its device: the sum of each element's bits times 2 * position + 1.

    Integer sums (modulo 2**64) do not depend on their order, and no change of a single element keeps the sum, because
    the factors are odd. prepare: makes a copy of each chunk whose bits count.
    """
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), CHUNK_NUMEL):
        chunk = prepare(flat[start : start + CHUNK_NUMEL])
        positions = torch.arange(start, start + chunk.numel(), device=flat.device)
        total += (chunk.view(BITS[chunk.element_size()]).to(torch.int64) * (2 * positions + 1)).sum()
    return total
