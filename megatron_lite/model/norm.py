"""Normalization layers."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.config import ModelConfig
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.normalization import Kind, add_norm
from megatron_lite.parameter import Initializer, Parameter, ParameterSpec, declare


class Norm(torch.nn.Module):
    """Layer or RMS norm over the last dimension: (..., h) -> (..., h), its parameters (h,), if it has any."""

    def __init__(self, name: str, config: ModelConfig, kernels: Kernels, size: int | None = None) -> None:
        """`size`: of the last dimension; None: hidden_size."""
        super().__init__()
        centered = config.normalization_type == "layer_norm"
        self.kind, self.kernels = Kind(config.layer_norm_eps, centered, config.zero_centered_normalization), kernels
        shape = (size or config.hidden_size,)
        self.weight: Parameter | None = None
        self.bias: Parameter | None = None
        if config.use_layer_norm_weight:
            init_range = config.layer_norm_init_range
            weights = Initializer("around_zero" if self.kind.zero_centered else "around_one", init_range)
            self.weight = declare(ParameterSpec(f"{name}.weight", shape, weights, weight_decay=False))
        if config.use_layer_norm_weight and centered:
            zeros = Initializer("constant", 0.0)
            self.bias = declare(ParameterSpec(f"{name}.bias", shape, zeros, weight_decay=False))

    def forward(self, hidden: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """In another dtype than the input's if one is given."""
        return self.add(hidden, None, dtype)[1]

    def add(self, hidden: Tensor, branch: Tensor | None, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """The sum of both, in the branch's memory if that has its dtype, and its norm; without a branch `hidden`
        itself, and its norm.
        """
        return add_norm(hidden, branch, self.weight, self.bias, self.kind, self.kernels.triton, dtype=dtype)
