"""Normalization layers."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.config import ModelConfig
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.normalization import add_norm
from megatron_lite.parameter import Initializer, ParameterSpec, declare


class Norm(torch.nn.Module):
    """Layer or RMS norm over the last dimension: (..., h) -> (..., h)."""

    def __init__(self, name: str, config: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        shape, ones = (config.hidden_size,), Initializer("around_one", config.layer_norm_init_range)
        self.eps, self.kernels = config.layer_norm_eps, kernels
        self.weight = declare(ParameterSpec(f"{name}.weight", shape, ones, weight_decay=False))
        self.bias = None
        if config.normalization_type == "layer_norm":
            zeros = Initializer("constant", 0.0)
            self.bias = declare(ParameterSpec(f"{name}.bias", shape, zeros, weight_decay=False))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.add(hidden, None)[1]

    def add(self, hidden: Tensor, branch: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum of both, in the branch's memory, and its norm; without a branch `hidden` itself, and its norm."""
        return add_norm(hidden, branch, self.weight, self.bias, self.eps, self.kernels.triton)
