"""What may look on while a stage computes: tensor debugging. It never changes anything."""

from __future__ import annotations

from torch import Tensor


class Observer:
    """Does nothing; who wants to see something overrides it."""

    def layer_output(self, name: str, output: Tensor, micro_batch: int) -> None:
        """After a layer's forward pass: its output, (b, s, h), or () of the last one."""

    def layer_gradient(self, name: str, gradient: Tensor | None, micro_batch: int) -> None:
        """In the backward pass: the gradient of a layer's input, (b, s, h); None after a layer without one."""
