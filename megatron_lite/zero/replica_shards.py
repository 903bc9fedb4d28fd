"""Hybrid shards: ZeRO inside groups of S neighbouring data-parallel ranks, composed with ZeRO-1
across R replicas.

Every rank owns 1/N of the master weights and optimizer state, N = S R. It also stores 1/S of its
group's weights in the training dtype and of its gradients: the shards of the R ranks in its
position, concatenated. A step gathers and reduces inside the group, which may be a node, and across
replicas once:

    backward of stages i, i - 1, ...    reduce in the group, and once done across replicas, while later passes run
    update of stage i                   gather its new weights across replicas, while the next stage is updated
    gather of stage i                   wait for that; gather in the group

Both collectives across replicas work in place on contiguous memory, as the layout numbers shards s
* R + r.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from megatron_lite.distributed.cpu_collectives import Works
from megatron_lite.distributed.traffic import Handle
from megatron_lite.zero.flat_shard import BufferRange, FlatShard, Precision
from megatron_lite.zero.schedule import Step
from megatron_lite.zero.stage import Stage


class HybridShard(FlatShard):
    """A `FlatShard` whose weights and gradients are views of the range that this rank stores for
    its group."""

    def allocate(
        self, weights: BufferRange, gradients: BufferRange | None, precision: Precision
    ) -> None:
        """See `FlatShard`."""
        held_numel = self.layout.numel // self.group.world_size
        # This rank's part of its group's weights, (R * shard_numel,) in the training dtype;
        # `is_stale`: the other replicas' shards in it are out of date.
        self.held = super()._own(weights.full)
        if not weights.is_owned:
            self.held = self._zeros(weights.full.dtype, held_numel)
        self.is_stale = True
        self._gathering: Handle | None = None
        self.held_bytes = 0 if weights.is_owned else self.held.nbytes
        sums = None
        if gradients is not None:
            own = super()._own(gradients.full)
            sums = BufferRange(
                own if gradients.is_owned else self._zeros(precision.gradients, held_numel), True
            )
        super().allocate(BufferRange(self.held, True), sums, precision)
        self.full_weights = self.placed = weights.full
        if gradients is not None and sums is not None:
            self.full_gradients, self.shares_gradients = gradients
            self.own_gradients, self.sums = own, sums.full

    def place_weights(self) -> None:
        """Place this rank's part of its group's weights, or averages, in `placed`, gathering across
        replicas first."""
        placed = super()._own(self.placed)
        if self.shows_average:
            self._own(placed).copy_(self.weights.read() if self.average is None else self.average)
            self.replicate.all_gather(placed, "replica gather").wait()
            return
        if self.is_stale:
            self.start_gather()
        self.finish_gather()
        if placed.data_ptr() != self.held.data_ptr():
            placed.copy_(self.held)

    def start_gather(self) -> None:
        """Start gathering the other replicas' weights."""
        self.finish_gather()
        self.is_stale, self._gathering = (
            False,
            self.replicate.all_gather(self.held, "replica gather"),
        )

    def finish_gather(self) -> None:
        """Wait for a pending `start_gather`."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def _own(self, full: Tensor) -> Tensor:
        """Return this rank's shard within its part of the group's range (from `FlatShard._own`)."""
        return full.view(self.replicate.world_size, -1)[self.replicate.rank]


class HybridStage(Stage):
    """A `Stage` with replicas."""

    shard_type = HybridShard
    parts: tuple[HybridShard, ...]
    trainable: tuple[HybridShard, ...]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.reductions = 0  # in the group, until the last of the step
        # stages of this rank whose last reduction is in progress
        self.reduced: deque[HybridStage] = deque()
        self._reduction: Handle | None = None  # across replicas
        # a tied head without norm weights has no parts
        groups = [part.group for part in self.parts]
        on_gpu = any(group.device.type == "cuda" and group.world_size > 1 for group in groups)
        self._stream = torch.cuda.Stream() if on_gpu else None

    def gather(self) -> None:
        """See `Stage`. On a GPU, another stream waits for the replicas while this one computes."""
        if self.weights.holder != self.index:
            self.weights.wait()
            with self._aside():
                super().gather()

    def reduce(self, again: bool) -> None:
        """See `Stage`. Continue earlier stages' reductions across replicas meanwhile."""
        self._go_on()
        super().reduce(again)
        self.reductions -= 1
        if self.reductions == 0:
            self.reduced.append(self)

    def finish_reduction(self) -> None:
        """See `Stage`."""
        if self.gradients is not None:
            self._go_on()
            if self._reduction is None:
                self._reduce_across()
            assert self._reduction is not None
            self._reduction.wait()
            self._reduction = None
        super().finish_reduction()

    def begin_update(self) -> None:
        """See `Stage`."""
        super().begin_update()
        for part in self.parts:
            part.finish_gather()

    def updated(self) -> None:
        """Start gathering the updated weights across replicas."""
        for part in self.trainable:
            part.start_gather()

    def invalidate(self) -> None:
        """Gather all weights across replicas again after they changed."""
        for part in self.parts:
            part.is_stale = True

    def _go_on(self) -> None:
        while self.reduced:
            self.reduced.popleft()._reduce_across()

    def _reduce_across(self) -> None:
        assert self.gradients is not None
        self.gradients.wait()
        self._reduction = Works(
            [part.replicate.reduce_scatter(part.sums, "replica reduce") for part in self.trainable]
        )

    def _aside(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return contextlib.nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)


def begin_reductions(stages: Sequence[Stage], steps: Sequence[Step]) -> None:
    """Count the reductions of each stage in a step, so that its last one continues across replicas
    at once."""
    counts = Counter(index for step in steps for index, _ in step.reduce)
    reduced = deque[HybridStage]()
    for stage in stages:
        assert isinstance(stage, HybridStage)
        stage.reductions, stage.reduced = counts[stage.index], reduced
