"""The order of every gather and reduction, read off the schedule without running anything."""

import dataclasses
import itertools

import pytest

from megatron_lite.zero.pipeline import (
    Durations,
    Pass,
    Pipeline,
    evaluation_passes,
    training_passes,
)
from megatron_lite.zero.schedule import StagePlan, Step, schedule


def plans(stages: int, weight_buffers: int, grad_buffers: int) -> list[StagePlan]:
    return [
        StagePlan(
            stage,
            stage % weight_buffers,
            stage % grad_buffers,
            gradients_in_forward=stage == stages - 1,
        )
        for stage in range(stages)
    ]


def training_schedule(stages: list[StagePlan], depth: int, breadth: int) -> list[Step]:
    """The steps of one pipeline rank."""
    first = next((stage.stage for stage in stages if stage.grad_buffer is not None), len(stages))
    groups = [range(group * breadth, (group + 1) * breadth) for group in range(depth)]
    pipeline, durations = Pipeline(1, (range(len(stages)),)), [Durations()] * len(stages)
    return schedule(stages, *training_passes(pipeline, "breadth_first", groups, durations, first))


def evaluation_schedule(stages: list[StagePlan], micro_batches: int) -> list[Step]:
    return schedule(stages, *evaluation_passes(Pipeline(1, (range(len(stages)),)), micro_batches))


def gathers(schedule: list[Step]) -> list[int]:
    return [stage for step in schedule for stage in step.gather]


def reduces(schedule: list[Step]) -> list[tuple[int, bool]]:
    return [reduction for step in schedule for reduction in step.reduce]


def replay(stages: list[StagePlan], schedule: list[Step]) -> None:
    """Follow the buffers through a schedule: no stage computes with, overwrites or loses another
    stage's values."""
    weights: dict[int, int] = {}
    gradients: dict[int, int] = {}
    unreduced: set[int] = set()
    shard_set: set[int] = set()
    for step in schedule:
        for stage in step.gather:
            weights[stages[stage].weight_buffer] = stage
        assert all(weights.get(stages[stage].weight_buffer) == stage for stage in step.needs)
        for stage in step.accumulate:
            buffer = stages[stage].grad_buffer
            assert gradients.get(buffer) in (None, stage), (
                "a gradient would be overwritten before it was reduced"
            )
            gradients[buffer] = stage
            unreduced.add(stage)
        for stage, again in step.reduce:
            assert gradients.pop(stages[stage].grad_buffer) == stage
            assert again == (stage in shard_set)
            shard_set.add(stage)
            unreduced.remove(stage)
    assert not unreduced and shard_set in (set(), set(range(len(stages))))


CASES = [
    (stages, weights, grads, depth, breadth)
    for stages, weights, grads in itertools.product((3, 4, 7), (1, 2, 3, 7), (1, 2, 3, 7))
    for depth, breadth in itertools.product((1, 2, 3), (1, 2))
    if weights <= stages and grads <= stages
]


def test_buffers_are_never_taken_too_early_and_counts_match_theory() -> None:
    """S + (2 depth - 1)(S - B) gathers a step; a stage reduces once, or once a micro-batch if its
    buffer is shared."""
    for case in CASES:
        stages, weights, grads, depth, breadth = case
        plan = plans(stages, weights, grads)
        schedule = training_schedule(plan, depth, breadth)
        replay(plan, schedule)
        assert len(gathers(schedule)) == stages + (2 * depth - 1) * (stages - weights), case
        per_stage = [
            sum(stage == reduced for reduced, _ in reduces(schedule)) for stage in range(stages)
        ]
        placement = [stage.grad_buffer for stage in plan]
        shared = [placement.count(buffer) > 1 for buffer in placement]
        assert per_stage == [depth if is_shared else 1 for is_shared in shared], case
        computed = [(step.kind, step.stage, step.micro_batch) for step in schedule]
        assert len(computed) == len(set(computed)) == 2 * stages * depth * breadth, case


