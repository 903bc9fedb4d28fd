"""Batch sizes over a run and the split of a batch, compared with counting one sample at a time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.config import BatchConfig
from megatron_lite.errors import UsageError
from megatron_lite.schedules.batch_size import (
    BatchSchedule,
    Segment,
    Split,
    batch_schedule,
    once_through,
    parse_schedule,
)


@st.composite
def schedules(draw: st.DrawFn) -> BatchSchedule:
    starts = [0, *sorted(draw(st.sets(st.integers(1, 60), max_size=5)))]
    return BatchSchedule(tuple(Segment(start, draw(st.integers(1, 9))) for start in starts))


def counted(schedule: BatchSchedule, iterations: int) -> list[int]:
    """List the batch sizes of the first iterations, carried from one to the next."""
    changes = {segment.start: segment.size for segment in schedule.segments}
    sizes = []
    size = 0
    for index in range(iterations):
        size = changes.get(index, size)
        sizes.append(size)
    return sizes


@given(schedules())
@settings(max_examples=60)
def test_offsets_are_sums_of_the_sizes_before(schedule: BatchSchedule) -> None:
    """No sample is repeated or skipped, at a change of the size or elsewhere."""
    sizes = counted(schedule, 80)
    assert [schedule.batch_size(iteration) for iteration in range(1, 81)] == sizes
    assert [schedule.consumed_samples(iterations) for iterations in range(81)] == [
        sum(sizes[:n]) for n in range(81)
    ]
    assert parse_schedule(tuple(str(schedule).split())) == schedule
    assert schedule.sizes == sorted({segment.size for segment in schedule.segments})


def test_the_example_of_levanter() -> None:
    """{0: 32, 10: 64}: ten updates of 32, and the update with index 11 starts at sequence 384."""
    schedule = parse_schedule(("0:32", "10:64"))
    assert [schedule.batch_size(iteration) for iteration in (1, 10, 11, 12, 10**9)] == [
        32,
        32,
        64,
        64,
        64,
    ]
    assert schedule.consumed_samples(11) == 384
    batch = BatchConfig(batch_size_schedule=("0:32", "10:64"), sequence_length=7)
    assert batch_schedule(batch).consumed_tokens(11) == 384 * 7
    assert schedule.consumed_samples(10**15) == 320 + 64 * (10**15 - 10)  # at once


def test_a_constant_size_is_a_schedule_of_one() -> None:
    schedule = batch_schedule(BatchConfig(batch_size=12))
    assert (schedule.batch_size(1), schedule.batch_size(10**6), schedule.consumed_samples(7)) == (
        12,
        12,
        84,
    )


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ("", "write 0:<size> first"),
        ("1:32", "write 0:<size> first"),
        ("0:32 64", r"64: .*write <iteration>:<size>"),
        ("0:32 10:", "10:: write <iteration>:<size>"),
        ("0:32 10:1e3", "not an integer; write 1000"),
        ("0:0", "at least one sample"),
        ("0:8 10:-4", "at least one sample"),
        ("0:8 10:4 10:8", "10 follows 10"),
        ("0:8 10:4 5:8", "5 follows 10; sort the iterations"),
        ("0:8:9", "0:8:9: write <iteration>"),
    ],
)
def test_malformed_schedules_are_refused(items: str, message: str) -> None:
    """Every message has the flag, the item and the fix."""
    with pytest.raises(UsageError, match=message) as caught:
        parse_schedule(tuple(items.split()))
    assert str(caught.value).startswith("--batch_size_schedule=")


def test_a_batch_is_shared_out_whole() -> None:
    """Every sample belongs to one micro-batch of one rank, in order; only the last micro-batches
    are padded."""
    generator = random.Random(0)
    for _ in range(300):
        split = Split(generator.randint(1, 40), *(generator.randint(1, 5) for _ in range(3)))
        pieces = [
            split.piece(step, rank)
            for step in range(split.micro_steps)
            for rank in range(split.world_size)
        ]
        assert [first + row for first, count in pieces for row in range(count)] == list(
            range(split.samples)
        ), split
        counts = [count for _, count in pieces]
        assert (
            counts == sorted(counts, reverse=True)
            and sum(0 < n < split.micro_batch_size for n in counts) <= 1
        )
        assert split.micro_steps % split.breadth_first == 0
        assert (
            split.micro_steps - split.breadth_first
        ) * split.micro_batch_size * split.world_size < split.samples
        for step in range(split.micro_steps):
            assert split.real_samples(step) == sum(
                counts[step * split.world_size :][: split.world_size]
            )


@pytest.mark.parametrize(
    ("samples", "sizes"), [(1, [1]), (4, [4]), (5, [4, 1]), (8, [4, 4]), (11, [4, 4, 3])]
)
def test_once_through(samples: int, sizes: list[int]) -> None:
    """Full batches of 4, then the remainder."""
    schedule, iterations = once_through(samples, 4)
    assert [schedule.batch_size(iteration) for iteration in range(1, iterations + 1)] == sizes
    assert schedule.consumed_samples(iterations) == samples
