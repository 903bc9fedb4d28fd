"""The forms in which an update finds the weights of a shard, and leaves them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from megatron_lite.kernels.split_weights import join, split


class Weights(NamedTuple):
    """(n,) each."""

    master: Tensor | None  # fp32; None where it is split into `rounded` and `remainder`
    rounded: Tensor | None  # in the training dtype; None: nobody wants them now, or the master is in it
    remainder: Tensor | None  # int16

    def read(self, bounds: slice) -> Tensor:
        """Some of the fp32 weights, live or, of split ones, in new memory."""
        if self.master is not None:
            return self.master[bounds]
        assert self.rounded is not None and self.remainder is not None
        return join(self.rounded[bounds], self.remainder[bounds])

    def write(self, bounds: slice, values: Tensor) -> None:
        """Store what `read` has returned and somebody has changed, in every form in which they are kept."""
        if self.rounded is None:
            return
        if self.remainder is None:
            self.rounded[bounds].copy_(values)
        else:
            split(values, self.rounded[bounds], self.remainder[bounds])
