"""Leave samples out of training: the samples before and after them stay the same.

Source: PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1): after a spike of the loss, go
back to a checkpoint from before it and leave out the data that the run read around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron_lite.data.blending import Integers


@dataclass(frozen=True)
class Skipped:
    """Ranges of the run's order of samples that training leaves out: (first, last + 1), ascending,
    apart."""

    ranges: tuple[tuple[int, int], ...] = ()

    def joined(self, others: Iterable[tuple[int, int]]) -> Skipped:
        """Also leave out other ranges, which may overlap."""
        found: list[tuple[int, int]] = []
        for first, end in sorted((*self.ranges, *others)):
            if found and first <= found[-1][1]:
                first, end = found[-1][0], max(found.pop()[1], end)
            found.append((first, end))
        return Skipped(tuple(found))

    def positions(self, samples: Integers) -> Integers:
        """Return where the order has the samples that training reads: (k,) counts -> (k,)."""
        for first, end in self.ranges:
            samples = np.where(samples < first, samples, samples + (end - first))
        return samples

    def position(self, read: int) -> int:
        """Return where the order has the next sample once training has read this many."""
        return int(self.positions(np.array([read]))[0])

    def kept(self, end: int) -> int:
        """Return how many of the first `end` samples of the order training reads."""
        return end - sum(max(0, min(end, stop) - first) for first, stop in self.ranges)

    def __str__(self) -> str:
        return " ".join(f"{first}-{end - 1}" for first, end in self.ranges)
