"""--watch: statistics of gradients, weights, updates and optimizer state every few iterations, on the shards.

Each rank summarizes its slices of the parameters on its device, without elements that count on another rank. One gather
at the end of the step joins the ranks; rank 0 reads the result and sends it to the trackers. Other steps do nothing.
Results do not depend on the ZeRO stage: sums are in fp64, counts are exact.

    grads       before the update: summed over micro-batches and ranks, without the loss scale, before clipping
    params      the weights after the update
    updates     weights after minus weights before
    exp_avg...  the optimizer's state after the update, by its name

Frozen parameters have none of these. Updates need the old weights, of one stage's shard at a time, in a buffer as large
as the largest shard (4 bytes per element), which is allocated once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from megatron_lite.config import Config, TrackingConfig
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.gradient_norm import squared_norm
from megatron_lite.kernels.weight_shard import chunk_bounds
from megatron_lite.monitor.trackers.opening import Trackers
from megatron_lite.monitor.watch.results import BINS, LOWEST, SIDE, TargetTable, WatchedParameter, results
from megatron_lite.parameter import Parameter
from megatron_lite.zero.flat_shard import FlatShard
from megatron_lite.zero.multi_stage import MultiStage
from megatron_lite.zero.stage import Stage

Updated = Callable[[Stage], None]
SQUARED = "exp_avg_sq"  # optimizer state whose elements are squares
_BIAS, _EXPONENTS = 127, 256  # of fp32


def open_watch(
    config: Config, model: MultiStage, loss_scale: Tensor, distributed: Distributed, trackers: Trackers
) -> Watch | None:
    """Return what --watch asks for, or None. loss_scale: the factor on all gradients of the current step, ()."""
    if not config.tracking.watch or not model.training:
        return None
    return Watch(config.tracking, config.training.train_iters, model.stages, loss_scale, distributed, trackers)


class Watch:
    """The statistics of every `watch_interval`-th step. All ranks call `follow` at every step."""

    def __init__(
        self,
        options: TrackingConfig,
        train_iters: int,
        stages: Sequence[Stage],
        loss_scale: Tensor,
        distributed: Distributed,
        trackers: Trackers,
    ) -> None:
        self._options, self._train_iters, self._loss_scale = options, train_iters, loss_scale
        self._distributed, self._trackers = distributed, trackers
        self._stages = [stage for stage in stages if stage.trainable is not None]
        self._bins = bin_places(distributed.device) if options.watch_histograms else None
        largest = max((part.layout.shard_numel for _, part in self._parts()), default=0)
        old = largest if "updates" in options.watch else 0
        self._old = torch.empty(old, dtype=torch.float32, device=distributed.device)
        self._tables: dict[str, TargetTable] = {}

    def follow(self, iteration: int, updated: Updated) -> Updated:
        """Return the function for the optimizer to call after each stage: `updated`, with statistics in a watched step.

        Call between the gradients and the update.
        """
        if iteration % self._options.watch_interval or not self._stages:
            return updated
        self._tables = {target: self._new_table(target) for target in self._targets()}
        if "grads" in self._tables:
            for _, part in self._parts():
                self._measure("grads", part, part.grad_shard.__getitem__)
        self._keep_weights(self._stages[0])
        return partial(self._after_update, iteration, updated)

    def _after_update(self, iteration: int, updated: Updated, stage: Stage) -> None:
        """Measure a stage after its update; after the last stage, join the ranks and send."""
        updated(stage)  # first: it may start a gather, which overlaps with the rest
        part = stage.trainable
        assert part is not None
        readers: dict[str, Callable[[slice], Tensor]] = {
            "updates": partial(self._update, part),
            "params": part.weights.read,
        }
        readers |= {kind: moment.__getitem__ for kind, moment in part.moments.items()}
        for target in readers.keys() & self._tables.keys():
            self._measure(target, part, readers[target])
        place = self._stages.index(stage) + 1
        if place < len(self._stages):
            self._keep_weights(self._stages[place])
        else:
            self._send(iteration)

    # -- on the device ------------------------------------------------------------------------------------------------

    def _parts(self) -> Iterator[tuple[Stage, FlatShard]]:
        for stage in self._stages:
            assert stage.trainable is not None
            yield stage, stage.trainable

    def _targets(self) -> Iterator[str]:
        """Yield the names of the targets; `opt_state` stands for every kind of optimizer state."""
        for target in self._options.watch:
            if target == "opt_state":
                yield from dict.fromkeys(kind for _, part in self._parts() for kind in part.moments)
            else:
                yield target

    def _new_table(self, target: str) -> TargetTable:
        rows = []
        for stage, part in self._parts():
            layers = {
                cast(Parameter, parameter).spec.name: layer.name
                for layer in stage.layers
                for parameter in layer.parameters()
            }
            specs = [slot.spec for slot in part.layout.slots if part.has(target, slot.spec)]
            rows += [WatchedParameter(spec.name, layers[spec.name], spec.numel) for spec in specs]
        width = 3 if self._bins is None else 3 + BINS
        return TargetTable(rows, torch.zeros(len(rows), width, dtype=torch.float64, device=self._distributed.device))

    def _measure(self, target: str, part: FlatShard, read: Callable[[slice], Tensor]) -> None:
        """Summarize this rank's pieces of a part's parameters; `read` returns the elements of the shard in a slice."""
        table, rank = self._tables[target], self._distributed.data.rank
        for slot, start, end in part.layout.pieces(rank):
            first = slot.offset + start - rank * part.layout.shard_numel
            counted = part.counted(first, first + end - start)
            if counted and (place := table.places.get(slot.spec.name)) is not None:
                cut = (bounds for low, high in counted for bounds in chunk_bounds(table.values, low, high))
                table.values[place] = summarize(map(read, cut), target == SQUARED, self._bins)

    def _keep_weights(self, stage: Stage) -> None:
        """Copy the weights of a stage's shard before its update, if updates are watched."""
        part = stage.trainable
        if "updates" in self._tables and part is not None:
            for bounds in chunk_bounds(self._old, 0, part.layout.shard_numel):
                self._old[bounds].copy_(part.weights.read(bounds))

    def _update(self, part: FlatShard, bounds: slice) -> Tensor:
        """Return new minus old weights, in the memory of the old weights."""
        old = self._old[bounds]
        return torch.sub(part.weights.read(bounds), old, out=old)

    # -- over the ranks -----------------------------------------------------------------------------------------------

    def _send(self, iteration: int) -> None:
        """Gather the results of all ranks, and send them to the trackers of rank 0."""
        tables, self._tables = self._tables, {}
        flat = torch.cat([table.values.view(-1) for table in tables.values()])
        with self._distributed.traffic.paused():
            ranks = torch.stack(self._distributed.gather_tensors(flat))
        if self._distributed.rank != 0:
            return
        self._distributed.wait_for_device()
        of_tables = ranks.split([table.values.numel() for table in tables.values()], dim=1)
        for table, values in zip(tables.values(), of_tables, strict=True):
            table.join(values)
        scale = float(self._loss_scale)  # the optimizer adapts it later, after the last stage
        record, watched = results(tables, scale, self._options.watch_per_layer)
        head = {"phase": "watch", "iteration": iteration, "train_iters": self._train_iters}
        self._trackers.log({**head, **record}, watched)


