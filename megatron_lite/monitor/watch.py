"""Statistics of gradients, weights, updates and optimizer state every few iterations, on the shards
(--watch).

Each rank summarizes its slices of the parameters on its device, skipping elements that count on
another rank. One gather at the end of the step joins the ranks; rank 0 reads the result and sends
it to the trackers. Other steps do nothing. Results do not depend on the ZeRO stage: sums are in
fp64, counts are exact.

    grads       before the update: summed over micro-batches and ranks, without the loss scale, before clipping
    params      the weights after the update
    updates     weights after minus weights before
    exp_avg...  the optimizer's state after the update, by its name
    experts     loads and scores of each router: `RouterSummary`

Frozen parameters have none of these. Updates need the old weights, one stage's shard at a time, in
a buffer as large as the largest shard (4 bytes per element), allocated once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.linalg import vector_norm

from megatron_lite.config import Config, JsonObject
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.gradient_norm import squared_norm
from megatron_lite.kernels.routing import RouterSummary, summarized
from megatron_lite.kernels.weight_shard import chunk_bounds
from megatron_lite.parameter import Parameter
from megatron_lite.zero.flat_shard import FlatShard
from megatron_lite.zero.multi_stage import MultiStage
from megatron_lite.zero.stage import Stage

Updated = Callable[[Stage], None]
Log = Callable[[Mapping[str, Any], "Watched"], None]
SQUARED = "exp_avg_sq"  # optimizer state whose elements are squares
_BIAS, _EXPONENTS = 127, 256  # of fp32
# A histogram counts elements by sign and binary exponent: edges are powers of two on both sides of
# zero.
LOWEST, HIGHEST = -64, 16  # exponents of the smallest and largest edges
SIDE = HIGHEST - LOWEST  # bins on each side of the one around zero
BINS = 2 * SIDE + 1
_POWERS = tuple(2.0**exponent for exponent in range(LOWEST, HIGHEST + 1))
EDGES = (*(-power for power in reversed(_POWERS)), *_POWERS)


class Summary(NamedTuple):
    """Statistics of all elements of one or several tensors."""

    norm: float
    rms: float  # root of the mean square
    largest: float  # absolute value
    zeros: float  # share of the elements


class Histogram(NamedTuple):
    """Counts of elements between fixed edges; the first and last bins include everything beyond the
    edges."""

    counts: Sequence[int]
    edges: Sequence[float]  # one more than counts
    squares: float  # sum over all elements

    def trimmed(self) -> tuple[int, Sequence[int]]:
        """Return the index of the first used bin, and the counts from there to the last one."""
        used = [place for place, count in enumerate(self.counts) if count] or [0]
        return used[0], self.counts[used[0] : used[-1] + 1]

    def proto_fields(self) -> JsonObject:
        """Return the fields of TensorBoard's HistogramProto, without empty bins at both ends."""
        first, counts = self.trimmed()
        edges = self.edges[first : first + len(counts) + 1]
        middles = ((low + high) / 2 for low, high in itertools.pairwise(edges))
        return {
            "min": edges[0],
            "max": edges[-1],
            "num": sum(self.counts),
            # roughly
            "sum": sum(count * middle for count, middle in zip(counts, middles, strict=True)),
            "sum_squares": self.squares,
            "bucket_limit": edges[1:],
            "bucket": counts,
        }


