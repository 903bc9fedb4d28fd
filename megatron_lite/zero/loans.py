"""Tied weights on two pipeline ranks: the head's rank has a copy of the embedding's stage.

    a run of passes begins         the lender's rank sends its slice of the weights, 1/N in the training dtype
    first gather of the copy       the borrower's ranks gather these slices, as of any stage
    passes of the head             add to the gradient buffer of the copy
    after the last one             the borrower's rank sends what they have written, before any reduction
    backward passes of the lender  add to what has come; the lender's ranks reduce the sum

Gradients are thus summed in the order of a single pipeline rank. Updates, norms and files skip
copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_lite.distributed.cpu_collectives import Works
from megatron_lite.distributed.pipeline_group import PipelineGroup
from megatron_lite.zero.flat_shard import BufferRange, FlatShard, Precision
from megatron_lite.zero.messages import Messages
from megatron_lite.zero.simulation import LOANS, Message
from megatron_lite.zero.stage import Stage


class BorrowedShard(FlatShard):
    """A shard that only slices the copy's buffers."""

    def allocate(
        self, weights: BufferRange, gradients: BufferRange | None, precision: Precision
    ) -> None:
        """See `FlatShard`."""
        self.full_weights = self.placed = weights.full
        if gradients is not None:
            self.full_gradients = gradients.full
        self.replicas = None

    def place_weights(self) -> None:
        """Do nothing: the slice of `placed` has been received."""


class BorrowedStage(Stage):
    """A copy of another pipeline rank's stage."""

    shard_type = BorrowedShard
    give_back: Callable[[], Works]

    def reduce(self, again: bool) -> None:
        """Start sending the gradients that the borrower has written."""
        self.require_gradients()
        assert self.gradients is not None
        self.gradients.holder = None
        self.gradients.start(self.give_back())


class Loans(Messages):
    """The messages of a rank in a pipeline with loans. stages: this rank's by number, copies
    included."""

    def __init__(
        self, group: PipelineGroup, layers: Any, dtype: torch.dtype, stages: Mapping[int, Stage]
    ) -> None:
        super().__init__(group, layers[0], dtype)
        self._stages, self._gradients = stages, dict[int, list[Tensor]]()
        lent = {name for layer in layers for name in layer.borrowed}
        for stage in stages.values():
            self._gradients[stage.index] = [
                each.main_grad for each in stage.trained if each.spec.name in lent
            ]
            if isinstance(stage, BorrowedStage):
                stage.weights.holder = stage.index  # gathers nothing before the weights arrive
            else:
                # `accumulate` must not reset lent gradients: the borrower's contributions arrive
                # first.
                stage.trained = [each for each in stage.trained if each.spec.name not in lent]

    def receive(self, message: Message, micro_batch: Any) -> None:
        """Start receiving a result from another rank, or a loan."""
        if message.kind not in LOANS:
            super().receive(message, micro_batch)
            return
        stage: Any = self._stages[message.stage]
        own = [part.placed.view(part.group.world_size, -1)[part.group.rank] for part in stage.parts]
        if message.kind == "return":
            stage.gradients.start(self._move(self._group.receive, message))
        elif isinstance(stage, BorrowedStage):
            stage.weights.wait()
            stage.weights.holder = None
            stage.weights.start(
                Works([self._group.receive(slice_, message.peer) for slice_ in own])
            )
            stage.give_back = functools.partial(self._move, self._group.send, message)
        else:
            stage.gather()
            stage.require_weights()
            for slice_ in own:
                self.send(message, slice_)

    def _move(self, transfer: Callable[[Tensor, int], Any], message: Message) -> Works:
        """Send or receive the gradients that a borrower adds."""
        return Works(
            [transfer(gradient, message.peer) for gradient in self._gradients[message.stage]]
        )
