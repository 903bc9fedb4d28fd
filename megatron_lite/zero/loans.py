"""Tied weights on two pipeline ranks: the head's rank has a copy of the stage of the embedding, as if it borrowed it.

    a training step or evaluation begins   the lender's rank sends its slice of the weights, 1/N in the training dtype
    first gather of the copy               the data-parallel ranks of the head gather these slices, as of any stage
    passes of the head                     add to the gradient buffer of the copy
    after the last one                     the copy's rank sends what the head has written, before any reduction
    backward passes of the embedding       add to what has come, and the lender's ranks reduce

So a gradient sums in the order of one pipeline rank. A copy has buffers only, no part in updates, norms and files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lite.distributed.cpu_collectives import Works
from megatron_lite.distributed.pipeline_group import PipelineGroup
from megatron_lite.zero.flat_shard import FlatShard, Precision
from megatron_lite.zero.messages import Messages
from megatron_lite.zero.pipeline import Pipeline, Ties
from megatron_lite.zero.simulation import LOANS, Message
from megatron_lite.zero.stage import Layer, Stage


class BorrowedShard(FlatShard):
    """A slice of buffers, and nothing else."""

    def allocate(
        self,
        full_weights: Tensor,
        owns_weights: bool,
        full_gradients: Tensor | None,
        owns_gradients: bool,
        precision: Precision,
    ) -> None:
        """See `FlatShard`."""
        self.full_weights = self.placed = full_weights
        if full_gradients is not None:
            self.full_gradients = full_gradients

    def place_weights(self) -> None:
        """Leave this rank's slice of `placed` as it has come."""


class BorrowedStage(Stage):
    """A copy of another pipeline rank's stage. lent: names of the parameters that its borrower uses."""

    shard_type = BorrowedShard
    _coming: Works | None = None

    def __init__(self, lender: Stage, lent: frozenset[str], pipeline: PipelineGroup, owner: int, *groups: Any) -> None:
        super().__init__(lender.index, lender.layers, *groups)
        self._lent, self._pipeline, self._owner = lent, pipeline, owner

    def borrow(self) -> None:
        """Start receiving this rank's slice of the weights for a run of passes."""
        self.weights.wait()
        self.weights.holder = None
        self._coming = Works([self._pipeline.receive(own, self._owner) for own in _slices(self)])

    def gather(self) -> None:
        """Gather what has come for this run of passes; outside of one, do nothing."""
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
            super().gather()

    def reduce(self, again: bool) -> None:
        """Start sending the gradients that the borrower has written."""
        self.require_gradients()
        assert self.gradients is not None
        self.gradients.holder = None
        written = _gradients(self, self._lent)
        self.gradients.start(Works([self._pipeline.send(gradient, self._owner) for gradient in written]))

    def finish_reduction(self) -> None:
        """Wait until they are sent."""
        if self.gradients is not None:
            self.gradients.wait()


class Loans(Messages):
    """The messages of a rank that lends or borrows a stage. stages: of this rank, by number; copies included."""

    def __init__(
        self,
        group: PipelineGroup,
        first_layer: Any,
        dtype: torch.dtype,
        stages: Mapping[int, Stage],
        lent: frozenset[str],
    ) -> None:
        super().__init__(group, first_layer, dtype)
        self._stages, self._lent = stages, lent
        for stage in stages.values():
            if not isinstance(stage, BorrowedStage):  # the lender's gradients come with contributions
                stage.trained = [each for each in stage.trained if each.spec.name not in lent]

    def receive(self, message: Message, micro_batch: Any) -> None:
        """Start a transfer to this rank, or that of a loan in either direction."""
        stage: Any = self._stages.get(message.stage)
        if message.kind not in LOANS:
            super().receive(message, micro_batch)
        elif isinstance(stage, BorrowedStage):
            stage.borrow()
        elif message.kind == "lend":
            stage.gather()
            stage.require_weights()
            for own in _slices(stage):
                self.send(message, own)
        else:
            gradients = _gradients(stage, self._lent)
            stage.gradients.start(Works([self._group.receive(gradient, message.peer) for gradient in gradients]))


def borrowed_stages(
    every: Sequence[Stage], pipeline: Pipeline, ties: Ties, ranks: PipelineGroup, *groups: Any
) -> list[BorrowedStage]:
    """Return copies of the stages that this rank's stages borrow from other ranks. every: the model's stages."""
    rank_of = pipeline.rank_of
    return [
        BorrowedStage(every[lender], _lent(every[borrower].layers), ranks, rank_of[lender], *groups)
        for lender, borrower in pipeline.apart(ties)
        if rank_of[borrower] == ranks.rank
    ]


def messages_of(
    layers: Sequence[Any], dtype: torch.dtype, ranks: PipelineGroup, stages: Mapping[int, Stage], apart: Ties
) -> Messages:
    """Return the messages of a rank. apart: ties between ranks, if there are any."""
    return Loans(ranks, layers[0], dtype, stages, _lent(layers)) if apart else Messages(ranks, layers[0], dtype)


def _lent(layers: Sequence[Layer]) -> frozenset[str]:
    return frozenset(name for layer in layers for name in layer.borrowed)


def _slices(stage: Stage) -> list[Tensor]:
    """Return the slices of a stage's full weights that this rank contributes to a gather."""
    return [part.placed.view(part.group.world_size, -1)[part.group.rank] for part in stage.parts]


def _gradients(stage: Stage, lent: frozenset[str]) -> list[Tensor]:
    """Return the full gradients that a borrower writes."""
    return [parameter.main_grad for name, parameter in stage.parameters() if name in lent and parameter.requires_grad]