@dataclass(frozen=True)
class Watched:
    """Statistics of one iteration by target, such as `grads` or `exp_avg`, then by parameter or
    layer."""

    parameters: Mapping[str, Mapping[str, Summary]]
    layers: Mapping[str, Mapping[str, Summary]] = field(default_factory=dict)
    counts: Mapping[str, Mapping[str, Histogram]] = field(default_factory=dict)
    routers: Mapping[str, RouterSummary] = field(default_factory=dict)

    def numbers(self) -> Iterator[tuple[str, float]]:
        """Yield (tag, value): `watch/grads/norm/blocks.0.norm_1.weight`,
        `watch/grads/norm/layer/blocks.0`."""
        for prefix, targets in (("", self.parameters), ("layer/", self.layers)):
            for target, summaries in targets.items():
                for name, summary in summaries.items():
                    for statistic, value in summary._asdict().items():
                        yield f"watch/{target}/{statistic}/{prefix}{name}", value
        for name, router in self.routers.items():
            for statistic, value in router._asdict().items():
                yield f"watch/experts/{statistic}/{name}", value

    def histograms(self) -> Iterator[tuple[str, Histogram]]:
        """Yield (tag, histogram): `watch/grads/histogram/blocks.0.norm_1.weight`."""
        for target, by_name in self.counts.items():
            for name, histogram in by_name.items():
                yield f"watch/{target}/histogram/{name}", histogram

    def as_json(self) -> JsonObject:
        """Return a line's content for watch.jsonl: statistics to six digits; null where JSON has no
        number."""
        found: JsonObject = {"statistics": Summary._fields}
        for key, targets in (("parameters", self.parameters), ("layers", self.layers)):
            for target, by_name in targets.items():
                rows = {
                    name: [_short(value) for value in summary] for name, summary in by_name.items()
                }
                found.setdefault(key, {})[target] = rows
        if self.routers:
            rows = {name: [_short(value) for value in row] for name, row in self.routers.items()}
            found["experts"] = {"statistics": RouterSummary._fields, **rows}
        for target, histograms in self.counts.items():
            edges = next(iter(histograms.values())).edges  # the same for all
            counts = {
                name: dict(zip(("first", "counts"), one.trimmed(), strict=True))
                for name, one in histograms.items()
            }
            found.setdefault("histograms", {})[target] = {"edges": edges, "counts": counts}
        return found


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


class Row(NamedTuple):
    """A parameter in a target's table."""

    place: int
    layer: str
    numel: int


@dataclass
class TargetTable:
    """Each parameter's sum of squares, largest element, zeros and optional histogram, for one
    target."""

    rows: dict[str, Row]  # by parameter name
    values: Tensor  # (rows, 3 or 3 + bins) fp64; zeros where another rank has the parameter


