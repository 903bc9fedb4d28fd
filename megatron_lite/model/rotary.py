"""The table of rotary angles (Su et al. 2021) that all blocks share; `rope_scaling.py` stretches it."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.config import ModelConfig
from megatron_lite.kernels.rotary import Table, angle_table, wavelengths
from megatron_lite.model.rope_scaling import attention_factor, stretched_frequencies


class Rotary:
    """The cos/sin table of a model, computed once and shared by its blocks."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        self._config, self._length, self._channels = config, length, config.rotated_channels
        self._table: Table | None = None

    def table(self, like: Tensor) -> Table:
        """Return cos and sin of all positions, (length, r / 2) in fp32, on the device of `like`."""
        if self._table is None or self._table[0].device != like.device:
            frequencies = rotary_frequencies(self._config, self._channels, like.device)
            cos, sin = angle_table(frequencies, self._length)
            factor = 1.0 if self._config.rope_type == "default" else attention_factor(self._config)
            self._table = (cos, sin) if factor == 1.0 else (cos.mul_(factor), sin.mul_(factor))
        return self._table

    def at(self, positions: Tensor) -> Table:
        """Return cos and sin of positions (b, s) below length: (b, s, r / 2)."""
        cos, sin = self.table(positions)
        return cos[positions], sin[positions]


def rotary_frequencies(model: ModelConfig, channels: int, device: torch.device) -> Tensor:
    """Return radians per position, (r / 2,) in fp32, for r rotated channels of a resolved model."""
    waves = wavelengths(channels, model.rotary_base, device)
    return 1.0 / waves if model.rope_type == "default" else stretched_frequencies(model, waves)
