"""The weights of a shard, in the forms that optimizers read and write.

split: rounded = bf16(value), half up; remainder = bits(value) - (bits(rounded) << 16); joining restores every bit
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements split or joined at a time, which bounds the temporaries.
CPU_CHUNK_NUMEL, GPU_CHUNK_NUMEL = 2**18, 2**22
ALL = slice(None)


@dataclass
class WeightShard:
    """The weights of one rank's shard of a flat range, (n,), in every form that is kept.

    A plain shard is `master`, with `rounded` beside it where a weight buffer in a narrower dtype belongs to one stage
    only. A split shard is `rounded` (bf16) and `remainder`: exact, and 2 bytes per element less than fp32 plus bf16.
    Optimizers update every form, so that a gather finds `rounded` up to date.
    """

    master: Tensor | None  # fp32 (frozen weights: any dtype), perhaps a slice of the weight buffer; None: split
    rounded: Tensor | None = None  # a slice of the weight buffer
    remainder: Tensor | None = None  # int16

    @classmethod
    def split_into(cls, rounded: Tensor) -> WeightShard:
        """Return a split shard of zeros in a slice of the weight buffer, which must be zero, and a new remainder."""
        assert rounded.dtype == torch.bfloat16, rounded.dtype
        return cls(None, rounded, torch.zeros_like(rounded, dtype=torch.int16))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values that `read` returns."""
        return torch.float32 if self.master is None else self.master.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of `master` or `remainder`, without `rounded`."""
        return sum(tensor.nbytes for tensor in (self.master, self.remainder) if tensor is not None)

    def read(self, bounds: slice = ALL) -> Tensor:
        """Return the weights between two bounds: a view of `master` or, of a split shard, a new fp32 tensor."""
        if self.master is not None:
            return self.master[bounds]
        assert self.rounded is not None and self.remainder is not None
        return join(self.rounded[bounds], self.remainder[bounds])

    def write(self, values: Tensor, bounds: slice = ALL) -> None:
        """Store in every form what `read` returned for these bounds, after a change. Leaves `values` as it is."""
        if self.rounded is None:
            return
        if self.remainder is None:
            self.rounded[bounds].copy_(values)
            return
        rounded, remainder = self.rounded[bounds], self.remainder[bounds]
        for chunk in chunk_bounds(values):
            split(values[chunk], rounded[chunk], remainder[chunk])

    def round_into(self, weights: Tensor) -> None:
        """Write the weights in the training dtype to this rank's slice of the weight buffer, unless they are there."""
        if self.rounded is None and self.master is not None and weights.data_ptr() != self.master.data_ptr():
            weights.copy_(self.master)


def chunk_bounds(tensor: Tensor, first: int = 0, end: int | None = None) -> Iterator[slice]:
    """Cut a flat tensor, or its elements from `first` to `end`, into pieces small enough for temporaries."""
    numel = CPU_CHUNK_NUMEL if tensor.device.type == "cpu" else GPU_CHUNK_NUMEL
    end = tensor.numel() if end is None else end
    for start in range(first, end, numel):
        yield slice(start, min(start + numel, end))


def split(values: Tensor, rounded: Tensor, remainder: Tensor) -> None:
    """Write fp32 values (n,) as bf16, rounded half up in magnitude, and what is missing to their bits, int16.

    A NaN with all payload bits set (a GPU's own) would be rounded over the edge, to zero: every NaN becomes the same.
    """
    bits = torch.nan_to_num(values, math.nan, math.inf, -math.inf).view(torch.int32)
    high = bits.add(0x8000).bitwise_right_shift_(16)  # arithmetic: the remainder lies in [-0x8000, 0x7fff]
    rounded.view(torch.int16).copy_(high)
    remainder.copy_(bits.sub_(high.bitwise_left_shift_(16)))


def join(rounded: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 values that were split, in new memory."""
    return rounded.float().view(torch.int32).add_(remainder).view(torch.float32)
