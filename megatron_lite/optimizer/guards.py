"""Which updates are dropped: decided on the device, from numbers that all ranks share, so that all decide the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import OptimizerConfig


@dataclass(frozen=True)
class Verdict:
    """On one update; tensors on the device, ()."""

    skipped: Tensor  # bool: nothing may change
    overflow: Tensor  # bool: the gradient was not finite, which a dynamic loss scale learns from


class Guard:
    """Judges every update before it is made."""

    def __init__(self, config: OptimizerConfig, device: torch.device) -> None:
        self._config = config

    def judge(self, iteration: int, loss: Tensor, grad_norm: Tensor) -> Verdict:
        """loss: mean over the tokens of the global batch; grad_norm: of the unscaled global gradient. () each."""
        # Nor may its square overflow: the second moment would, and stay so.
        overflow = ~torch.isfinite(grad_norm.square())
        return Verdict(overflow, overflow)

    def clipping_factor(self, grad_norm: Tensor) -> Tensor:
        """By which gradients are multiplied so that their norm stays within --clip_grad: (), at most 1."""
        clip = self._config.clip_grad
        if clip == 0:
            return torch.ones_like(grad_norm)
        return (clip / (grad_norm + 1e-6)).clamp(max=1.0)

    def state(self) -> dict[str, Any]:
        """For a checkpoint (reads the device)."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; an empty one begins anew."""
