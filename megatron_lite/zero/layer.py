"""The interface that ZeRO requires of a model: a list of layers that pass on one hidden tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor


class Layer(Protocol):
    """A module that maps hidden (b, s, h) to hidden (b, s, h), with its `Parameter`s on the meta
    device."""

    name: str  # unique in the model
    # layers whose parameters this one also uses (a tied head: the embedding)
    borrows_from: tuple[torch.nn.Module, ...]
    borrowed: tuple[str, ...]  # names of the borrowed parameters
    gradients_in_forward: (
        bool  # the forward pass already writes parameter gradients (as the loss does)
    )
    backward_needs_weights: (
        bool  # the backward pass reads parameters, so they must be gathered for it
    )
    recomputed: bool

    def __call__(self, hidden: Tensor | None, micro_batch: Any, /) -> Tensor: ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def modules(self) -> Iterator[torch.nn.Module]: ...
