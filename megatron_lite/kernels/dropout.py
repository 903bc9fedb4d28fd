"""Dropout from an explicit seed: the same mask for the same seed, whatever ran before."""

from __future__ import annotations

import torch
from torch import Tensor


def dropout(input_: Tensor, p: float, seed: int | None) -> Tensor:
    """Zero each element with probability p, scale the rest by 1 / (1 - p). No seed: evaluation, nothing is dropped."""
    if p == 0.0 or seed is None:
        return input_
    generator = torch.Generator(device=input_.device).manual_seed(seed)
    mask = torch.empty_like(input_).bernoulli_(1.0 - p, generator=generator)
    return input_ * mask.div_(1.0 - p)
