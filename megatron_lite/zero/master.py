"""The weights that the optimizer updates: this rank's shard of a flat range.

`WeightShard` is a plain shard, as a rule in fp32. `SplitWeightShard` keeps no fp32 copy beside the bf16 weights: the
bf16 weight is the fp32 master rounded half up, and a signed 16-bit remainder is what is missing to the master's bits.
It saves 2 bytes per element and loses nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements split at a time: bounds the temporaries.
SPLIT_CHUNK_NUMEL = 2**22
_NAN_BITS = 0x7FC00000


class WeightShard:
    """(shard_numel,) in any floating dtype."""

    def __init__(self, shard: Tensor, counted: bool) -> None:
        self._shard = shard
        self.dtype = shard.dtype
        self.nbytes = shard.nbytes if counted else 0  # 0: it is a view of the weight buffer, which counts it

    def read(self, start: int = 0, end: int | None = None) -> Tensor:
        """The elements from start to end, live: what is written into them stays."""
        return self._shard[start:end]

    def write(self, values: Tensor, start: int = 0) -> None:
        """Store what `read` has returned and somebody has changed; here it is stored already."""

    def round_into(self, weights: Tensor) -> None:
        """Write the weights, in the training dtype, into this rank's slice of the weight buffer."""
        if weights.data_ptr() != self._shard.data_ptr():
            weights.copy_(self._shard)


class SplitWeightShard:
    """(shard_numel,) fp32 as the bf16 slice of the weight buffer and a remainder: master bits = bf16 bits << 16 + r."""

    dtype = torch.float32

    def __init__(self, rounded: Tensor) -> None:
        assert rounded.dtype == torch.bfloat16, rounded.dtype
        self._high = rounded.view(torch.int16)
        self._remainder = torch.zeros_like(self._high)
        self.nbytes = self._remainder.nbytes

    def read(self, start: int = 0, end: int | None = None) -> Tensor:
        """The elements from start to end as a new fp32 tensor."""
        bits = self._high[start:end].int().bitwise_left_shift_(16)
        return bits.add_(self._remainder[start:end]).view(torch.float32)

    def write(self, values: Tensor, start: int = 0) -> None:
        """Split fp32 values into weights and remainders, from element `start` on. `values` is left alone."""
        for chunk in values.split(SPLIT_CHUNK_NUMEL):
            bounds = slice(start, start + chunk.numel())
            # A NaN with all payload bits set (a GPU's own) would be rounded over the edge, to zero: let it be another.
            bits = chunk.view(torch.int32).masked_fill(chunk.isnan(), _NAN_BITS)
            high = bits.add(0x8000).bitwise_right_shift_(16)  # arithmetic: the remainder lies in [-0x8000, 0x7fff]
            self._high[bounds] = high
            self._remainder[bounds] = bits.sub(high.bitwise_left_shift_(16))
            start = bounds.stop

    def round_into(self, weights: Tensor) -> None:
        """Nothing to do: the slice of the weight buffer is where they lie."""
        assert weights.data_ptr() == self._high.data_ptr(), "a split shard needs a weight buffer of its own"
