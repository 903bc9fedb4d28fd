"""The table of rotary angles (Su et al. 2021) that all blocks share, optionally scaled for longer
sequences.

The formulas are Hugging Face's (transformers, modeling_rope_utils.py), in its order of operations,
in fp32. Channel pair j of r / 2 has wavelength w = base^(2 j / r) in radians and frequency 1 / w;
scaled by `factor`:

    linear   1 / w / factor                                                        (Chen et al. 2023)
    llama3   1 / w for waves that fit at least `high_freq_factor` times into the original length, 1 / w / factor for
             waves that fit at most `low_freq_factor` times, interpolated by that number in between  (Llama 3.1)
    yarn     1 / w for pairs before the one that turns `beta_fast` times over the original length, 1 / w / factor after
             the one that turns `beta_slow` times, a ramp over j in between; cos and sin times an attention factor
             (Peng et al. 2023)
    longrope 1 / w / a factor of its own for each pair, which depends on whether the table is longer than the original
             length; cos and sin times an attention factor    (Ding et al. 2024)
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.config import ModelConfig
from megatron_lite.kernels.rotary import Table, angle_table, wavelengths


class Tables(NamedTuple):
    """Cos and sin of the same positions, in blocks without and with a window; often one table."""

    full: Table
    window: Table

    def of(self, window: int | None) -> Table:
        """Return the table of blocks with this window."""
        return self.full if window is None else self.window


class Rotary:
    """A model's cos/sin tables, computed once and shared by its blocks."""

    def __init__(self, config: ModelConfig, length: int) -> None:
        self._config = config
        self._length = length
        self._original = config.longrope_length or length
        self._tables: dict[bool, Tables] = {}

    def tables(self, like: Tensor, length: int | None = None) -> Tables:
        """Return cos and sin of all positions, (length, r / 2) in fp32, on the device of `like`.

        length: of a text so far, which chooses the factors of longrope; None: of the table.
        """
        is_long = (length or self._length) > self._original
        found = self._tables.get(is_long)
        if found is None or found.full[0].device != like.device:
            full = window = self._table(self._config, like.device, is_long)
            if (base := self._config.window_rotary_base) is not None:
                unscaled = replace(self._config, rope_type="default", rotary_base=base)
                window = self._table(unscaled, like.device, is_long)
            found = self._tables[is_long] = Tables(full, window)
        return found

    def _table(self, config: ModelConfig, device: torch.device, is_long: bool) -> Table:
        frequencies = rotary_frequencies(config, config.rotated_channels, device, is_long)
        cos, sin = angle_table(frequencies, self._length)
        factor = attention_factor(config)
        return (cos, sin) if factor == 1.0 else (cos.mul_(factor), sin.mul_(factor))

    def at(self, positions: Tensor, grows: bool = False) -> Tables:
        """Return cos and sin of positions (b, s) below length: (b, s, r / 2).

        grows: each token is the newest of a text, whose length chooses the factors of longrope.
        """
        tables = self.tables(positions)
        full = _rows(tables.full, positions)
        window = full if tables.window is tables.full else _rows(tables.window, positions)
        if grows and self._length > self._original:
            is_long = positions[..., None] >= self._original
            short = _rows(self.tables(positions, 1).full, positions)
            (cos, sin) = (torch.where(is_long, *both) for both in zip(full, short, strict=True))
            return Tables((cos, sin), (cos, sin) if window is full else window)
        return Tables(full, window)


def _rows(table: Table, positions: Tensor) -> Table:
    cos, sin = table
    return cos[positions], sin[positions]


def rotary_frequencies(
    model: ModelConfig, channels: int, device: torch.device, is_long: bool = False
) -> Tensor:
    """Return radians per position, (r / 2,) in fp32, for r rotated channels of a resolved model.
    is_long: with the long factors of longrope."""
    waves = wavelengths(channels, model.rotary_base, device)
    if model.rope_type == "default":
        return 1.0 / waves
    if model.rope_type == "longrope":
        factors = model.rope_long_factor if is_long else model.rope_short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32, device=device) * waves)
    assert model.rope_factor is not None
    return {"linear": _linear, "llama3": _llama3, "yarn": _yarn}[model.rope_type](
        model, waves, model.rope_factor
    )


def _linear(model: ModelConfig, waves: Tensor, factor: float) -> Tensor:
    return 1.0 / waves / factor


def _llama3(model: ModelConfig, waves: Tensor, factor: float) -> Tensor:
    length, low = model.rope_original_max_position_embeddings, model.rope_low_freq_factor
    high = model.rope_high_freq_factor
    assert length is not None and low is not None and high is not None
    frequencies = 1.0 / waves
    turn = 2 * math.pi / frequencies  # positions per turn
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
    """Return the channel pairs, fractional unless truncated, where YaRN's ramp begins and ends."""
    length, base = model.rope_original_max_position_embeddings, model.rotary_base
    assert length is not None and base is not None and model.rope_beta_fast and model.rope_beta_slow

    def pair(turns: float) -> float:
        """Return the pair that makes this many turns over the original length."""
        return (channels * math.log(length / (turns * 2 * math.pi))) / (2 * math.log(base))

    low, high = pair(model.rope_beta_fast), pair(model.rope_beta_slow)
    if model.rope_truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    return low, high + 0.001 if low == high else high  # the ramp must have a length


def attention_factor(model: ModelConfig) -> float:
    """Return the factor on cos and sin: 1 except with YaRN and LongRoPE, which sharpen attention
    scores."""
    if model.rope_type not in ("yarn", "longrope"):
        return 1.0
    if model.rope_attention_factor is not None:
        return model.rope_attention_factor
    if model.rope_type == "longrope":
        factor, original = model.rope_factor, model.rope_original_max_position_embeddings
        assert factor is not None and original is not None
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if model.rope_mscale and model.rope_mscale_all_dim:
        return _sharpness(model, model.rope_mscale) / _sharpness(model, model.rope_mscale_all_dim)
    return _sharpness(model, 1)


def _sharpness(model: ModelConfig, scale: float) -> float:
    assert model.rope_factor is not None
    return 0.1 * scale * math.log(model.rope_factor) + 1.0 if model.rope_factor > 1 else 1.0
