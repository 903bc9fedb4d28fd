"""Kinds of work: products, attention, and passes over tensors, with their sizes. `speeds.py` has their times."""

from __future__ import annotations

from typing import NamedTuple


class Product(NamedTuple):
    """One of a linear layer's three products, `times` times: x W^T, dy W or dy^T x."""

    kind: str  # "forward", "input gradient" or "weight gradient"
    tokens: int
    inputs: int
    outputs: int
    times: float = 1

    @property
    def flops(self) -> float:
        """Total FLOPs."""
        return 2.0 * self.times * self.tokens * self.inputs * self.outputs


class Attention(NamedTuple):
    """Attention of one block and micro-batch, in one direction."""

    kind: str  # "fused forward", "fused backward", "math forward" or "math backward"
    heads: int  # of all samples
    length: int  # positions
    channels: int
    window: int  # at most `length`

    @property
    def flops(self) -> float:
        """FLOPs within causal mask and window; the backward pass has 5 products."""
        keys = self.window * (1 - self.window / (2 * self.length))
        return (10.0 if self.kind.endswith("backward") else 4.0) * self.heads * self.length * self.channels * keys


class Pass(NamedTuple):
    """Passes of one kind over tensors."""

    kind: str  # name of an operation of torch, of a kernel, or of a part of the update
    num_bytes: float  # read and written


Item = Product | Attention | Pass
