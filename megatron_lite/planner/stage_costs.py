"""Measure a stage's costs by running its own passes on tensors without memory."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megatron_lite.distributed.traffic import FirstWait, Handle, Total, Traffic
from megatron_lite.model.layer import MicroBatch
from megatron_lite.optimizer.rules.muon import orthogonalize
from megatron_lite.parameter import Parameter
from megatron_lite.planner.meter import Meter, PlannedDevice, calling_frame, tensors_in
from megatron_lite.planner.speeds import Attention, Item, Pass, Product
from megatron_lite.zero.pipeline import Kind
from megatron_lite.zero.stage import Observer, Stage

Saved = Counter[str]  # bytes by the function that saves them for the backward pass


class Overlap(NamedTuple):
    """A collective, and the products and attention between its start and the wait for it."""

    kind: str
    wire_bytes: int
    items: tuple[Product | Attention, ...]


@dataclass(frozen=True)
class Cost:
    """Costs of one micro-batch's pass through a stage."""

    peak: int = 0  # peak bytes above those live at its start
    change: int = 0  # bytes live at its end minus those at its start
    largest: int = 0  # bytes of its two largest new tensors
    # over the tensor-parallel group, by kind
    traffic: Mapping[str, Total] = field(default_factory=dict)
    work: Counter[Item] = field(default_factory=Counter)
    overlaps: Counter[Overlap] = field(default_factory=Counter)


class StageCosts(NamedTuple):
    """Costs of a stage's passes, each for the first micro-batch and for one that accumulates
    gradients.

    weights: the second part of a two-part backward pass; `backward` is the first.
    """

    forward: tuple[Cost, ...]
    backward: tuple[Cost, ...]
    weights: tuple[Cost, ...]
    saved: tuple[Saved, ...]  # by layer
    cast_bytes: int  # of 8-bit weight copies

    @property
    def passes(self) -> tuple[tuple[Cost, ...], ...]:
        """All passes."""
        return self.forward, self.backward, self.weights

    def of(self, kind: Kind) -> tuple[Cost, ...]:
        """Return a pass's costs."""
        return (
            self.forward
            if kind == "forward"
            else self.weights
            if kind == "weights"
            else self.backward
        )


