"""Pipeline schedules on paper: published bubbles, no deadlock, and no swap that the simulation
misses."""

import random

import pytest

from megatron_lite.config.system import PIPELINE_SCHEDULES
from megatron_lite.zero.pipeline import (
    Durations,
    Pass,
    Pipeline,
    Ties,
    needed_by,
    place,
    training_passes,
)
from megatron_lite.zero.simulation import simulate, transfers

UNIT = Durations()
NOTHING = Durations(1e-9, 1e-9, 1e-9)  # of embedding and head
# Of torch's own action lists (bubble in percent, activations in micro-batches): P, M -> schedule,
# chunks a rank.
COLUMNS = [
    *(("one_f_one_b", 1), ("breadth_first", 2), ("breadth_first", 4)),
    *(("interleaved", 2), ("interleaved", 4), ("zero_bubble_v", 2)),
]
BUBBLES = {
    (4, 8): [(37.5, 4), (18.8, 8), (9.4, 8), (18.8, 5.5), (9.4, 4.8), (6.2, 4)],
    (8, 16): [(43.8, 8), (21.9, 16), (10.9, 16), (21.9, 11.5), (10.9, 9.8), (7.3, 8)],
    (8, 32): [(21.9, 8), (10.9, 32), (5.5, 32), (10.9, 11.5), (5.5, 9.8), (3.6, 8)],
}


@pytest.mark.parametrize(("ranks", "micro_batches"), BUBBLES)
def test_bubbles_are_those_of_torchs_schedules(ranks: int, micro_batches: int) -> None:
    for (name, loops), (bubble, held) in zip(COLUMNS, BUBBLES[ranks, micro_batches], strict=True):
        assert_bubble(name, loops, ranks, micro_batches, bubble, held)


def assert_bubble(
    name: str, loops: int, ranks: int, micro_batches: int, bubble: float, held: float
) -> None:
    pipeline = place(ranks, ranks * loops + 2, name, "v" if name == "zero_bubble_v" else "loop")
    durations = [NOTHING, *[UNIT] * (ranks * loops), NOTHING]
    # The table counts chunks: no activations of embedding and head.
    passes = training_passes(pipeline, name, [range(micro_batches)], durations)
    found = simulate(passes, pipeline, durations)
    assert 100 * found.bubble == pytest.approx(bubble, abs=0.1), name
    blocks = [[each for each in own if 0 < each.stage <= ranks * loops] for own in passes]
    assert max(map(most_held, blocks)) / loops == pytest.approx(held, abs=0.06), name


def most_held(passes: list[Pass]) -> int:
    held = most = 0
    for each in passes:
        held += (each.kind == "forward") - (each.kind in ("backward", "weights"))
        most = max(most, held)
    return most


Drawn = tuple[Pipeline, int, list[Durations], list[list[Pass]], Ties]


def draw(dice: random.Random) -> Drawn:
    name = dice.choice(PIPELINE_SCHEDULES)
    placement = (
        "v"
        if name == "zero_bubble_v" or (name == "breadth_first" and dice.random() < 0.5)
        else "loop"
    )
    ranks = dice.randint(2, 5)
    stages = ranks * (2 if placement == "v" else 1) + dice.randint(0, 7)
    pipeline = place(ranks, stages + 2, name, placement, dice.choice((0.0, dice.uniform(0.1, 6.0))))
    first_trained = dice.choice((0, 0, 0, dice.randint(0, stages + 2)))
    tied = dice.random() < 0.5
    durations = [Durations(*(dice.uniform(0.1, 2.0) for _ in range(3))) for _ in range(stages + 2)]
    group, groups = dice.randint(1, 6), dice.randint(1, 2)
    ties = ((0, stages + 1),) if tied else ()
    batches = [range(i * group, (i + 1) * group) for i in range(groups)]
    passes = training_passes(pipeline, name, batches, durations, first_trained, ties)
    return pipeline, first_trained, durations, passes, ties