def summarize(chunks: Iterable[Tensor], wide: bool, bins: Tensor | None) -> Tensor:
    """Return (sum of squares, largest absolute value, zeros) of flat tensors together, (3,) fp64; reads no device.

    wide: the elements are squares, whose own squares fp32 may lose. bins: from `bin_places`, to append a histogram, so
    that the result is (3 + BINS,).
    """
    squares, largest, zeros, counts = [], [], [], []
    for chunk in chunks:
        on_cpu = chunk.device.type == "cpu"
        squares.append(squared_norm([chunk]) if on_cpu and not wide else _squared_norm_fp64(chunk))
        largest.append(torch.stack(torch.aminmax(chunk)).abs().amax())
        zeros.append(chunk.numel() - torch.count_nonzero(chunk))
        if bins is not None:
            upper = (chunk.float().view(torch.int32) >> 23) & (2 * _EXPONENTS - 1)  # sign and exponent
            counts.append(torch.bincount(upper, minlength=2 * _EXPONENTS))
    parts = (torch.stack(squares).sum(), torch.stack(largest).amax(), torch.stack(zeros).sum())
    summary = torch.stack([part.double() for part in parts])
    if bins is None:
        return summary
    histogram = summary.new_zeros(BINS).index_add_(0, bins, torch.stack(counts).sum(0).double())
    return torch.cat([summary, histogram])


def _squared_norm_fp64(chunk: Tensor) -> Tensor:
    return torch.linalg.vector_norm(chunk, dtype=torch.float64).square()


def bin_places(device: torch.device) -> Tensor:
    """Return the bin of each sign and exponent, (512,) int64: infinities and NaN count as the largest numbers."""
    exponent = torch.arange(_EXPONENTS, device=device) - _BIAS
    distance = (exponent - LOWEST + 1).clamp_(0, SIDE)
    return torch.cat([SIDE + distance, SIDE - distance])