class Watch:
    """The statistics of every `watch_interval`-th step. All ranks call `follow` at every step.

    loss_scale: the factor on all gradients of the current step, (). routers: `Balance.sums`. log:
    `Trackers.log`.
    """

    def __init__(
        self,
        config: Config,
        model: MultiStage,
        loss_scale: Tensor,
        routers: Mapping[str, Tensor],
        distributed: Distributed,
        log: Log,
    ) -> None:
        options, self._train_iters = config.tracking, config.training.train_iters
        self._options = options
        self._loss_scale = loss_scale
        self._routers = routers if "experts" in options.watch else {}
        self._distributed = distributed
        self._log = log
        self._all_parts = {stage: stage.trainable for stage in model.all_stages if stage.trainable}
        self._parts = {
            stage: parts for stage, parts in self._all_parts.items() if stage in model.stages
        }
        self._bins = bin_places(distributed.device) if options.watch_histograms else None
        shards = [sum(part.layout.shard_numel for part in parts) for parts in self._parts.values()]
        largest = max(shards, default=0)
        old = largest if "updates" in options.watch else 0
        self._old = torch.empty(old, dtype=torch.float32, device=distributed.device)
        self._tables: dict[str, TargetTable] = {}

    def follow(self, iteration: int, updated: Updated) -> Updated:
        """Return the optimizer's callback after each stage: `updated`, with statistics in a watched
        step.

        Call between the gradients and the update.
        """
        if iteration % self._options.watch_interval or not self._all_parts:
            return updated
        self._tables = {target: self._new_table(target) for target in self._targets()}
        if not self._parts:  # other pipeline ranks have something to report
            self._send(iteration)
            return updated
        if "grads" in self._tables:
            for part in itertools.chain(*self._parts.values()):
                self._measure("grads", part, part.grad_shard.__getitem__)
        self._keep_weights(next(iter(self._parts.values())))
        return partial(self._after_update, iteration, updated)

    def _after_update(self, iteration: int, updated: Updated, stage: Stage) -> None:
        """Measure a stage after its update; after the last stage, join the ranks and send."""
        updated(stage)  # first: it may start a gather, which overlaps with the rest
        start = 0  # of the part's old weights
        for part in self._parts[stage]:
            readers: dict[str, Callable[[slice], Tensor]] = {
                "updates": partial(self._update, part, self._old[start:]),
                "params": part.weights.read,
                **{kind: moment.__getitem__ for kind, moment in part.moments.items()},
            }
            for target in readers.keys() & self._tables.keys():
                self._measure(target, part, readers[target])
            start += part.layout.shard_numel
        order = [*self._parts]
        if stage is not order[-1]:
            self._keep_weights(self._parts[order[order.index(stage) + 1]])
        else:
            self._send(iteration)

    # -- on the device
    # ------------------------------------------------------------------------------------------------

    def _targets(self) -> Iterator[str]:
        """Yield the targets' names; `opt_state` is expanded to every kind of optimizer state."""
        for target in self._options.watch:
            if target == "opt_state":
                kinds = dict.fromkeys(
                    kind
                    for part in itertools.chain(*self._all_parts.values())
                    for kind in part.kinds()
                )
                yield from (kind for kind in kinds if kind not in ("weights", "average"))
            elif target != "experts":
                yield target

    def _new_table(self, target: str) -> TargetTable:
        rows: dict[str, Row] = {}
        for stage, parts in self._all_parts.items():
            layers = {
                cast(Parameter, parameter).spec.name: layer.name
                for layer in stage.layers
                for parameter in layer.parameters()
            }
            slots = ((part, slot.spec) for part in parts for slot in part.layout.slots)
            for spec in (spec for part, spec in slots if part.has(target, spec)):
                rows[spec.name] = Row(len(rows), layers[spec.name], spec.numel)
        width = 3 if self._bins is None else 3 + BINS
        return TargetTable(
            rows,
            torch.zeros(len(rows), width, dtype=torch.float64, device=self._distributed.device),
        )

    def _measure(self, target: str, part: FlatShard, read: Callable[[slice], Tensor]) -> None:
        """Summarize this rank's pieces of a part's parameters; `read` returns a slice of the
        shard."""
        table = self._tables[target]
        for slot, start, end in part.layout.pieces(part.rank):
            first = slot.offset + start - part.layout.start(part.rank)
            counted = part.counted(first, first + end - start)
            if counted and (row := table.rows.get(slot.spec.name)) is not None:
                cut = (
                    bounds
                    for low, high in counted
                    for bounds in chunk_bounds(table.values, low, high)
                )
                table.values[row.place] = summarize(map(read, cut), target == SQUARED, self._bins)

    def _keep_weights(self, parts: Iterable[FlatShard]) -> None:
        """Copy a stage's weights before their update, if updates are watched."""
        start = 0
        for part in parts if "updates" in self._tables else ():
            old, numel = self._old[start:], part.layout.shard_numel
            for bounds in chunk_bounds(old, 0, numel):
                old[bounds].copy_(part.weights.read(bounds))
            start += numel

    def _update(self, part: FlatShard, kept: Tensor, bounds: slice) -> Tensor:
        """Return new minus old weights, in the memory of the old weights."""
        old = kept[bounds]
        return torch.sub(part.weights.read(bounds), old, out=old)

    # -- over the ranks
    # -----------------------------------------------------------------------------------------------

    def _send(self, iteration: int) -> None:
        """Gather the results of all ranks, and log them on rank 0."""
        tables, self._tables = self._tables, {}
        flat = torch.cat(
            [*(table.values.view(-1) for table in tables.values()), *self._routers.values()]
        )
        with self._distributed.traffic.paused():
            ranks = self._distributed.gathered(flat, "debug")
        if self._distributed.rank != 0:
            return
        self._distributed.wait_for_device()
        sizes = [table.values.numel() for table in tables.values()]
        *of_tables, of_routers = ranks.split([*sizes, len(flat) - sum(sizes)], dim=1)
        for table, values in zip(tables.values(), of_tables, strict=True):
            by_rank = values.view(-1, *table.values.shape)
            table.values = by_rank.sum(0)
            table.values[:, 1] = by_rank[:, :, 1].amax(0)
        scale = float(self._loss_scale)  # the optimizer adapts it later, after the last stage
        record, watched = results(tables, scale, self._options.watch_per_layer)
        if self._routers:
            sums = of_routers.sum(0).view(len(self._routers), -1).cpu()
            watched = replace(watched, routers=of_counted(self._routers, sums))
        head = {"phase": "watch", "iteration": iteration, "train_iters": self._train_iters}
        self._log({**head, **record}, watched)


def of_counted(names: Iterable[str], sums: Tensor) -> dict[str, RouterSummary]:
    """Return the summaries of those routers that counted tokens, from all ranks' `Sums.values`,
    (routers, 2 E + 3). One without a backward pass counts none, but its experts are not dead."""
    rows = zip(names, sums[:, -1].tolist(), summarized(sums).tolist(), strict=True)
    return {name: RouterSummary(*row) for name, tokens, row in rows if tokens}