@pytest.mark.parametrize("count", [60, pytest.param(10_000, marks=pytest.mark.slow)])
def test_no_schedule_waits_for_ever(count: int) -> None:
    """Any sizes and durations, frozen stages, ties: each pass is computed once, and what arrives is
    taken in time.

    The order of the simulation must hold for other durations, too: real ones are never those of the
    plan.
    """
    dice = random.Random(1)
    for _ in range(count):
        pipeline, first_trained, durations, passes, ties = draw(dice)
        timeline = simulate(
            passes, pipeline, durations, first_trained, message=dice.choice((0.0, 0.3)), ties=ties
        )
        assert timeline.bubble > -1e-9
        others = [Durations(*(dice.uniform(0.01, 9.0) for _ in range(3))) for _ in durations]
        simulate(passes, pipeline, others, first_trained, ties=ties)
        own = simulate(passes, pipeline, durations, first_trained, ties=ties)
        moved = [transfers(passes, pipeline, own, rank, ties) for rank in range(pipeline.ranks)]
        replay(pipeline, passes, moved, pipeline.apart(ties))


def replay(pipeline: Pipeline, passes: list[list[Pass]], moved: list, apart: Ties) -> None:  # type: ignore[type-arg]
    """Run all ranks with transfers that begin only once both sides have started them; each send
    waits for its end.

    A borrower returns gradients after its last pass, if the lender is trained, and does not wait
    for them.
    """
    sent: dict[tuple[int, int], list] = {}  # type: ignore[type-arg]
    started: dict[tuple[int, int], list] = {}  # type: ignore[type-arg]
    place, waits = [0] * pipeline.ranks, [0] * pipeline.ranks
    posted = [-1] * pipeline.ranks
    while any(done < len(own) for done, own in zip(place, passes, strict=True)):
        progress = False
        for rank, own in enumerate(passes):
            while place[rank] < len(own):
                step = place[rank]
                if posted[rank] < step:
                    posted[rank] = step
                    for message in moved[rank].receive[step]:
                        lends = message.kind == "lend" and pipeline.rank_of[message.stage] == rank
                        some, pair = (
                            (sent, (rank, message.peer))
                            if lends
                            else (started, (message.peer, rank))
                        )
                        some.setdefault(pair, []).append(message[:3])
                    progress = True
                if any(
                    stage == own[step].stage and own[step].kind != "forward" for stage, _ in apart
                ):
                    pair = (pipeline.rank_of[apart[0][1]], rank)
                    if not all(("return", 0, 0) in some.get(pair, []) for some in (sent, started)):
                        break
                take, send = moved[rank].take[step], moved[rank].send[step]
                if waits[rank] == 0 and take is not None:
                    pair = (take.peer, rank)
                    if take[:3] not in sent.get(pair, []) or take[:3] not in started.get(pair, []):
                        break
                if waits[rank] == 0 and send is not None:
                    sent.setdefault((rank, send.peer), []).append(send[:3])
                    waits[rank] = 1
                    progress = True
                if send is not None and send[:3] not in started.get((rank, send.peer), []):
                    break  # the strictest sender: it waits until its message has arrived
                waits[rank], place[rank], progress = 0, step + 1, True
                for lender, borrower in apart:
                    owner = pipeline.rank_of[lender]
                    trained = any(
                        each.kind != "forward" and each.stage == lender for each in passes[owner]
                    )
                    if (
                        own[step].stage == borrower
                        and trained
                        and borrower not in [it.stage for it in own[step + 1 :]]
                    ):
                        sent.setdefault((rank, owner), []).append(("return", lender, 0))
        assert progress, "deadlock"
    assert sent == started, "a pair's messages arrive in another order than they are sent"