@pytest.mark.parametrize(
    ("stages", "weights", "grads"), [(3, 1, 1), (4, 2, 2), (7, 3, 7), (7, 7, 2)]
)
@pytest.mark.parametrize("breadth", [1, 2])
def test_every_number_of_micro_batches_begins_with_the_same_gathers(
    stages: int, weights: int, grads: int, breadth: int
) -> None:
    """So that a step can start those of the next one, whose batch may have another size, or is
    evaluated."""
    plan = plans(stages, weights, grads)
    schedules = [training_schedule(plan, depth, breadth) for depth in (1, 2, 5)]
    schedules += [evaluation_schedule(plan, micro_batches) for micro_batches in (1, 3)]
    assert {schedule[0].gather for schedule in schedules} == {tuple(range(weights))}


def test_with_two_buffers_the_next_gather_starts_one_stage_ahead() -> None:
    """The gather of stage i + 1 starts before forward i and is needed only in forward i + 1;
    likewise backward."""
    schedule = training_schedule(plans(5, 2, 2), 1, 1)
    started = {
        stage: index
        for index, step in enumerate(schedule)
        if step.kind == "forward"
        for stage in step.gather
    }
    assert started == {0: 0, 1: 0, 2: 1, 3: 2, 4: 3}
    backward = [(step.stage, step.gather) for step in schedule if step.kind == "backward"]
    assert backward == [(4, ()), (3, (2,)), (2, (1,)), (1, (0,)), (0, ())]
    assert [
        (step.stage, [stage for stage, _ in step.reduce])
        for step in schedule
        if step.kind == "backward"
    ] == [(stage, [stage]) for stage in (4, 3, 2, 1, 0)]


def test_one_buffer_per_stage_gathers_everything_at_once_in_order() -> None:
    schedule = training_schedule(plans(4, 4, 4), 2, 2)
    assert schedule[0].gather == (0, 1, 2, 3) and len(gathers(schedule)) == 4
    assert reduces(schedule) == [(3, False), (2, False), (1, False), (0, False)]


def test_breadth_first_runs_all_micro_batches_through_a_stage_before_the_next() -> None:
    schedule = training_schedule(plans(3, 2, 2), 1, 2)
    passes = [("forward", stage) for stage in (0, 1, 2)] + [
        ("backward", stage) for stage in (2, 1, 0)
    ]
    computed = [(step.kind, step.stage, step.micro_batch) for step in schedule]
    assert computed == [(*one, micro_batch) for one in passes for micro_batch in (0, 1)]
    assert reduces(schedule) == [(2, False), (1, False), (0, False)]


def test_a_tied_embedding_is_gathered_once_and_reduced_once_at_the_end() -> None:
    """Its stage has its own buffers; the head needs its weights and writes its gradient in the
    forward pass."""
    plan = [
        StagePlan(0, 2, 2),
        StagePlan(1, 0, 0),
        StagePlan(2, 1, 1),
        StagePlan(3, 0, 0, (0,), gradients_in_forward=True),
    ]
    schedule = training_schedule(plan, 2, 1)
    replay(plan, schedule)
    assert gathers(schedule).count(0) == 1 and reduces(schedule).count((0, False)) == 1
    assert schedule[-1].reduce[-1] == (0, False)
    head = [step for step in schedule if step.stage == 3]
    assert all(step.needs == (3, 0) and step.accumulate == (3, 0) for step in head)


def test_a_stage_has_its_number_in_the_model() -> None:
    """The schedule of stages 3 to 6 is that of stages 0 to 3 with other numbers."""
    first = training_schedule(plans(4, 2, 2), 2, 1)
    later = [dataclasses.replace(plan, stage=plan.stage + 3) for plan in plans(4, 2, 2)]
    passes = [Pass(step.kind, step.stage + 3, step.micro_batch) for step in first]
    for own, same in zip(schedule(later, passes), first, strict=True):
        moved = [
            tuple(stage + 3 for stage in stages)
            for stages in (same.needs, same.gather, same.accumulate)
        ]
        assert (own.stage, own.needs, own.gather, own.accumulate) == (same.stage + 3, *moved)
        assert own.reduce == tuple((stage + 3, again) for stage, again in same.reduce)


def test_evaluation_only_gathers() -> None:
    schedule = evaluation_schedule(plans(4, 2, 2), 2)
    replay(plans(4, 2, 2), schedule)
    assert all(
        step.kind == "forward" and not step.accumulate and not step.reduce for step in schedule
    )
    assert len(gathers(schedule)) == 8
