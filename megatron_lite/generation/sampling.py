"""The next token: the most probable one, or a draw from softmax(logits / temperature), cut by top-k and top-p.

In this order, as in transformers: temperature; then the `top_k` largest; then the most probable of the rest until they
have at least `top_p` of its probability (nucleus sampling, Holtzman et al. 2020, https://arxiv.org/abs/1904.09751).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingOptions:
    """Temperature and cuts; by default the most probable token."""

    temperature: float = 0.0  # 0: the most probable token
    top_k: int | None = None  # None: all
    top_p: float = 1.0  # 1: all

    def probabilities(self, logits: Tensor) -> Tensor:
        """Map logits (v,) to probabilities (v,), in fp64 on the CPU; the temperature must not be 0."""
        scaled = logits.detach().cpu().double()
        scaled = (scaled - scaled.max()) / self.temperature  # the largest stays 0 at any temperature
        if self.top_k is not None and self.top_k < len(scaled):
            scaled[scaled < scaled.topk(self.top_k).values[-1]] = -math.inf
        probabilities = scaled.softmax(0)
        if self.top_p < 1.0:
            ordered, order = probabilities.sort(descending=True, stable=True)
            probabilities[order[ordered.cumsum(0) - ordered >= self.top_p]] = 0.0  # the tokens before it suffice
            probabilities /= probabilities.sum()
        return probabilities


NOT_FINITE = -1  # no token: the logits are not finite


class TokenSampler:
    """Sampler of one text, with its own stream of random numbers."""

    def __init__(self, options: SamplingOptions, seed: int) -> None:
        self._options = options
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """Sample a token from logits (v,) of any dtype on any device; NOT_FINITE if a logit is infinite or NaN."""
        if not math.isfinite(float(logits.abs().max())):
            return NOT_FINITE
        if self._options.temperature == 0.0:
            return int(logits.argmax())
        return int(torch.multinomial(self._options.probabilities(logits), 1, generator=self._generator))
