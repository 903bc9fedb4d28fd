"""Results of one step of --watch, and their names for the trackers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Summary(NamedTuple):
    """Statistics of all elements of a tensor, or of several together."""

    norm: float
    rms: float  # root of the mean square
    largest: float  # absolute value
    zeros: float  # share of the elements

    @classmethod
    def of(cls, squares: float, largest: float, zeros: float, numel: int) -> Summary:
        """Return the statistics of `numel` elements from their sum of squares, largest one and number of zeros."""
        return cls(math.sqrt(squares), math.sqrt(squares / numel), largest, zeros / numel)


@dataclass(frozen=True)
class Histogram:
    """Numbers of elements between fixed edges; the first and the last bin hold everything beyond theirs, too."""

    counts: Sequence[int]
    edges: Sequence[float]  # one more than counts
    squares: float  # sum over all elements

    def summary(self) -> dict[str, Any]:
        """Return the arguments of SummaryWriter.add_histogram_raw, without empty bins at both ends."""
        used = [place for place, count in enumerate(self.counts) if count] or [0]
        first, last = used[0], used[-1]
        return {
            "min": self.edges[first],
            "max": self.edges[last + 1],
            "num": sum(self.counts),
            "sum": self._sum(),
            "sum_squares": self.squares,
            "bucket_limits": list(self.edges[first + 1 : last + 2]),
            "bucket_counts": list(self.counts[first : last + 1]),
        }

    def _sum(self) -> float:
        """Return the sum as if each element was in the middle of its bin."""
        middles = ((low + high) / 2 for low, high in zip(self.edges, self.edges[1:], strict=False))
        return sum(count * middle for count, middle in zip(self.counts, middles, strict=True))


@dataclass(frozen=True)
class Watched:
    """Statistics of one iteration by target, such as `grads` or `exp_avg`, then by parameter or layer."""

    parameters: Mapping[str, Mapping[str, Summary]]
    layers: Mapping[str, Mapping[str, Summary]] = field(default_factory=dict)
    counts: Mapping[str, Mapping[str, Histogram]] = field(default_factory=dict)

    def numbers(self) -> Iterator[tuple[str, float]]:
        """Yield (tag, value): `watch/grads/norm/blocks.0.norm_1.weight`, `watch/grads/norm/layer/blocks.0`."""
        for prefix, targets in (("", self.parameters), ("layer/", self.layers)):
            for target, summaries in targets.items():
                for name, summary in summaries.items():
                    for statistic, value in summary._asdict().items():
                        yield f"watch/{target}/{statistic}/{prefix}{name}", value

    def histograms(self) -> Iterator[tuple[str, Histogram]]:
        """Yield (tag, histogram): `watch/grads/histogram/blocks.0.norm_1.weight`."""
        for target, by_name in self.counts.items():
            for name, histogram in by_name.items():
                yield f"watch/{target}/histogram/{name}", histogram
