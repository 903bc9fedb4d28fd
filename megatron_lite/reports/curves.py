"""Curves over iterations: thinned, smoothed, and as a sparkline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

UNICODE_BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"


@dataclass(frozen=True)
class Curve:
    """A metric by iteration, sorted and unique."""

    iterations: NDArray[np.int64]  # (n,), increasing
    values: NDArray[np.float64]  # (n,); NaN where the number was not finite

    def __len__(self) -> int:
        return len(self.iterations)

    def finite(self) -> Curve:
        """Return the points with a finite value."""
        keep = np.isfinite(self.values)
        return Curve(self.iterations[keep], self.values[keep])

    def thinned(self, most: int) -> Curve:
        """Return at most about `most` points of a finite curve, with its ends and the extremes of every part."""
        if len(self) <= most:
            return self
        parts = max(most // 2 - 1, 1)
        borders = np.linspace(0, len(self), parts + 1).astype(np.int64)
        keep = {0, len(self) - 1}
        for start, end in zip(borders[:-1], borders[1:], strict=True):
            keep |= {int(start + self.values[start:end].argmin()), int(start + self.values[start:end].argmax())}
        chosen = np.array(sorted(keep))
        return Curve(self.iterations[chosen], self.values[chosen])

    def smoothed(self) -> Curve:
        """Return a centred moving average over about 1/50 of a finite curve, narrower at the ends so as not to lag."""
        last, widest = len(self) - 1, len(self) // 100
        index = np.arange(len(self))
        radius = np.maximum(np.minimum(widest, np.minimum(index, last - index)), widest // 3)
        low, high = np.maximum(index - radius, 0), np.minimum(index + radius, last)
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        return Curve(self.iterations, (sums[high + 1] - sums[low]) / (high + 1 - low))


def sparkline(values: NDArray[np.float64], width: int, unicode: bool = True) -> str:
    """Draw values as at most `width` blocks, each the mean of its share; a blank has no finite value."""
    blocks = UNICODE_BLOCKS if unicode else ASCII_BLOCKS
    shares = np.array_split(values, min(width, len(values))) if len(values) else []
    means = [float(share[np.isfinite(share)].mean()) if np.isfinite(share).any() else None for share in shares]
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * len(means)
    low, high = min(known), max(known)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if mean is None else blocks[round((mean - low) * scale)] for mean in means)