@dataclass
class StageMeter:
    """Runs a model's stages on the meta device as they would run on `device`."""

    device: torch.device
    traffic: Traffic

    def training(
        self,
        stage: Stage,
        micro_batch: MicroBatch,
        stream: Tensor | None,
        keeps_input: bool,
        in_parts: bool = False,
    ) -> StageCosts:
        """Run two micro-batches, one after the other.

        Args:
            stream: shaped like the stage's input; None: the first stage.
            keeps_input: the previous stage keeps this input, its output, until its own backward
                pass.
            in_parts: run backward passes in two parts.
        """
        both, layers = [], list[Saved]()
        for is_first in (True, False):
            with self._on_device() as meter:
                saved = _Saved(meter)
                self._prepare(stage, is_first)
                # a stage may add to it
                batch = dataclasses.replace(micro_batch, shared={**micro_batch.shared})
                hidden = None if stream is None else torch.empty_like(stream)
                kept = hidden if keeps_input else None
                self._begin(meter)
                stage.observer = saved
                with torch.autograd.graph.saved_tensors_hooks(saved.saves, lambda tensor: tensor):
                    hidden = stage.forward(hidden, batch, 0)
                stage.observer = None
                forward = self._end(meter)
                backward = Cost()
                weights = Cost()
                if is_first:
                    forward, cast_bytes = _without_casts(stage, forward)
                if stage.runs_backward:
                    # the loss has no gradient
                    gradient = torch.empty_like(hidden) if hidden.dim() else None
                    del hidden
                    self._begin(meter)
                    gradient = (stage.backward_input if in_parts else stage.backward)(gradient, 0)
                    backward = self._end(meter)
                    del gradient
                    if in_parts:
                        self._begin(meter)
                        stage.backward_weights(0)
                        weights = self._end(meter)
                del kept
            both.append((forward, backward, weights))
            layers = saved.layers if is_first else layers
        forward_costs, backward_costs, weights_costs = zip(*both, strict=True)
        return StageCosts(forward_costs, backward_costs, weights_costs, tuple(layers), cast_bytes)

    def evaluation(
        self, stage: Stage, micro_batch: Any, stream: Tensor | None
    ) -> tuple[Cost, Tensor]:
        """Run an evaluation; return its cost and the stage's output."""
        with self._on_device() as meter:
            self._prepare(stage)
            hidden = None if stream is None else torch.empty_like(stream)
            self._begin(meter)
            output = stage.evaluate(hidden, micro_batch)
            return _without_casts(stage, self._end(meter))[0], output

    def orthogonalization(self, rows: int, columns: int) -> Cost:
        """Run one orthogonalization step of a matrix."""
        with self._on_device() as meter:
            matrix = torch.empty(rows, columns, dtype=torch.bfloat16, device=self.device)
            self._begin(meter)
            orthogonalize(matrix, steps=1)
            return self._end(meter)

    @contextmanager
    def _on_device(self) -> Iterator[Meter]:
        """Run the code in the `with` block as on the device."""
        meter = Meter(self.device)
        with PlannedDevice(self.device, meter), meter:
            yield meter

    def _prepare(self, stage: Stage, is_first: bool = True) -> None:
        stage.gather()
        if is_first:
            stage.weights.casts.clear()
        if stage.gradients is not None:
            stage.accumulate()
        for layer in stage.layers:
            lenders = (module.parameters() for module in layer.borrows_from)
            for parameter in itertools.chain(layer.parameters(), *lenders):
                cast(Parameter, parameter).gradient_is_empty = is_first

    def _begin(self, meter: Meter) -> None:
        self.traffic.take()
        meter.restart()
        self._sent: dict[str, Total] = {}
        self._before, self._overlaps = meter.live, Counter[Overlap]()

        def record(kind: str, _: int, work: Handle) -> Handle:
            taken, start = self.traffic.take(), len(meter.items)
            self._sent = traffic_sum((self._sent, 1), (taken, meter.times))

            def wait() -> None:
                if items := meter.items[start:]:
                    self._overlaps[Overlap(kind, taken[kind].wire_bytes, tuple(items))] += 1

            return FirstWait(work, wait)

        self.traffic.recorder = record

    def _end(self, meter: Meter) -> Cost:
        self.traffic.recorder = None
        return Cost(
            peak=meter.peak - self._before,
            change=meter.live - self._before,
            largest=sum(meter.largest),
            traffic=self._sent,
            work=Counter([*meter.items, *itertools.starmap(Pass, meter.passes.items())]),
            overlaps=self._overlaps,
        )


def _without_casts(stage: Stage, cost: Cost) -> tuple[Cost, int]:
    """Return a first forward pass's cost without the 8-bit weights that it creates, and their
    bytes.

    They are kept until the next gather, like the weights in the buffer.
    """
    cast_bytes = sum(tensor.nbytes for tensor in tensors_in(stage.weights.casts.values()))
    return dataclasses.replace(
        cost, peak=cost.peak - cast_bytes, change=cost.change - cast_bytes
    ), cast_bytes


class _Saved(Observer):
    """Counts what autograd saves; each storage counts once, for the first layer that saves it."""

    def __init__(self, meter: Meter) -> None:
        self.layers: list[Saved] = []
        self._meter = meter
        self._current = Saved()
        self._counted = set[int]()

    def saves(self, tensor: Tensor) -> Tensor:
        """Count a saved tensor, unless it existed before, like weights and tokens."""
        storage = tensor.untyped_storage()
        if self._meter.has_made(storage) and storage._cdata not in self._counted:
            self._counted.add(storage._cdata)
            self._current[calling_frame().f_code.co_name.replace("_", " ")] += storage.nbytes()
        return tensor.detach()

    def layer_output(self, name: str, output: Tensor, micro_batch: int) -> None:
        """Begin another layer."""
        self.layers.append(self._current)
        self._current = Saved()


def traffic_sum(*parts: tuple[Mapping[str, Total], int]) -> dict[str, Total]:
    """Add up traffic by kind, each part multiplied by a number."""
    totals: dict[str, Total] = {}
    for traffic, times in parts:
        for kind, total in traffic.items():
            pairs = zip(
                dataclasses.astuple(totals.get(kind, Total())),
                dataclasses.astuple(total),
                strict=True,
            )
            totals[kind] = Total(*(before + times * value for before, value in pairs))
    return totals
