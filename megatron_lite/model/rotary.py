"""The angles of rotary positions: plain, or stretched for sequences longer than those that a model was trained on.

The formulas are Hugging Face's (transformers, modeling_rope_utils.py), in its order of operations, in fp32. With the
wavelengths w = base^(2 j / r) in radians and the frequencies 1 / w of the r / 2 pairs of channels j, stretched `factor`
times:

    linear   1 / w / factor                                                        (Chen et al. 2023)
    llama3   1 / w for waves that fit `high_freq_factor` times and more into the original length, 1 / w / factor for
             those that fit at most `low_freq_factor` times, between them interpolated by how often  (Llama 3.1)
    yarn     1 / w for pairs before the one that turns `beta_fast` times over the original length, 1 / w / factor behind
             the one that turns `beta_slow` times, a ramp over j between them; cos and sin times an attention factor
             (Peng et al. 2023)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_lite.config import ModelConfig
from megatron_lite.kernels.rotary import Table, angle_table, wavelengths


class Rotary:
    """The cos/sin table of a model, made once and shared by its blocks."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        self._config, self._length = config, length
        self._table: Table | None = None

    def table(self, like: Tensor) -> Table:
        """cos and sin of all positions, (length, r / 2) in fp32, on the device of `like`."""
        if self._table is None or self._table[0].device != like.device:
            frequencies = rotary_frequencies(self._config, like.device)
            cos, sin = angle_table(frequencies, self._length)
            factor = attention_factor(self._config)
            self._table = (cos, sin) if factor == 1.0 else (cos.mul_(factor), sin.mul_(factor))
        return self._table

    def at(self, positions: Tensor) -> Table:
        """cos and sin of any positions (b, s) below length: (b, s, r / 2)."""
        cos, sin = self.table(positions)
        return cos[positions], sin[positions]


def rotary_frequencies(model: ModelConfig, device: torch.device) -> Tensor:
    """Radians for each position, (r / 2,) in fp32, of the pairs of channels that rotate. `model` is resolved."""
    assert model.rotary_base is not None
    waves = wavelengths(model.rotated_channels, model.rotary_base, device)
    if model.rope_type == "default":
        return 1.0 / waves
    assert model.rope_factor is not None
    if model.rope_type == "linear":
        return 1.0 / waves / model.rope_factor
    return (_llama3 if model.rope_type == "llama3" else _yarn)(model, waves, model.rope_factor)


def _llama3(model: ModelConfig, waves: Tensor, factor: float) -> Tensor:
    length, low = model.rope_original_max_position_embeddings, model.rope_low_freq_factor
    high = model.rope_high_freq_factor
    assert length is not None and low is not None and high is not None
    frequencies = 1.0 / waves
    turn = 2 * math.pi / frequencies  # positions of one turn
    share = (length / turn - low) / (high - low)
    between = (1 - share) * frequencies / factor + share * frequencies
    stretched = torch.where(turn > length / low, frequencies / factor, between)
    return torch.where(turn < length / high, frequencies, stretched)


def _yarn(model: ModelConfig, waves: Tensor, factor: float) -> Tensor:
    low, high = _ramp(model, 2 * len(waves))
    pairs = torch.arange(len(waves), dtype=torch.float32, device=waves.device)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return 1.0 / (factor * waves) * (1 - kept) + 1.0 / waves * kept


def _ramp(model: ModelConfig, channels: int) -> tuple[float, float]:
    """The pairs of channels, as fractions unless truncated, between which yarn goes over from one to the other."""
    length, base = model.rope_original_max_position_embeddings, model.rotary_base
    assert length is not None and base is not None and model.rope_beta_fast and model.rope_beta_slow

    def pair(turns: float) -> float:
        """The one that turns so often over the original length."""
        return (channels * math.log(length / (turns * 2 * math.pi))) / (2 * math.log(base))

    low, high = pair(model.rope_beta_fast), pair(model.rope_beta_slow)
    if model.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    return low, high + 0.001 if low == high else high  # never a ramp of no length


def attention_factor(model: ModelConfig) -> float:
    """What multiplies cos and sin: more than 1 for yarn alone, whose scores are to be sharper."""
    if model.rope_type != "yarn":
        return 1.0
    if model.rope_attention_factor is not None:
        return model.rope_attention_factor
    if model.rope_mscale and model.rope_mscale_all_dim:
        return _sharpness(model, model.rope_mscale) / _sharpness(model, model.rope_mscale_all_dim)
    return _sharpness(model, 1)


def _sharpness(model: ModelConfig, scale: float) -> float:
    assert model.rope_factor is not None
    return 0.1 * scale * math.log(model.rope_factor) + 1.0 if model.rope_factor > 1 else 1.0
