"""How a layer declares a parameter: on the meta device, described by a spec; its stage gives it memory later."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_lite.config.system import DTYPES as DTYPE_NAMES
from megatron_lite.errors import UsageError

# Dtypes of weights by their names in flags, and their names in safetensors files.
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, names.torch) for name, names in DTYPE_NAMES.items()}
SAFETENSORS_NAMES = {DTYPES[name]: names.safetensors for name, names in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Initializer:
    """Initial values: normal(0, scale), uniform in 0 +- scale or in 1 +- scale, or all equal to scale."""

    distribution: Literal["normal", "around_zero", "around_one", "constant"]
    scale: float

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        """Write the initial values into an fp32 tensor of the parameter's global shape."""
        if self.distribution == "constant" or self.scale == 0.0:
            tensor.fill_(1.0 if self.distribution == "around_one" else self.scale)
        elif self.distribution == "normal":
            tensor.normal_(0.0, self.scale, generator=generator)
        else:
            middle = 1.0 if self.distribution == "around_one" else 0.0
            tensor.uniform_(middle - self.scale, middle + self.scale, generator=generator)


@dataclass(frozen=True)
class ParameterSpec:
    """Everything the partitioner, the optimizer and the checkpoints need to know of a parameter."""

    name: str  # global and stable: checkpoints and initial values depend on it
    shape: tuple[int, ...]
    initializer: Initializer
    weight_decay: bool = True
    lr_scale: float = 1.0  # factor on the learning rate; 0: frozen
    # Rows of each matrix that lies in it, from the top: of queries, keys, values, each a linear map of its own. Empty:
    # none, or none between two hidden layers (embeddings, head), which is what Muon is for.
    matrix_rows: tuple[int, ...] = ()
    embedding: bool = False  # of tokens or positions
    # Rows of zeros that lie behind it in memory and are no part of it: see `padded`.
    padding_rows: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def padded_numel(self) -> int:
        """Elements that it takes in memory."""
        return self.numel + self.padding_rows * math.prod(self.shape[1:])

    @property
    def trainable(self) -> bool:
        """Frozen parameters have no gradient, no optimizer state and no reduction."""
        return self.lr_scale != 0.0


class Parameter(torch.nn.Parameter):
    """A parameter that is a view of its stage's weight buffer, with `main_grad`, a view of the gradient buffer.

    The backward functions in `kernels/` add weight gradients to `main_grad` themselves instead of returning them to
    autograd: they accumulate in the dtype of the buffer (fp32 by default) whatever the training dtype, and in fp32
    training straight out of the matrix product, without a temporary.
    A frozen parameter has `requires_grad` False and no `main_grad`.
    """

    spec: ParameterSpec
    main_grad: Tensor
    # main_grad holds garbage: the next contribution overwrites it, so that nobody has to zero it first.
    gradient_is_empty: bool = False

    def begin_gradient(self) -> bool:
        """Whether the contribution that is about to be written is the first; later ones add to it."""
        first, self.gradient_is_empty = self.gradient_is_empty, False
        return first


def declare(spec: ParameterSpec) -> Parameter:
    """A parameter without memory."""
    parameter = Parameter(torch.empty(spec.shape, device="meta"))
    parameter.spec = spec
    return parameter


def padded(tensor: Tensor, rows: int) -> Tensor:
    """A parameter (v, h) or its gradient with the rows of zeros that lie behind it: a view, (v + rows, h).

    They belong to the padding of the stage's flat range, which is zero, gets gradients of zero and is neither saved
    nor exported. So only who computes with them has to know of them.
    """
    shape = (tensor.shape[0] + rows, *tensor.shape[1:])
    return tensor.detach().as_strided(shape, tensor.stride()) if rows else tensor.detach()


def set_lr_scales(parameters: Iterable[Parameter], scales: Sequence[tuple[str, float]]) -> None:
    """Give every parameter that a pattern matches its learning-rate scale; the last pattern that matches counts.

    A pattern is a name, a prefix of whole parts of names (`blocks.0`), or has wildcards (`*.norm.*`).

    Raises:
        UsageError: for a pattern that matches nothing, or if nothing is left to train.
    """
    parameters = list(parameters)
    names = [parameter.spec.name for parameter in parameters]
    for pattern, _ in scales:
        if not any(matches(pattern, name) for name in names):
            raise UsageError(
                f"--freeze or --lr_scales: no parameter is called {pattern!r}; {similar_names(pattern, names)}, "
                "a prefix takes all below it (blocks.0), wildcards are * and ?"
            )
    for parameter in parameters:
        for pattern, scale in scales:
            if matches(pattern, parameter.spec.name):
                parameter.spec = dataclasses.replace(parameter.spec, lr_scale=scale)
    if not any(parameter.spec.trainable for parameter in parameters):
        raise UsageError("--freeze, --lr_scales: every parameter is frozen, nothing is left to train; freeze fewer")


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern is this name, a prefix of whole parts of it, or fits with its wildcards."""
    return name.startswith(f"{pattern}.") or fnmatch.fnmatchcase(name, pattern)


def similar_names(pattern: str, names: Sequence[str]) -> str:
    """For the message about a pattern that matches none of the names."""
    return f"names are such as {', '.join(difflib.get_close_matches(pattern, names, n=3, cutoff=0.0))}"
