"""Parameters: layers declare them on the meta device with a spec; their stage allocates the memory
later."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_lite.config.system import DTYPES as DTYPE_NAMES
from megatron_lite.tiles import WHOLE, Split, Tile, name_part

# Dtypes of weights by their names in flags, and their names in safetensors files.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, names.torch) for name, names in DTYPE_NAMES.items()
}
SAFETENSORS_NAMES = {DTYPES[name]: names.safetensors for name, names in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Initializer:
    """Initial values: normal(0, scale), uniform within scale of 0 or 1, or the constant scale."""

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


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter's description for the partitioner, the optimizer and checkpoints."""

    name: str  # global and stable: checkpoints and initial values depend on it
    shape: tuple[int, ...]  # global
    initializer: Initializer
    weight_decay: float = 1.0  # factor on weight decay; 0: none
    lr_scale: float = 1.0  # factor on the learning rate; 0: frozen
    # A hidden matrix, which Muon updates as a whole: the rows of each linear map stored in it, from
    # the top (queries, keys, values). Empty: no matrix, or one that does not map between hidden
    # layers (embeddings, head).
    matrix_rows: tuple[int, ...] = ()
    embedding: bool = False  # of tokens or positions
    padding_rows: int = 0  # rows of zeros that follow the parameter in memory: see `padded`
    split: Split = WHOLE
    # Without a gradient, and in fp32 at any training dtype. Every rank has all of it, and computes
    # its updates: see `optimizer/balance.py`.
    is_state: bool = False

    @property
    def numel(self) -> int:
        """Elements, global."""
        return math.prod(self.shape)

    @functools.cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """Tiles of this tensor-parallel rank, in the order of its memory."""
        return self.split.tiles(self.name, self.shape)

    @functools.cached_property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        dim, (_, shape, _) = self.split.dim, self.split.own_rows(self.name, self.shape)
        size = sum(tile.width for tile in self.tiles) // math.prod(shape[dim + 1 :])
        return (*shape[:dim], size, *shape[dim + 1 :])

    @property
    def local_name(self) -> str:
        """Name of this rank's part, with its indices unless it is the whole parameter."""
        name, shape, first = self.split.own_rows(self.name, self.shape)
        unit = math.prod(shape[self.split.dim + 1 :])
        starts = ((tile.first - first, tile.width) for tile in self.tiles)
        spans = [(start // unit, (start + width) // unit) for start, width in starts]
        return name_part(name, shape, self.split.dim, spans)

    @functools.cached_property
    def local_numel(self) -> int:
        """Elements of this rank's part."""
        return math.prod(self.local_shape)

    @property
    def padded_numel(self) -> int:
        """Elements of this rank's part in memory, including padding rows."""
        return self.local_numel + self.padding_rows * math.prod(self.local_shape[1:])

    def local(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole parameter, as a view if it is contiguous."""
        flat = whole.view(-1)
        parts = [tile.view(flat).reshape(-1) for tile in self.tiles]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(self.local_shape)

    def place(self, local: Tensor, whole: Tensor) -> None:
        """Copy this rank's part, of any shape, into a whole parameter."""
        local, flat = local.reshape(-1), whole.view(-1)
        for tile in self.tiles:
            tile.view(flat).copy_(local[tile.offset : tile.end].view(tile.rows, tile.width))

    def on(self, rank: int) -> ParameterSpec:
        """Return the spec for a tensor-parallel rank.

        The last parts of a padded parameter are shorter and have more padding, so all parts take
        the same memory.
        """
        return self._on_ranks[rank]

    @functools.cached_property
    def _on_ranks(self) -> list[ParameterSpec]:
        others = [
            replace(self, split=replace(self.split, rank=rank)) for rank in range(self.split.ranks)
        ]
        row = math.prod(self.local_shape[1:])
        specs = [
            replace(it, padding_rows=(self.padded_numel - it.local_numel) // row) for it in others
        ]
        specs[self.split.rank] = self
        return specs

    @property
    def trainable(self) -> bool:
        """False for a frozen parameter, which has no gradient, no optimizer state and no
        reduction."""
        return self.lr_scale != 0.0 and not self.is_state


class Parameter(torch.nn.Parameter):
    """A parameter: `data` is a view of its stage's weight buffer, `main_grad` of its gradient
    buffer.

    The backward functions in `kernels/` add weight gradients to `main_grad` instead of returning
    them to autograd. Gradients thus accumulate in the buffer's dtype (fp32 by default) at any
    training dtype, and in fp32 training matrix products write them without a temporary. A frozen
    parameter has `requires_grad` False and no `main_grad`.
    """

    spec: ParameterSpec
    main_grad: Tensor
    gradient_is_empty: bool = (
        False  # main_grad contains garbage, which the next contribution overwrites
    )
    later: list[Callable[[], None]] | None = (
        None  # collects products for weight gradients; None: compute them at once
    )
    # values that layers derive from the weights in the stage's buffer; emptied by the next gather
    casts: dict[str, Any]

    def begin_gradient(self) -> bool:
        """Return whether the next contribution is the first, which overwrites; later ones add."""
        first, self.gradient_is_empty = self.gradient_is_empty, False
        return first

    def accumulate(self, gradient: Tensor | Callable[..., Tensor]) -> None:
        """Write the first gradient of an accumulation to `main_grad`, or add a later one, of any
        dtype.

        gradient: a tensor, or a function of `out` (`main_grad` for the first gradient), which saves
        the copy if it writes there.
        """
        first, grad = self.begin_gradient(), self.main_grad
        value = gradient if isinstance(gradient, Tensor) else gradient(out=grad if first else None)
        if value is not grad:
            grad.copy_(value) if first else grad.add_(value)


class Function(torch.autograd.Function):
    """An autograd function without functorch: no layer uses it, so `apply` skips the checks that
    serve it."""

    apply = torch._C._FunctionBase.__dict__["apply"]


def declare(spec: ParameterSpec) -> Parameter:
    """Declare a parameter without memory."""
    parameter = Parameter(torch.empty(spec.local_shape, device="meta"))
    parameter.spec = spec
    return parameter


def padded(tensor: Tensor, rows: int) -> Tensor:
    """Return a view (v + rows, h) of a parameter (v, h) or its gradient that includes the zero rows
    after it.

    These rows belong to the padding of the stage's flat range: they stay zero, receive zero
    gradients, and are neither saved nor exported. Only the kernels that compute with them know
    about them.
    """
    shape = (tensor.shape[0] + rows, *tensor.shape[1:])
    return tensor.detach().as_strided(shape, tensor.stride()) if rows else tensor.detach()


def backward(output: Tensor, grad: Tensor | None) -> None:
    """Run the backward pass of `output` from its gradient; None: `output` is the loss. Gradients
    must be enabled.

    Calls the engine like `torch.autograd.backward`, which would first import a library for symbolic
    shapes: 0.4 s before the first step.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        (output,),
        (torch.ones_like(output) if grad is None else grad,),
        False,
        False,
        (),
        True,
        True,
    )
