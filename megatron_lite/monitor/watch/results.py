"""From the numbers of all ranks to what the trackers get: pure arithmetic on the host."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from megatron_lite.monitor.watch.statistics import EDGES
from megatron_lite.monitor.watch.values import Histogram, Summary, Watched


class Row(NamedTuple):
    """One parameter in the table of a target."""

    name: str
    layer: str
    numel: int


@dataclass
class Table:
    """Sum of squares, largest element, zeros and perhaps a histogram of each parameter, of one target."""

    rows: list[Row]
    values: Tensor  # (rows, 3 or 3 + bins) fp64; zeros where another rank has the parameter

    def __post_init__(self) -> None:
        self.places = {row.name: place for place, row in enumerate(self.rows)}

    def join(self, of_ranks: Tensor) -> None:
        """Replace this rank's values by those of all ranks together; of_ranks: (ranks, values)."""
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


def results(tables: Mapping[str, Table], scale: float, per_layer: bool) -> tuple[dict[str, float], Watched]:
    """Return the record for metrics.jsonl, over all parameters, and the statistics of each (reads the device).

    scale: factor on the gradients. per_layer: also those of each layer.
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