def summarize(chunks: Iterable[Tensor], wide: bool, bins: Tensor | None) -> Tensor:
    """Return (sum of squares, largest absolute value, zeros) of several flat tensors, (3,) fp64;
    reads no device.

    wide: the elements are squares, whose own squares fp32 may lose. bins: from `bin_places`, to
    append a histogram, so that the result is (3 + BINS,).
    """
    squares = []
    largest = []
    zeros = []
    counts = []
    for chunk in chunks:
        on_cpu = chunk.device.type == "cpu"
        in_fp32 = on_cpu and not wide  # rows at a time
        squares.append(
            squared_norm(chunk) if in_fp32 else vector_norm(chunk, dtype=torch.float64).square()
        )
        largest.append(torch.stack(torch.aminmax(chunk)).abs().amax())
        zeros.append(chunk.numel() - torch.count_nonzero(chunk))
        if bins is not None:
            width = 2 * _EXPONENTS
            upper = (chunk.float().view(torch.int32) >> 23) & (width - 1)  # sign and exponent
            # A GPU's bincount reads its largest number on the host; a CPU has no histc for
            # integers.
            counts.append(
                torch.bincount(upper, minlength=width)
                if on_cpu
                else torch.histc(upper, width, 0, width)
            )
    parts = (torch.stack(squares).sum(), torch.stack(largest).amax(), torch.stack(zeros).sum())
    summary = torch.stack([part.double() for part in parts])
    if bins is None:
        return summary
    histogram = summary.new_zeros(BINS).index_add_(0, bins, torch.stack(counts).sum(0).double())
    return torch.cat([summary, histogram])


def bin_places(device: torch.device) -> Tensor:
    """Return the bin of each sign and exponent, (512,) int64: infinities and NaN count as the
    largest numbers."""
    exponent = torch.arange(_EXPONENTS, device=device) - _BIAS
    distance = (exponent - LOWEST + 1).clamp_(0, SIDE)
    return torch.cat([SIDE + distance, SIDE - distance])


# -- on the host
# ------------------------------------------------------------------------------------------------------


def results(
    tables: Mapping[str, TargetTable], scale: float, per_layer: bool
) -> tuple[dict[str, float], Watched]:
    """Return the record for metrics.jsonl, over all parameters, and each one's statistics (reads
    the device).

    scale: factor on the gradients. per_layer: also return each layer's statistics.
    """
    record: dict[str, float] = {}
    parameters = {}
    layers = {}
    histograms = {}
    for target, table in tables.items():
        factor = scale if target == "grads" else 1.0
        names = [*table.rows]
        rows = table.rows.values()
        numels = torch.tensor([row.numel for row in rows], dtype=torch.float64)
        values = table.values.cpu()
        values[:, 0] /= factor**2
        values[:, 1] /= factor
        (total,) = summarize_groups(values, numels, [target] * len(names)).values()
        record |= {f"{target}/{name}": value for name, value in total._asdict().items()}
        parameters[target] = summarize_groups(values, numels, names)
        if per_layer:
            layers[target] = summarize_groups(values, numels, [row.layer for row in rows])
        if values.shape[1] > 3:
            edges = [edge / factor for edge in EDGES]
            histograms[target] = {
                name: Histogram([int(count) for count in counts], edges, squares)
                for name, (squares, _, _, *counts) in zip(names, values.tolist(), strict=True)
            }
    return record, Watched(parameters, layers, histograms)


def summarize_groups(values: Tensor, numels: Tensor, groups: Sequence[str]) -> dict[str, Summary]:
    """Summarize each group of rows together. values: as in a `TargetTable`. numels: (rows,)
    fp64."""
    places = {group: place for place, group in enumerate(dict.fromkeys(groups))}
    index = torch.tensor([places[group] for group in groups])
    sums = values.new_zeros(len(places), 3).index_add_(
        0, index, torch.stack([values[:, 0], values[:, 2], numels], 1)
    )
    squares, zeros, numel = sums.unbind(1)
    # NaN, if there is one
    largest = torch.zeros_like(numel).scatter_reduce_(0, index, values[:, 1], "amax")
    columns = (squares.sqrt(), (squares / numel).sqrt(), largest, zeros / numel)
    rows = torch.stack(columns, 1).tolist()
    return {group: Summary(*row) for group, row in zip(places, rows, strict=True)}
