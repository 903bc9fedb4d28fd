"""How a layer declares a parameter: on the meta device, described by a spec; its stage gives it memory later."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Initializer:
    """Initial values: normal(0, scale), uniform(1 - scale, 1 + scale) or all equal to scale."""

    distribution: Literal["normal", "around_one", "constant"]
    scale: float

    def fill(self, tensor: Tensor, generator: torch.Generator) -> None:
        """Write the initial values into an fp32 tensor of the parameter's global shape."""
        if self.distribution == "constant" or self.scale == 0.0:
            tensor.fill_(1.0 if self.distribution == "around_one" else self.scale)
        elif self.distribution == "normal":
            tensor.normal_(0.0, self.scale, generator=generator)
        else:
            tensor.uniform_(1.0 - self.scale, 1.0 + self.scale, generator=generator)


@dataclass(frozen=True)
class ParameterSpec:
    """Everything the partitioner, the optimizer and the checkpoints need to know of a parameter."""

    name: str  # global and stable: checkpoints and initial values depend on it
    shape: tuple[int, ...]
    initializer: Initializer
    weight_decay: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Parameter(torch.nn.Parameter):
    """A parameter that is a view of its stage's weight buffer, with `main_grad`, a view of the gradient buffer.

    The backward functions in `kernels/` add weight gradients to `main_grad` themselves instead of returning them to
    autograd: they accumulate in the dtype of the buffer (fp32 by default) whatever the training dtype, and in fp32
    training straight out of the matrix product, without a temporary.
    """

    spec: ParameterSpec
    main_grad: Tensor
    gradient_is_empty: bool = False  # main_grad holds garbage: the next gradient overwrites it

    def begin_gradient(self) -> bool:
        """Whether the gradient about to be stored is the first one, which overwrites `main_grad`."""
        first, self.gradient_is_empty = self.gradient_is_empty, False
        return first


def declare(spec: ParameterSpec) -> Parameter:
    """A parameter without memory."""
    parameter = Parameter(torch.empty(spec.shape, device="meta"))
    parameter.spec = spec
    return parameter