def test_every_wrong_order_is_found() -> None:
    """Two passes of a rank that depend on each other, or are of the same stage and kind, swapped:
    200 times."""
    dice, found = random.Random(2), 0
    while found < 200:
        pipeline, first_trained, durations, passes, ties = draw(dice)
        rank = dice.randrange(pipeline.ranks)
        first, second = (
            sorted(dice.choices(range(len(passes[rank])), k=2)) if passes[rank] else (0, 0)
        )
        if first == second:
            continue
        one, other = passes[rank][first], passes[rank][second]
        result = one._replace(kind="input") if one.kind == "backward" else one
        if (one.kind, one.stage) != (other.kind, other.stage) and result not in [
            *needed_by(other, 99)
        ]:
            continue
        passes[rank][first], passes[rank][second] = other, one
        with pytest.raises(AssertionError):
            simulate(passes, pipeline, durations, first_trained, ties=ties)
        found += 1


def test_an_embedding_waits_for_the_head_on_another_rank() -> None:
    """Without the tie its backward passes come at once, which the simulation of a tied model
    refuses."""
    pipeline, durations = place(2, 6, "one_f_one_b", "loop"), [UNIT] * 6
    ties = ((0, 5),)
    untied, tied = (
        training_passes(pipeline, "one_f_one_b", [range(4)], durations, 0, some)
        for some in ((), ties)
    )
    assert tied[0][-4:] == [Pass("backward", 0, micro_batch) for micro_batch in range(4)]
    simulate(untied, pipeline, durations)
    with pytest.raises(AssertionError, match="waits for ever before .*backward"):
        simulate(untied, pipeline, durations, ties=ties)


def test_the_rank_of_the_head_has_fewer_blocks() -> None:
    """With one loop a rank that could give a block away has at most one more than others; steps get
    shorter."""
    dice, ratios = random.Random(2), []
    for name, placement in (("one_f_one_b", "loop"), ("zero_bubble_v", "v")) * 6:
        ranks = dice.randint(2, 5)
        blocks = dice.randint(12, 30)
        head = dice.uniform(0.5, 6.0)
        even, pipeline = (place(ranks, blocks + 2, name, placement, it) for it in (0.0, head))
        assert [stage for chunk in pipeline.chunks for stage in chunk] == [*range(blocks + 2)]
        durations = [NOTHING, *[UNIT] * blocks, Durations(head, head, head)]
        groups, chunks = [range(4 * ranks)], len(pipeline.chunks) // ranks
        of_blocks = [len({*pipeline.stages_of(rank)} - {0, blocks + 1}) for rank in range(ranks)]
        work = [
            count + head * (blocks + 1 in pipeline.stages_of(rank))
            for rank, count in enumerate(of_blocks)
        ]
        assert all(
            of <= min(work) + 1 for of, count in zip(work, of_blocks, strict=True) if count > chunks
        )
        both = [
            simulate(training_passes(it, name, groups, durations), it, durations).duration
            for it in (even, pipeline)
        ]
        ratios.append(both[1] / both[0])
    assert max(ratios) <= 1.01 and sorted(ratios)[len(ratios) // 2] < 0.9, sorted(ratios)


def test_breadth_first_gathers_and_reduces_once_a_stage() -> None:
    """ZeRO-3 with two weight buffers, 8 stages a rank, P = 4, M = 16: 14 gathers a step, and many
    more interleaved."""
    from megatron_lite.zero.schedule import StagePlan, schedule

    gathers = {}
    for name in ("breadth_first", "interleaved"):
        pipeline = place(4, 34, name, "loop")
        durations = [NOTHING, *[UNIT] * 32, NOTHING]
        passes = training_passes(pipeline, name, [range(16)], durations)
        blocks = [each for each in passes[1] if 0 < each.stage < 33]
        plans = [StagePlan(stage, i % 2, i % 2) for i, stage in enumerate(pipeline.stages_of(1))]
        steps = schedule(plans, blocks)
        gathers[name] = sum(len(step.gather) for step in steps)
    assert gathers["breadth_first"] == 14 and gathers["interleaved"] > 50
