"""The arithmetic of stages, slots, shards and buffers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.parameter import Initializer, ParameterSpec
from megatron_lite.zero.layout import ALIGNMENT, lay_out, plan_buffers, split_into_stages

shapes = st.lists(
    st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), min_size=1, max_size=12
)


@given(
    shapes=shapes,
    decays=st.lists(st.booleans(), min_size=12, max_size=12),
    world_size=st.integers(1, 9),
)
def test_every_element_lies_in_exactly_one_shard(
    shapes: list[tuple[int, ...]], decays: list[bool], world_size: int
) -> None:
    """Slots are aligned and do not overlap; the shards' pieces cover each parameter once, in
    order."""
    specs = [
        ParameterSpec(f"p{i}", shape, Initializer("constant", 0.0), weight_decay=decays[i])
        for i, shape in enumerate(shapes)
    ]
    layout = lay_out(specs, world_size)
    assert layout.numel == world_size * layout.shard_numel and layout.shard_numel % ALIGNMENT == 0
    end = 0
    for slot in layout.slots:
        assert slot.offset >= end and slot.offset % ALIGNMENT == 0
        end = slot.end
    assert end <= layout.numel
    covered: dict[str, int] = {spec.name: 0 for spec in specs}
    for rank in range(world_size):
        for slot, start, stop in layout.pieces(rank):
            assert covered[slot.spec.name] == start
            covered[slot.spec.name] = stop
    assert covered == {spec.name: math.prod(spec.shape) for spec in specs}


@given(shapes=shapes, border=st.integers(0, 12), world_size=st.integers(1, 5))
def test_update_ranges_cover_the_shard_and_agree_with_the_parameters(
    shapes: list[tuple[int, ...]], border: int, world_size: int
) -> None:
    """Each shard is cut into at most two ranges, and every parameter element lies in one of its own
    kind; or into as many as it holds parameters, and every element lies in its own parameter's.
    """
    specs = [
        ParameterSpec(f"p{i}", shape, Initializer("constant", 0.0), weight_decay=i >= border)
        for i, shape in enumerate(shapes)
    ]
    layout = lay_out(specs, world_size)
    for rank in range(world_size):
        ranges = layout.update_ranges(rank)
        assert [part.end for part in ranges][-1:] == [layout.shard_numel] and ranges[0].start == 0
        assert len(ranges) <= 2 and all(
            a.end == b.start for a, b in zip(ranges, ranges[1:], strict=False)
        )
        for slot, start, stop in layout.pieces(rank):
            low = slot.offset + start - rank * layout.shard_numel
            owner = [
                part for part in ranges if part.start <= low and low + stop - start <= part.end
            ]
            assert [part.weight_decay for part in owner] == [slot.spec.weight_decay]
        apart = layout.update_ranges(rank, separate=True)
        assert apart[0].start == 0 and apart[-1].end == layout.shard_numel
        assert all(
            a.end == b.start and a.slot < b.slot for a, b in zip(apart, apart[1:], strict=False)
        )
        places = {part.slot: (part.start, part.end, part.weight_decay) for part in apart}
        for slot, start, stop in layout.pieces(rank):
            low = slot.offset + start - rank * layout.shard_numel
            first, end, decayed = places[layout.slots.index(slot)]
            assert first == low and low + stop - start <= end and decayed == slot.spec.weight_decay


@pytest.mark.parametrize(
    ("num_layers", "layers_per_stage", "sizes"),
    [
        (4, 1.0, [1, 1, 1, 1]),
        (4, 2.0, [2, 2]),
        (5, 2.0, [2, 2, 1]),
        (6, 1.5, [1, 2, 1, 2]),
        (3, 100.0, [3]),
        (1, 1.0, [1]),
        (7, 2.5, [2, 3, 2]),
    ],
)
def test_blocks_per_stage(num_layers: int, layers_per_stage: float, sizes: list[int]) -> None:
    """Embedding and head stand alone, blocks are grouped in order, fractions alternate."""
    stages = split_into_stages(num_layers, layers_per_stage)
    assert [list(stage) for stage in (stages[0], stages[-1])] == [[0], [num_layers + 1]]
    assert [len(stage) for stage in stages[1:-1]] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(num_layers + 2))


def test_stages_share_buffers_round_robin() -> None:
    """A buffer is as large as its largest stage; more buffers than stages is one each, a tied
    embedding's its own."""
    plan = plan_buffers({2: 10, 3: 40, 4: 20, 5: 30}, num_buffers=2, keep_apart=frozenset())
    assert (
        plan.placement == {2: 0, 3: 1, 4: 0, 5: 1}
        and plan.sizes == (20, 40)
        and plan.owned == (False, False)
    )
    plan = plan_buffers({0: 50, 1: 10, 2: 10, 3: 20}, num_buffers=2, keep_apart=frozenset({0}))
    assert (
        plan.placement == {0: 2, 1: 0, 2: 1, 3: 0}
        and plan.sizes == (20, 10, 50)
        and plan.owned == (False, True, True)
    )
    plan = plan_buffers({0: 10, 1: 20}, num_buffers=9, keep_apart=frozenset())
    assert plan.placement == {0: 0, 1: 1} and plan.owned == (True, True)
