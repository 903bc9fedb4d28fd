"""The full-stage buffers of a model (how many, used by which stages) and a table of all memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_lite.config import MultiStageConfig
from megatron_lite.distributed.rank_group import Group
from megatron_lite.errors import UsageError
from megatron_lite.zero.flat_shard import FlatShard, Precision
from megatron_lite.zero.layout import BufferPlan, plan_buffers
from megatron_lite.zero.pipeline import Ties
from megatron_lite.zero.replica_shards import HybridShard
from megatron_lite.zero.schedule import StagePlan
from megatron_lite.zero.stage import Buffer, Stage


@dataclass(frozen=True)
class MemoryRow:
    """One kind of memory on this rank."""

    kind: str
    count: int
    bytes: int


class Memory:
    """The buffers and shards of all stages.

    averaged: also allocate running averages of the trainable weights. breadth_first: the schedule
    computes a stage's micro-batches in a row; otherwise each stage keeps its own gradient buffer,
    or it would have to reduce every micro-batch's gradient.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        config: MultiStageConfig,
        precision: Precision,
        group: Group,
        averaged: bool,
        breadth_first: bool,
        ties: Ties,
    ) -> None:
        self.stages = stages
        self._precision = precision
        self._group = group
        self._replicate = stages[0].parts[0].replicate
        tied = frozenset(lender for lender, _ in ties)
        weight_count, grad_count = self._counts(config, breadth_first)
        weight_plan = plan_buffers(
            {stage.index: stage.numel for stage in stages}, weight_count, tied, every=True
        )
        grad_plan = plan_buffers(
            {stage.index: stage.grad_numel for stage in stages}, grad_count, tied
        )
        # A single rank never gathers ahead; several ranks fill or send one buffer while using the
        # other.
        ahead, updates_ahead = (
            min(size, 2) for size in (group.world_size, stages[0].world.world_size)
        )
        update_plan = plan_buffers(
            {stage.index: stage.update_numel for stage in stages}, updates_ahead, frozenset()
        )
        self.weights = self._buffers(weight_plan, precision.training)
        self.gradients = self._buffers(grad_plan, precision.gradients)
        # Muon rounds to bf16 before orthogonalizing
        self.updates = self._buffers(update_plan, torch.bfloat16)
        for stage in stages:
            update, gradients = (
                plan.placement.get(stage.index) for plan in (update_plan, grad_plan)
            )
            stage.update_buffer = None if update is None else self.updates[update]
            weights = weight_plan.placement[stage.index]
            sums = None if gradients is None else self.gradients[gradients]
            stage.allocate(self.weights[weights], sums, precision)
        self.plans = [self._plan(stage, weight_plan, grad_plan) for stage in stages]
        self.averages: list[Buffer] = []
        self.average_plans: list[StagePlan] = []
        if averaged:
            # Shared by all stages at every ZeRO stage. Allocated now, so that validation cannot run
            # out of memory.
            average_plan = plan_buffers(
                {stage.index: stage.numel for stage in stages}, ahead, tied, every=True
            )
            self.averages = self._buffers(average_plan, precision.training)
            self.average_plans = [self._plan(stage, average_plan, grad_plan) for stage in stages]

    def register(self) -> None:
        """Exchange the addresses of buffers in symmetric memory. Collective.

        Raises:
            UsageError: if NCCL refuses.
        """
        for buffer in (*self.weights, *self.gradients, *self.updates, *self.averages):
            if self._group.symmetric_memory and buffer.data.numel():
                try:
                    self._group.symmetric_memory.rendezvous(
                        buffer.data, self._group.group.group_name
                    )
                except RuntimeError as error:
                    reason = str(error).splitlines()[0]
                    raise UsageError(
                        f"--symmetric_memory=1: NCCL refuses a buffer ({reason}); leave it out"
                    ) from error

    def table(self) -> list[MemoryRow]:
        """Return this rank's memory by kind; a shard that is a view of a buffer counts as
        buffer."""
        parts = [part for stage in self.stages for part in stage.parts if part.has_memory]
        trained, frozen = [p for p in parts if not p.frozen], [p for p in parts if p.frozen]
        stateful = [part for part in parts if part.has_state]
        largest: dict[Group, int] = {}
        for part in stateful:
            largest[part.group] = max(largest.get(part.group, 0), part.layout.shard_numel)
        replicate, dtype = self._replicate, self._precision.gradients
        scratch = replicate.reduction_scratch_bytes(max(largest.values(), default=0), dtype)
        for group, numel in largest.items():
            scratch += group.reduction_scratch_bytes(replicate.world_size * numel, dtype)
        trained_kind = "weight remainders" if self._precision.split_master else "weight shards"
        sizes = {
            trained_kind: [_weight_bytes(part) for part in trained],
            "frozen weight shards": [_weight_bytes(part) for part in frozen],
            "gradient shards": [
                0 if part.shares_gradients else part.sums.nbytes for part in stateful
            ],
            "optimizer moments": [
                moment.nbytes for part in stateful for moment in part.moments.values()
            ],
            "averages": [0 if part.average is None else part.average.nbytes for part in parts],
            "weight buffers": [buffer.data.nbytes for buffer in self.weights],
            "gradient buffers": [buffer.data.nbytes for buffer in self.gradients],
            "average buffers": [buffer.data.nbytes for buffer in self.averages],
            "update buffers": [buffer.data.nbytes for buffer in self.updates],
            "communication scratch": [scratch],
        }
        return [
            MemoryRow(kind, sum(size > 0 for size in every), sum(every))
            for kind, every in sizes.items()
        ]

    def buffer_counts(self) -> tuple[int, int]:
        """Return the numbers of weight buffers and gradient buffers."""
        return sum(buffer.data.numel() > 0 for buffer in self.weights), len(self.gradients)

    def _counts(self, config: MultiStageConfig, breadth_first: bool) -> tuple[int, int]:
        """Return the numbers of weight and gradient buffers: explicit counts override the ZeRO
        stage."""
        every, alone = len(self.stages), self._group.world_size == 1
        zero_stage = config.zero_stage or 1
        assert zero_stage != "auto", "resolved before"
        weights = config.num_weight_buffers or (2 if zero_stage == 3 else every)
        gradients = config.num_grad_buffers or (2 if zero_stage >= 2 and breadth_first else every)
        # On a single rank the shard is the full tensor: in the buffers' dtype, which replicas store
        # anyway, a buffer per stage costs nothing.
        if alone and (self._precision.training == torch.float32 or self._replicate.world_size > 1):
            weights = every
        return weights, every if alone else gradients

    def _buffers(self, plan: BufferPlan, dtype: torch.dtype) -> list[Buffer]:
        library = self._group.symmetric_memory or torch
        return [
            Buffer(
                (library if size else torch)
                .empty(size, dtype=dtype, device=self._group.device)
                .zero_(),
                is_owned,
            )
            for size, is_owned in zip(plan.sizes, plan.owned, strict=True)
        ]

    def _plan(self, stage: Stage, weight_plan: BufferPlan, grad_plan: BufferPlan) -> StagePlan:
        return StagePlan(
            stage=stage.index,
            weight_buffer=weight_plan.placement[stage.index],
            grad_buffer=grad_plan.placement.get(stage.index),
            borrows_from=lenders(stage, self.stages),
            gradients_in_forward=any(layer.gradients_in_forward for layer in stage.layers),
            backward_needs_weights=stage.backward_needs_weights,
        )


def _weight_bytes(part: FlatShard) -> int:
    """Return the bytes of weights stored outside the weight buffer."""
    held = part.held_bytes if isinstance(part, HybridShard) else 0
    return held + (0 if part.shares_weights else part.weights.nbytes)


def lenders(stage: Stage, stages: Sequence[Stage]) -> tuple[int, ...]:
    """Return the other stages whose parameters this one uses."""
    borrowed = [lender for layer in stage.layers for lender in layer.borrows_from]
    return tuple(
        other.index
        for other in stages
        if other is not stage
        and any(layer is lender for layer in other.layers for lender in borrowed)
    )
