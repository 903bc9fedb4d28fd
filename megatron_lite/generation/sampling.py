"""The next token: the most probable one, or one drawn from softmax(logits / temperature), cut by top-k and top-p.

In this order, as in transformers: temperature; then the `top_k` largest; then, of what is left, the most probable ones
until they have at least `top_p` of the probability (nucleus sampling, Holtzman et al. 2020,
https://arxiv.org/abs/1904.09751).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.errors import NumericsError


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen."""

    temperature: float = 0.0  # 0: the most probable token
    top_k: int | None = None  # None: all
    top_p: float = 1.0  # 1: all

    def probabilities(self, logits: Tensor) -> Tensor:
        """logits (v,) -> (v,) fp64 on the CPU. Only with a temperature."""
        scaled = logits.detach().cpu().double()
        scaled = (scaled - scaled.max()) / self.temperature  # the largest is 0 however cold it gets
        if self.top_k is not None and self.top_k < len(scaled):
            scaled[scaled < scaled.topk(self.top_k).values[-1]] = -math.inf
        probabilities = scaled.softmax(0)
        if self.top_p < 1.0:
            ordered, order = probabilities.sort(descending=True, stable=True)
            probabilities[order[ordered.cumsum(0) - ordered >= self.top_p]] = 0.0  # those before it are enough
            probabilities /= probabilities.sum()
        return probabilities


class Chooser:
    """Of one text: a stream of random numbers of its own.

    Raises:
        NumericsError: if a logit is infinite or NaN.
    """

    def __init__(self, choice: Choice, seed: int) -> None:
        self._choice = choice
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """One token from logits (v,), of any dtype, on any device."""
        if not math.isfinite(float(logits.abs().max())):
            raise NumericsError("the model's logits are not finite: its weights are broken, or too large for the dtype")
        if self._choice.temperature == 0.0:
            return int(logits.argmax())
        return int(torch.multinomial(self._choice.probabilities(logits), 1, generator=self._generator))
