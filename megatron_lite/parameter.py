"""Parameters: declared by layers on the meta device with a spec, given memory by their stage later."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config.system import DTYPES as DTYPE_NAMES

# Dtypes of weights by their names in flags; their names in safetensors files.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, names.torch) for name, names in DTYPE_NAMES.items()}
SAFETENSORS_NAMES = {DTYPES[name]: names.safetensors for name, names in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Initializer:
    """Initial values: normal(0, scale), uniform in 0 +- scale or 1 +- scale, or constant scale."""

    distribution: Literal["normal", "around_zero", "around_one", "constant"]
    scale: float

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        """Draw the initial values into an fp32 tensor of the parameter's global shape."""
        if self.distribution == "constant" or self.scale == 0.0:
            tensor.fill_(1.0 if self.distribution == "around_one" else self.scale)
        elif self.distribution == "normal":
            tensor.normal_(0.0, self.scale, generator=generator)
        else:
            middle = 1.0 if self.distribution == "around_one" else 0.0
            tensor.uniform_(middle - self.scale, middle + self.scale, generator=generator)


class Piece(NamedTuple):
    """Consecutive indices of a parameter's split dimension that a rank of a tensor-parallel group holds."""

    start: int
    end: int
    holders: tuple[int, ...]  # ranks of the group that hold the same indices, in order


class Block(NamedTuple):
    """Consecutive indices of a parameter's split dimension that are cut into `parts` of `part_size`.

    With fewer parts than ranks, neighbouring ranks hold the same part. The last parts may be shorter.
    """

    size: int
    parts: int
    part_size: int

    @classmethod
    def of(cls, size: int, parts: int) -> Block:
        """Cut a block into equal parts."""
        assert size % parts == 0, (size, parts)
        return cls(size, parts, size // parts)


@dataclass(frozen=True)
class Split:
    """The parts of a parameter on the ranks of a tensor-parallel group (Shoeybi et al. 2019, section 3).

    A group of one holds the whole parameter, and so does every rank if `blocks` is empty.
    """

    ranks: int = 1
    rank: int = 0  # this one, within the group
    dim: int = 0
    blocks: tuple[Block, ...] = ()  # queries, keys and values; gate and up
    # Whether the gradients of several holders are parts of a sum; otherwise they are equal.
    sums_gradients: bool = False

    def pieces(self, size: int) -> list[Piece]:
        """Return the pieces of this rank, in order; `size`: of the whole dimension."""
        start, pieces = 0, []
        for block in self.blocks or (Block.of(size, 1),):
            part = self.rank * block.parts // self.ranks
            holders = tuple(rank for rank in range(self.ranks) if rank * block.parts // self.ranks == part)
            first, last = (min(place * block.part_size, block.size) for place in (part, part + 1))
            pieces.append(Piece(start + first, start + last, holders))
            start += block.size
        assert start == size, (self, size)
        return pieces


WHOLE = Split()


@dataclass(frozen=True)
class ParameterSpec:
    """Description of a parameter for the partitioner, the optimizer and checkpoints."""

    name: str  # global and stable: checkpoints and initial values depend on it
    shape: tuple[int, ...]  # of the whole parameter
    initializer: Initializer
    weight_decay: bool = True
    lr_scale: float = 1.0  # factor on the learning rate; 0: frozen
    # Rows of each linear map stored in the parameter, from the top (queries, keys, values). Empty: no matrix, or one
    # that does not map between hidden layers (embeddings, head) and is therefore not for Muon.
    matrix_rows: tuple[int, ...] = ()
    embedding: bool = False  # of tokens or positions
    padding_rows: int = 0  # rows of zeros that follow in memory and are not part of the parameter: see `padded`
    split: Split = WHOLE

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @functools.cached_property
    def pieces(self) -> list[Piece]:
        """Pieces of the split dimension that this rank holds, in order."""
        return self.split.pieces(self.shape[self.split.dim])

    @functools.cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the part that this rank of the tensor-parallel group holds."""
        size = sum(piece.end - piece.start for piece in self.pieces)
        return (*self.shape[: self.split.dim], size, *self.shape[self.split.dim + 1 :])

    @functools.cached_property
    def local_numel(self) -> int:
        """Elements of the part that this rank holds."""
        return math.prod(self.local_shape)

    @property
    def padded_numel(self) -> int:
        """Elements in memory, padding rows included."""
        return self.local_numel + self.padding_rows * math.prod(self.local_shape[1:])

    def local(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole parameter: a view if it is one piece of the first dimension."""
        dim = self.split.dim
        parts = [whole.narrow(dim, piece.start, piece.end - piece.start) for piece in self.pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def place(self, local: Tensor, whole: Tensor) -> None:
        """Copy this rank's part into a whole parameter."""
        start, dim = 0, self.split.dim
        for piece in self.pieces:
            size = piece.end - piece.start
            whole.narrow(dim, piece.start, size).copy_(local.narrow(dim, start, size))
            start += size

    def on(self, rank: int) -> ParameterSpec:
        """Return the spec of another rank of the tensor-parallel group.

        The last parts of a padded parameter are shorter and have more padding, so all take the same memory.
        """
        if rank == self.split.rank:
            return self
        other = replace(self, split=replace(self.split, rank=rank))
        rows = (self.padded_numel - other.local_numel) // math.prod(self.local_shape[1:])
        return replace(other, padding_rows=rows)

    @property
    def trainable(self) -> bool:
        """False for a frozen parameter, which has no gradient, no optimizer state and no reduction."""
        return self.lr_scale != 0.0


def part_name(spec: ParameterSpec, pieces: Sequence[Piece]) -> str:
    """Return the name of some pieces of a parameter: with their indices, as "up.weight[0:16 + 64:80]", unless whole."""
    if sum(piece.end - piece.start for piece in pieces) == spec.shape[spec.split.dim]:
        return spec.name
    indices = " + ".join(f"{piece.start}:{piece.end}" for piece in pieces)
    return f"{spec.name}[{':, ' * spec.split.dim}{indices}]"


class Parameter(torch.nn.Parameter):
    """A parameter whose data is a view of its stage's weight buffer, and whose `main_grad` views the gradient buffer.

    The backward functions in `kernels/` add weight gradients to `main_grad` instead of returning them to autograd.
    Gradients thus accumulate in the buffer's dtype (fp32 by default) at any training dtype, and in fp32 training the
    matrix product writes them without a temporary. A frozen parameter has `requires_grad` False and no `main_grad`.
    """

    spec: ParameterSpec
    main_grad: Tensor
    gradient_is_empty: bool = False  # main_grad holds garbage, which the next contribution overwrites

    def begin_gradient(self) -> bool:
        """Return whether the next contribution is the first, which overwrites; later contributions add."""
        first, self.gradient_is_empty = self.gradient_is_empty, False
        return first


def declare(spec: ParameterSpec) -> Parameter:
    """Declare a parameter without memory."""
    parameter = Parameter(torch.empty(spec.local_shape, device="meta"))
    parameter.spec = spec
    return parameter


def padded(tensor: Tensor, rows: int) -> Tensor:
    """Return a view (v + rows, h) of a parameter (v, h) or its gradient that includes the rows of zeros behind it.

    These rows belong to the padding of the stage's flat range: they stay zero, receive zero gradients, and are neither
    saved nor exported. Only the kernels that compute with them know them.
    """
    shape = (tensor.shape[0] + rows, *tensor.shape[1:])
    return tensor.detach().as_strided(shape, tensor.stride()) if rows else tensor.detach()
