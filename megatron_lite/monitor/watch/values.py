"""Statistics of one step of --watch, and their names for the trackers."""

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


@dataclass(frozen=True)
class Histogram:
    """Numbers of elements between fixed edges; the first and the last bin hold everything beyond theirs, too."""

    counts: Sequence[int]
    edges: Sequence[float]  # one more than counts
    squares: float  # sum over all elements

    def trimmed(self) -> tuple[int, int]:
        """Return the first bin in use, and the one after the last."""
        used = [place for place, count in enumerate(self.counts) if count] or [0]
        return used[0], used[-1] + 1

    def proto_fields(self) -> dict[str, Any]:
        """Return the fields of TensorBoard's HistogramProto, without empty bins at both ends."""
        first, end = self.trimmed()
        counts, edges = self.counts[first:end], self.edges[first : end + 1]
        middles = ((low + high) / 2 for low, high in zip(edges, edges[1:], strict=False))
        return {
            "min": edges[0],
            "max": edges[-1],
            "num": sum(self.counts),
            "sum": sum(count * middle for count, middle in zip(counts, middles, strict=True)),  # roughly
            "sum_squares": self.squares,
            "bucket_limit": edges[1:],
            "bucket": counts,
        }


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

    def as_json(self) -> dict[str, Any]:
        """Return the content of a line of watch.jsonl: statistics to six digits; null where JSON has no number."""
        found: dict[str, Any] = {"statistics": Summary._fields}
        for key, targets in (("parameters", self.parameters), ("layers", self.layers)):
            if targets:
                found[key] = {
                    target: {name: [_short(value) for value in summary] for name, summary in by_name.items()}
                    for target, by_name in targets.items()
                }
        if self.counts:
            found["histograms"] = {
                target: {
                    "edges": next(iter(by_name.values())).edges,  # the same for all
                    "counts": {name: _bins(histogram) for name, histogram in by_name.items()},
                }
                for target, by_name in self.counts.items()
            }
        return found


def _bins(histogram: Histogram) -> dict[str, Any]:
    first, end = histogram.trimmed()
    return {"first": first, "counts": histogram.counts[first:end]}


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
