"""A training step as a list: when each stage computes a micro-batch, gathers its weights and reduces its gradients.

Nothing here runs anything, so tests can check the order of all collectives.

Micro-batches accumulate depth-first (forward and backward of one before the next) or breadth-first (all of them through
a stage before the next stage, which takes one gather and one reduction per stage and step even in ZeRO-3, but keeps all
their activations; Lamy-Poirier 2022, https://arxiv.org/abs/2211.05953).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Pass = tuple[Literal["forward", "backward"], int, int]  # kind, stage, micro-batch


@dataclass(frozen=True)
class StagePlan:
    """A stage, as the schedule knows it."""

    stage: int  # number in the model, which may differ from the index in a list
    weight_buffer: int
    grad_buffer: int | None  # None: nothing to train
    borrows_from: tuple[int, ...] = ()  # other stages whose parameters this one uses
    gradients_in_forward: bool = False
    backward_needs_weights: bool = True


@dataclass(frozen=True)
class Step:
    """One pass of one micro-batch through one stage, and the collectives around it.

    In order: start `gather`, wait for the weights in `needs`, take over the buffers in `accumulate`, compute, start
    `reduce`.
    """

    kind: Literal["forward", "backward"]
    stage: int
    micro_batch: int
    needs: tuple[int, ...]  # stages whose full weights the pass uses
    gather: tuple[int, ...]  # stages whose gather starts before the pass, for the pass or as a prefetch
    accumulate: tuple[int, ...]  # stages whose gradient buffers the pass writes
    reduce: tuple[tuple[int, bool], ...]  # (stage, add to its shard?) whose reduction starts after the pass


def with_backward(stages: Sequence[StagePlan]) -> list[int]:
    """Return the stages with a backward pass, in order: all from the first one with trainable parameters."""
    first = next((i for i, stage in enumerate(stages) if stage.grad_buffer is not None), len(stages))
    return [stage.stage for stage in stages[first:]]


def training_schedule(stages: Sequence[StagePlan], depth_first: int, breadth_first: int) -> list[Step]:
    """Return the steps of an iteration of depth_first groups of breadth_first micro-batches each."""
    order: list[Pass] = []
    backward_stages = with_backward(stages)[::-1]
    for depth in range(depth_first):
        micro_batches = range(depth * breadth_first, (depth + 1) * breadth_first)
        order += [("forward", plan.stage, micro) for plan in stages for micro in micro_batches]
        order += [("backward", stage, micro) for stage in backward_stages for micro in micro_batches]
    return _with_collectives(stages, order)


def evaluation_schedule(stages: Sequence[StagePlan], micro_batches: int) -> list[Step]:
    """Return the steps of forward passes only, one micro-batch after another."""
    order: list[Pass] = [("forward", plan.stage, micro) for micro in range(micro_batches) for plan in stages]
    return _with_collectives(stages, order)


def _with_collectives(plans: Sequence[StagePlan], order: Sequence[Pass]) -> list[Step]:
    stages = {plan.stage: plan for plan in plans}
    training = any(kind == "backward" for kind, _, _ in order)
    needs: list[tuple[int, ...]] = []  # stages whose weights each step uses
    writes: list[tuple[int, ...]] = []  # stages whose gradients it writes
    for kind, stage, _ in order:
        plan = stages[stage]
        uses = (stage, *plan.borrows_from)
        needs_weights = kind == "forward" or plan.backward_needs_weights
        writes_gradients = kind == "backward" or (training and plan.gradients_in_forward)
        needs.append(uses if needs_weights else ())
        writes.append(tuple(used for used in uses if writes_gradients and stages[used].grad_buffer is not None))
    gathers = _place_gathers(stages, needs)
    reduces = _place_reduces(stages, writes)
    return [
        Step(kind, stage, micro, needs[i], gathers[i], writes[i], reduces[i])
        for i, (kind, stage, micro) in enumerate(order)
    ]


def _place_gathers(stages: Mapping[int, StagePlan], needs: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Start each gather as soon as its buffer is free: right after the last step that uses the buffer's contents.

    With two buffers, a gather starts one stage ahead of its use; with one buffer, just before; with a buffer per stage,
    before the first step.
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
    stages: Mapping[int, StagePlan], writes: Sequence[tuple[int, ...]]
) -> list[tuple[tuple[int, bool], ...]]:
    """Start each reduction after the stage's last write before another stage takes its buffer or the iteration ends."""
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
