"""A shard's weights, in the forms that optimizers read and write.

split: rounded = bf16(value), half up; remainder = bits(value) - (bits(rounded) << 16); joining is
exact
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements split or joined at a time, which bounds the temporaries.
CPU_CHUNK_NUMEL, GPU_CHUNK_NUMEL = 2**18, 2**22
ALL = slice(None)


@dataclass
class WeightShard:
    """The weights of one rank's shard of a flat range, (n,), in every stored form.

    A plain shard is `master`, plus `rounded` if a weight buffer in a narrower dtype belongs to one
    stage only. A split shard is `rounded` (bf16) and `remainder`: exact, and 2 bytes per element
    less than fp32 plus bf16. Optimizers update every form, so that a gather finds `rounded` up to
    date.
    """

    # fp32 (frozen weights: any dtype), perhaps a slice of the weight buffer; None: split
    master: Tensor | None
    rounded: Tensor | None = None  # a slice of the weight buffer
    remainder: Tensor | None = None  # int16
    # without a remainder: of a run that evaluates what a split shard has trained
    rounds_half_up: bool = False

    @classmethod
    def split_into(cls, rounded: Tensor) -> WeightShard:
        """Return a zero split shard: a slice of the weight buffer, which must be zero, and a new
        remainder."""
        assert rounded.dtype == torch.bfloat16, rounded.dtype
        return cls(None, rounded, torch.zeros_like(rounded, dtype=torch.int16))

    @property
    def nbytes(self) -> int:
        """Bytes of `master` or `remainder`, without `rounded`."""
        return sum(tensor.nbytes for tensor in (self.master, self.remainder) if tensor is not None)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors that store the weights, from which `weights_of` restores them: `master`, or
        the two halves."""
        if self.master is not None:
            return (self.master,)
        assert self.rounded is not None and self.remainder is not None
        return self.rounded, self.remainder

    def read(self, bounds: slice = ALL) -> Tensor:
        """Return the weights within `bounds`: a view of `master` or, for a split shard, a new fp32
        tensor."""
        return weights_of([tensor[bounds] for tensor in self.stored])

    def write(self, values: Tensor, bounds: slice = ALL) -> None:
        """Store updated values from `read` in every form. Does not change `values`."""
        if self.rounded is None:
            return
        if self.remainder is None:
            self._round(values, self.rounded[bounds])
            return
        rounded, remainder = self.rounded[bounds], self.remainder[bounds]
        for chunk in chunk_bounds(values):
            split(values[chunk], rounded[chunk], remainder[chunk])

    def round_into(self, weights: Tensor) -> None:
        """Write the weights in the training dtype to this rank's slice of the weight buffer, if not
        already there."""
        if (
            self.rounded is None
            and self.master is not None
            and weights.data_ptr() != self.master.data_ptr()
        ):
            self._round(self.master, weights)

    def _round(self, values: Tensor, weights: Tensor) -> None:
        """Write fp32 values (n,) to weights in the training dtype."""
        if not self.rounds_half_up:
            weights.copy_(values)
            return
        for chunk in chunk_bounds(values):
            weights[chunk].view(torch.int16).copy_(_half_up(_bits(values[chunk])))


def chunk_bounds(tensor: Tensor, first: int = 0, end: int | None = None) -> Iterator[slice]:
    """Split a flat tensor, or its elements [first, end), into chunks small enough for
    temporaries."""
    numel = CPU_CHUNK_NUMEL if tensor.device.type == "cpu" else GPU_CHUNK_NUMEL
    end = tensor.numel() if end is None else end
    for start in range(first, end, numel):
        yield slice(start, min(start + numel, end))


def split(values: Tensor, rounded: Tensor, remainder: Tensor) -> None:
    """Write fp32 values (n,) as bf16, rounded half up in magnitude, and an int16 remainder of their
    bits.

    A NaN with all payload bits set (a GPU's default) would overflow to zero, so all NaNs become the
    same one.
    """
    bits = _bits(values)
    high = _half_up(bits)
    rounded.view(torch.int16).copy_(high)
    remainder.copy_(bits.sub_(high.bitwise_left_shift_(16)))


def _bits(values: Tensor) -> Tensor:
    return torch.nan_to_num(values, math.nan, math.inf, -math.inf).view(torch.int32)


def _half_up(bits: Tensor) -> Tensor:
    """Return the upper halves of fp32 bits, (n,) in int32; what is left is in [-0x8000, 0x7fff]."""
    return bits.add(0x8000).bitwise_right_shift_(16)


def weights_of(stored: Sequence[Tensor]) -> Tensor:
    """Return the values of `WeightShard.stored` or of a copy: the single tensor itself, or two
    halves joined."""
    return join(*stored) if len(stored) > 1 else stored[0]


def join(rounded: Tensor, remainder: Tensor) -> Tensor:
    """Return the split fp32 values, in new memory."""
    return rounded.float().view(torch.int32).add_(remainder).view(torch.float32)
