"""Timed GPU operations and their random inputs.

Inputs are rebuilt for every operation, on any device: tests run small shapes on a CPU and compile
the kernels of the full shapes on the meta device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.parameter import Parameter

Call = Callable[[], Any]


@dataclass(frozen=True)
class Shape:
    """Sizes, dtype and device, with methods that create random tensors."""

    tokens: int = 8192
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    groups: int = 8
    head_size: int = 128
    vocab: int = 32000
    large_vocab: int = 128256
    shard: int = 200_000_000 // 64 * 64
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    @property
    def item(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    def random(self, *size: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Return a normally distributed tensor."""
        return torch.randn(*size, device=self.device, dtype=dtype or self.dtype).mul_(scale)

    def input(self, *size: int) -> Tensor:
        """Return a random tensor that requires a gradient."""
        return self.random(*size).requires_grad_()

    def parameter(self, *size: int) -> Parameter:
        """Return a random parameter with an fp32 gradient buffer."""
        made = Parameter(self.random(*size, scale=1 / math.sqrt(size[-1])))
        made.main_grad = torch.zeros(size, dtype=torch.float32, device=self.device)
        return made

    def labels(self, vocab: int) -> Tensor:
        """Return random labels, (tokens,) int64."""
        return torch.randint(vocab, (self.tokens,), device=self.device)


@dataclass(frozen=True)
class Op:
    """An operation. make: returns its variants by name, each a call without arguments."""

    name: str
    make: Callable[[Shape], dict[str, Call]]
    size: str  # a format string over the fields of Shape
    bytes: Callable[[Shape], int] = lambda shape: 0
    flops: Callable[[Shape], int] = lambda shape: 0
    gathers: bool = False  # rows at random: its bytes are no bound of its time

    @property
    def memory_bound(self) -> bool:
        """Whether its goal is the bandwidth of a copy."""
        return self.bytes(Shape()) > 0 and not self.gathers

    def describe(self, shape: Shape) -> str:
        """Return the size as text for the table."""
        return self.size.format(**vars(shape))


Outputs = Tensor | tuple[Tensor, ...]


def backward(output: Outputs, inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]) -> Call:
    """Return a call that repeats the backward pass over one graph."""
    outputs = output if isinstance(output, tuple) else (output,)
    return lambda: torch.autograd.grad(outputs, inputs, grads, retain_graph=True)


def compiled(function: Callable[..., Any], *arguments: Any) -> Call:
    """Return a call of the function, which is compiled at the first call."""

    @functools.cache
    def made() -> Callable[..., Any]:
        return torch.compile(function, dynamic=False)

    return lambda: made()(*arguments)


def both(call: Callable[[bool], Any]) -> dict[str, Call]:
    """Return the variants with the Triton kernel and the reference."""
    return {"triton": lambda: call(True), "torch": lambda: call(False)}


def both_backward(
    forward: Callable[[bool], Outputs], inputs: tuple[Tensor, ...], *grads: Tensor
) -> dict[str, Call]:
    """Return the backward passes with the Triton kernel and the reference."""
    return {
        name: backward(forward(name == "triton"), inputs, grads) for name in ("triton", "torch")
    }
