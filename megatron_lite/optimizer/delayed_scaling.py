"""Delayed scales of 8-bit factors (--fp8=delayed), from the largest magnitudes of earlier
iterations.

    scale = 1 / (largest number of the format / largest magnitude of the last --amax_history_length iterations)

The scale is 1 in the first iteration and does not change while all magnitudes are 0 (Micikevicius
et al. 2022, section 4; as in Levanter). A magnitude is the maximum over all ranks and micro-batches
of an iteration, so no layout changes a scale; non-finite ones are ignored. A frozen weight's
magnitude is recorded in each iteration, though its products do not use this scale and only some
layouts round it again, so that the scale is ready when the layer is thawed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from megatron_lite.config import JsonObject
from megatron_lite.distributed.rank_group import Group
from megatron_lite.kernels.eight_bit import LARGEST, eight_bit_of
from megatron_lite.zero.stage import Stage

KINDS = 3  # input, weight, gradient


class DelayedScales:
    """The scales of all layers with 8-bit products and their amax histories, on every rank.

    stages: of all pipeline ranks. length: iterations that count. world: all ranks.
    """

    def __init__(self, stages: Sequence[Stage], length: int, world: Group) -> None:
        self._layers = layers = eight_bit_of(
            cast(Any, layer) for stage in stages for layer in stage.layers
        )
        self._world, self._iterations = world, 0
        self._scales = torch.ones(len(layers), KINDS, device=world.device)
        self._seen = torch.zeros_like(self._scales)
        self._history = self._scales.new_zeros(length, len(layers), KINDS)  # a ring of iterations
        recipe = layers[0].recipe
        numbers = (LARGEST[recipe.values], LARGEST[recipe.values], LARGEST[recipe.gradients])
        self._numbers = torch.tensor(numbers, device=world.device)
        self._changing = torch.tensor(
            [[True, not layer.frozen, True] for layer in layers], device=world.device
        )
        self._use(self._scales)

    def end_step(self, skipped: Tensor) -> None:
        """Record this iteration's magnitudes and compute the next iteration's scales."""
        seen = self._world.largest(self._seen, "scale")
        self._history[self._iterations % len(self._history)] = seen.where(
            seen.isfinite(), torch.zeros_like(seen)
        )
        self._iterations += 1
        largest = self._history.amax(dim=0)
        self._use(torch.where(largest > 0, 1.0 / (self._numbers / largest), self._scales))
        self._seen.masked_fill_(self._changing, 0.0)

    def record(self) -> JsonObject:
        """Return nothing: scales are not logged."""
        return {}

    def state(self) -> JsonObject:
        """Return scales and magnitudes by layer for a checkpoint (reads the device).

        Saves only magnitudes that may still become the largest, each with its age in iterations.
        """
        newest_first = np.roll(
            self._history.cpu().numpy()[::-1], self._iterations % len(self._history), axis=0
        )
        newer = np.maximum.accumulate(
            np.concatenate([np.zeros_like(newest_first[:1]), newest_first[:-1]])
        )
        state: JsonObject = {
            layer.name: [[scale, []] for scale in scales]
            for layer, scales in zip(self._layers, self._scales.tolist(), strict=True)
        }
        for age, place, kind in np.argwhere(newest_first > newer).tolist():
            state[self._layers[place].name][kind][1].append(
                [age, float(newest_first[age, place, kind])]
            )
        return state

    def load_state(self, state: JsonObject) -> None:
        """Restore `state`; layers missing from it start fresh."""
        self._iterations = 0
        scales, history = self._scales.tolist(), torch.zeros(self._history.shape)
        for place, layer in enumerate(self._layers):
            for kind, (scale, magnitudes) in enumerate(state.get(layer.name, ())):
                scales[place][kind] = scale
                for age, magnitude in magnitudes:
                    if age < len(history):
                        history[-1 - age, place, kind] = magnitude
        self._use(self._scales.new_tensor(scales))
        self._history.copy_(history)

    def _use(self, scales: Tensor) -> None:
        """Set the layers' scales, (layers, KINDS): a new tensor, because rounded factors keep their
        scale."""
        self._scales = scales
        for layer, own, seen in zip(self._layers, scales, self._seen, strict=True):
            layer.delayed = own, seen
