"""A rank's step as a list: its passes in order, with the collectives and messages around each.

Nothing here runs anything, so tests can check the order of all collectives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_lite.zero.pipeline import (
    Durations,
    Kind,
    Pass,
    Passes,
    Pipeline,
    Ties,
    training_passes,
)
from megatron_lite.zero.simulation import Message, Timeline, Transfers, simulate, transfers

Stages = tuple[int, ...]  # their numbers in the model


@dataclass(frozen=True)
class StagePlan:
    """A stage as the schedule sees it."""

    stage: int  # number in the model, not always the index in a list
    weight_buffer: int
    grad_buffer: int | None  # None: nothing to train
    borrows_from: Stages = ()  # other stages whose parameters this one uses
    gradients_in_forward: bool = False
    backward_needs_weights: bool = True


@dataclass(frozen=True)
class Step:
    """One pass of one micro-batch through one stage, and the collectives around it.

    In order: start `receive` and `gather`, wait for the weights in `needs`, take over the buffers
    in `accumulate`, wait for `take`, compute, start `send`, start `reduce`.
    """

    kind: Kind
    stage: int
    micro_batch: int
    needs: Stages  # stages whose full weights the pass uses
    gather: Stages  # stages whose gather starts before the pass, for the pass or as a prefetch
    accumulate: Stages  # stages whose gradient buffers the pass writes
    # (stage, add to its shard?) whose reduction starts after the pass
    reduce: tuple[tuple[int, bool], ...]
    receive: tuple[Message, ...] = ()  # transfers that start before the pass
    take: Message | None = None  # the input, from another pipeline rank
    send: Message | None = None  # the result, to another pipeline rank


def schedule(
    plans: Sequence[StagePlan], passes: Sequence[Pass], transfers: Transfers | None = None
) -> list[Step]:
    """Return the steps of a rank with these stages. transfers: with other pipeline ranks."""
    stages = {plan.stage: plan for plan in plans}
    training = any(kind != "forward" for kind, _, _ in passes)
    needs: list[Stages] = []  # stages whose weights each step uses
    writes: list[Stages] = []  # stages whose gradients each step writes
    for kind, stage, _ in passes:
        plan = stages[stage]
        uses = (stage, *plan.borrows_from)
        needs_weights = kind == "forward" or (plan.backward_needs_weights and kind != "weights")
        writes_gradients = kind != "forward" or (training and plan.gradients_in_forward)
        needs.append(uses if needs_weights else ())
        writes.append(
            tuple(
                used for used in uses if writes_gradients and stages[used].grad_buffer is not None
            )
        )
    gathers = _place_gathers(stages, needs)
    reduces = _place_reduces(stages, writes)
    steps = [
        Step(*each, needs[i], gathers[i], writes[i], reduces[i]) for i, each in enumerate(passes)
    ]
    if transfers is None:
        return steps
    return [
        replace(step, receive=i, take=t, send=o)
        for step, i, t, o in zip(steps, *transfers, strict=True)
    ]


def _place_gathers(stages: Mapping[int, StagePlan], needs: Sequence[Stages]) -> list[Stages]:
    """Start each gather as soon as its buffer is free: right after the last step that uses the
    buffer's contents.

    With two buffers, a gather starts one stage ahead of its use; with one buffer, just before; with
    a buffer per stage, before the first step.
    """
    free_from: dict[int, int] = {}  # buffer -> first step that no longer uses its contents
    holder: dict[int, int] = {}
    gathers: list[list[int]] = [[] for _ in needs]
    for i, stages_needed in enumerate(needs):
        for stage in stages_needed:
            buffer = stages[stage].weight_buffer
            if holder.get(buffer) != stage:
                gathers[free_from.get(buffer, 0)].append(stage)
                holder[buffer] = stage
            free_from[buffer] = i + 1
    return [tuple(started) for started in gathers]


def _place_reduces(
    stages: Mapping[int, StagePlan], writes: Sequence[Stages]
) -> list[tuple[tuple[int, bool], ...]]:
    """Start each reduction after the stage's last write before its buffer changes hands or the
    iteration ends."""
    reduces: list[list[tuple[int, bool]]] = [[] for _ in writes]
    last_write: dict[int, tuple[int, int]] = {}  # buffer -> (stage, step)
    reduced: set[int] = set()

    def reduce_holder(buffer: int) -> None:
        stage, step = last_write[buffer]
        reduces[step].append((stage, stage in reduced))
        reduced.add(stage)

    for i, stages_written in enumerate(writes):
        for stage in stages_written:
            buffer = stages[stage].grad_buffer
            assert buffer is not None
            if buffer in last_write and last_write[buffer][0] != stage:
                reduce_holder(buffer)
            last_write[buffer] = (stage, i)
    for buffer in sorted(last_write, key=lambda buffer: last_write[buffer][1]):
        reduce_holder(buffer)
    return [tuple(started) for started in reduces]


@dataclass(frozen=True)
class Order:
    """The order of a model's steps; see `pipeline.training_passes`."""

    pipeline: Pipeline
    schedule: str
    first_trained: int
    ties: Ties
    durations: Sequence[Durations]

    def training(self, micro_batches: int, breadth_first: int) -> Passes:
        """Return every pipeline rank's passes. breadth_first: micro-batches per group of this
        schedule."""
        size = breadth_first if self.schedule == "breadth_first" else micro_batches
        assert micro_batches % size == 0, f"{micro_batches} micro-batches, not in {size}s"
        groups = [range(first, first + size) for first in range(0, micro_batches, size)]
        return training_passes(
            self.pipeline, self.schedule, groups, self.durations, self.first_trained, self.ties
        )

    def timeline(self, passes: Sequence[Sequence[Pass]]) -> Timeline:
        """Simulate every pipeline rank's passes."""
        return simulate(passes, self.pipeline, self.durations, self.first_trained, ties=self.ties)

    def steps(
        self, rank: int, plans: Sequence[StagePlan], passes: Sequence[Sequence[Pass]]
    ) -> list[Step]:
        """Return the steps of a pipeline rank with these stages. passes: every rank's."""
        if self.pipeline.ranks == 1:
            return schedule(plans, passes[rank])
        return schedule(
            plans,
            passes[rank],
            transfers(passes, self.pipeline, self.timeline(passes), rank, self.ties),
        )
