"""The weights that the optimizer updates: this rank's shard of a flat range.

`WeightShard` is a plain shard, as a rule in fp32. `SplitWeightShard` keeps no fp32 copy beside the bf16 weights: the
bf16 weight is the fp32 master rounded half up, and a signed 16-bit remainder is what is missing to the master's bits.
It saves 2 bytes per element and loses nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.kernels.split_weights import join, split

# Elements split at a time: bounds the temporaries.
SPLIT_CHUNK_NUMEL = 2**18


class WeightShard:
    """(shard_numel,) in any floating dtype.

    rounded: its slice of a weight buffer in another dtype that nobody else uses. Who updates the master in place keeps
    it up to date; then there is nothing to be rounded into the buffer before a gather.
    """

    remainder: Tensor | None = None

    def __init__(self, shard: Tensor, counted: bool, rounded: Tensor | None = None) -> None:
        self.master, self.rounded = shard, rounded
        self.dtype = shard.dtype
        self.nbytes = shard.nbytes if counted else 0  # 0: it is a view of the weight buffer, which counts it
        self._is_rounded = False  # `rounded` is up to date

    def read(self, start: int = 0, end: int | None = None) -> Tensor:
        """The elements from start to end, live: what is written into them stays."""
        return self.master[start:end]

    def write(self, values: Tensor, start: int = 0) -> None:
        """Store what `read` has returned and somebody has changed; here it is stored already."""
        self._is_rounded = False

    def round_into(self, weights: Tensor) -> None:
        """Write the weights, in the training dtype, into this rank's slice of the weight buffer."""
        if weights.data_ptr() != self.master.data_ptr() and not self._is_rounded:
            weights.copy_(self.master)
            self._is_rounded = self.rounded is not None


class SplitWeightShard:
    """(shard_numel,) fp32 as the bf16 slice of the weight buffer and a remainder: master bits = bf16 bits << 16 + r."""

    dtype = torch.float32
    master: Tensor | None = None

    def __init__(self, rounded: Tensor) -> None:
        assert rounded.dtype == torch.bfloat16, rounded.dtype
        self.rounded, self.remainder = rounded, torch.zeros_like(rounded, dtype=torch.int16)
        self.nbytes = self.remainder.nbytes

    def read(self, start: int = 0, end: int | None = None) -> Tensor:
        """The elements from start to end as a new fp32 tensor."""
        return join(self.rounded[start:end], self.remainder[start:end])

    def write(self, values: Tensor, start: int = 0) -> None:
        """Split fp32 values into weights and remainders, from element `start` on. `values` is left alone."""
        for chunk in values.split(SPLIT_CHUNK_NUMEL):
            bounds = slice(start, start + chunk.numel())
            split(chunk, self.rounded[bounds], self.remainder[bounds])
            start = bounds.stop

    def round_into(self, weights: Tensor) -> None:
        """Nothing to do: the slice of the weight buffer is where they lie."""
        assert weights.data_ptr() == self.rounded.data_ptr(), "a split shard needs a weight buffer of its own"
