"""Statistics of one step of --watch: joined over the ranks, and named for the trackers. Pure arithmetic on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

# A histogram counts elements by sign and binary exponent: edges are powers of two on both sides of zero.
LOWEST, HIGHEST = -64, 16  # exponents of the smallest and largest edges
SIDE = HIGHEST - LOWEST  # bins on each side of the one around zero
BINS = 2 * SIDE + 1
EDGES = (
    *(-(2.0**power) for power in range(HIGHEST, LOWEST - 1, -1)),
    *(2.0**power for power in range(LOWEST, HIGHEST + 1)),
)


class Summary(NamedTuple):
    """Statistics of all elements of a tensor, or of several together."""

    norm: float
    rms: float  # root of the mean square
    largest: float  # absolute value
    zeros: float  # share of the elements


@dataclass(frozen=True)
class Histogram:
    """Numbers of elements between fixed edges; the first and last bins include everything beyond the edges."""

    counts: Sequence[int]
    edges: Sequence[float]  # one more than counts
    squares: float  # sum over all elements

    def trimmed(self) -> tuple[int, Sequence[int]]:
        """Return the first bin in use, and the counts from there to the last bin in use."""
        used = [place for place, count in enumerate(self.counts) if count] or [0]
        return used[0], self.counts[used[0] : used[-1] + 1]

    def proto_fields(self) -> dict[str, Any]:
        """Return the fields of TensorBoard's HistogramProto, without empty bins at both ends."""
        first, counts = self.trimmed()
        edges = self.edges[first : first + len(counts) + 1]
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
                    "counts": {
                        name: dict(zip(("first", "counts"), histogram.trimmed(), strict=True))
                        for name, histogram in by_name.items()
                    },
                }
                for target, by_name in self.counts.items()
            }
        return found


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


class WatchedParameter(NamedTuple):
    """One parameter, a row in the table of a target."""

    name: str
    layer: str
    numel: int


@dataclass
class TargetTable:
    """Sum of squares, largest element, zeros and optionally a histogram of each parameter of a target."""

    rows: list[WatchedParameter]
    values: Tensor  # (rows, 3 or 3 + bins) fp64; zeros where another rank has the parameter

    def __post_init__(self) -> None:
        self.places = {row.name: place for place, row in enumerate(self.rows)}

    def join(self, of_ranks: Tensor) -> None:
        """Replace this rank's values by the totals of all ranks; of_ranks: (ranks, values)."""
        of_ranks = of_ranks.view(-1, *self.values.shape)
        self.values = of_ranks.sum(0)
        self.values[:, 1] = of_ranks[:, :, 1].amax(0)


class _Sums(NamedTuple):
    squares: float
    largest: float
    zeros: float
    numel: int

    def summary(self) -> Summary:
        rms = math.sqrt(self.squares / self.numel)
        return Summary(math.sqrt(self.squares), rms, self.largest, self.zeros / self.numel)


def results(tables: Mapping[str, TargetTable], scale: float, per_layer: bool) -> tuple[dict[str, float], Watched]:
    """Return the record for metrics.jsonl, over all parameters, and the statistics of each (reads the device).

    scale: factor on the gradients. per_layer: also the statistics of each layer.
    """
    record: dict[str, float] = {}
    parameters, layers, histograms = {}, {}, {}
    for target, table in tables.items():
        factor = scale if target == "grads" else 1.0
        lists = table.values.tolist()
        sums = [
            _Sums(squares / factor**2, largest / factor, zeros, row.numel)
            for row, (squares, largest, zeros, *_) in zip(table.rows, lists, strict=True)
        ]
        record |= {f"{target}/{name}": value for name, value in _together(sums).summary()._asdict().items()}
        parameters[target] = {row.name: own.summary() for row, own in zip(table.rows, sums, strict=True)}
        if per_layer:
            of_layers: dict[str, list[_Sums]] = {}
            for row, own in zip(table.rows, sums, strict=True):
                of_layers.setdefault(row.layer, []).append(own)
            layers[target] = {name: _together(some).summary() for name, some in of_layers.items()}
        if len(lists[0]) > 3:
            edges = [edge / factor for edge in EDGES]
            histograms[target] = {
                row.name: Histogram([int(count) for count in values[3:]], edges, own.squares)
                for row, own, values in zip(table.rows, sums, lists, strict=True)
            }
    return record, Watched(parameters, layers, histograms)


def _together(parts: Iterable[_Sums]) -> _Sums:
    squares, largest, zeros, numels = zip(*parts, strict=True)
    worst = math.nan if any(map(math.isnan, largest)) else max(largest)
    return _Sums(sum(squares), worst, sum(zeros), sum(numels))
