"""Mean and standard deviation of recent losses or norms, on the device.

As in Levanter (skip_step.py, clip_update_norm.py): population standard deviation, at least 1e-6,
and no threshold before half of the window is full. Unlike in Levanter, callers can skip non-finite
values; all values would look bad while the window contains one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MINIMUM_STD = 1e-6


class RollingStatistics:
    """The last `window` rows of `width` numbers.

    Costs about a dozen operations on (window, width) elements per step. The host reads nothing. The
    newest row is always last, so the sums do not depend on when a run was resumed.
    """

    def __init__(self, window: int, sigma: float, device: torch.device, width: int = 1) -> None:
        self._window, self._sigma = window, sigma
        self._needed = max(2, window // 2)
        # (window, 1 + width): 1 if the row is filled, then its values; oldest first, empty rows
        # zero.
        self._rows = torch.zeros(window, 1 + width, dtype=torch.float64, device=device)
        self._one = torch.ones(1, dtype=torch.float64, device=device)

    def threshold(self) -> Tensor:
        """Return mean + sigma * std per number, (width,) fp64; infinite until half of the window is
        full."""
        sums = self._rows.sum(0)
        count, mean = sums[:1], sums[1:] / sums[:1]
        deviations = (self._rows[:, 1:] - mean).mul_(self._rows[:, :1])
        std = torch.linalg.vector_norm(deviations, dim=0).div_(count.sqrt()).clamp_(min=MINIMUM_STD)
        return torch.where(
            count >= self._needed, torch.add(mean, std, alpha=self._sigma), torch.inf
        )

    def add(self, values: Tensor, when: Tensor) -> None:
        """Append `values`, (width,) fp64, and drop the oldest, if `when`, () bool, is true."""
        row = torch.cat([self._one, values])
        self._rows = torch.where(when, torch.cat([self._rows[1:], row[None]]), self._rows)

    def state(self) -> list[list[float]]:
        """Return the values for a checkpoint, oldest first (reads the device)."""
        rows: list[list[float]] = self._rows.tolist()
        return [values for filled, *values in rows if filled]

    def load_state(self, state: list[Any]) -> None:
        """Restore `state`; a shorter window keeps the newest values."""
        newest = state[-self._window :]
        self._rows.zero_()
        if newest:
            values = torch.tensor(newest, dtype=torch.float64, device=self._rows.device)
            self._rows[-len(newest) :, 0] = 1.0
            self._rows[-len(newest) :, 1:] = values
