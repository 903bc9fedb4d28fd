"""Copies of parameters on tensor-parallel ranks: counted once, and given the same sum of their
gradients."""

import itertools

import pytest
import torch
from torch import Tensor

from megatron_lite.parameter import Initializer, ParameterSpec
from megatron_lite.tiles import Block, Split
from megatron_lite.zero.flat_shard import ADAM_STATE, FlatShard
from megatron_lite.zero.layout import FlatLayout, lay_out
from megatron_lite.zero.replicas import Replicas, whole_parameter
from tests.support.memory_meters import Alone
from tests.support.thread_ranks import ThreadRank, on_threads

ZEROS = Initializer("constant", 0.0)


def specs_of(ranks: int, rank: int) -> list[ParameterSpec]:
    """Return parameters of every kind: split rows and columns, fewer key heads than ranks, a
    vocabulary, copies."""
    few = max(parts for parts in (1, 2) if ranks % parts == 0 and (parts < ranks or ranks == 1))
    splits: dict[str, tuple[tuple[int, ...], Split]] = {
        "word": ((5 * ranks - 2, 3), Split(ranks, 0, 0, (Block(5 * ranks - 2, ranks, 5),), True)),
        "qkv": (
            (12 * ranks + 8, 7),
            Split(
                ranks, 0, 0, (Block.of(12 * ranks, ranks), Block.of(4, few), Block.of(4, few)), True
            ),
        ),
        "qkv.bias": (
            (12 * ranks + 8,),
            Split(
                ranks, 0, 0, (Block.of(12 * ranks, ranks), Block.of(4, few), Block.of(4, few)), True
            ),
        ),
        "output": ((9, 12 * ranks), Split(ranks, 0, 1, (Block.of(12 * ranks, ranks),), True)),
        "output.bias": ((9,), Split(ranks, 0)),
        "norm": ((131,), Split(ranks, 0, sums_gradients=True)),
        "key_norm": ((4,), Split(ranks, 0, sums_gradients=True)),
        "gate.up": (
            (10 * ranks, 5),
            Split(ranks, 0, 0, (Block.of(5 * ranks, ranks), Block.of(5 * ranks, ranks)), True),
        ),
    }
    plain = [
        ParameterSpec(name, shape, ZEROS, split=split) for name, (shape, split) in splits.items()
    ]
    return [spec.on(rank) for spec in plain]


def marked(layout: FlatLayout, data_rank: int, values: dict[str, Tensor]) -> Tensor:
    """Return the shard of whole values; padding is 0."""
    flat = torch.zeros(layout.numel)
    for slot in layout.slots:
        flat[slot.offset : slot.end] = slot.spec.local(values[slot.spec.name]).reshape(-1)
    return flat.view(layout.world_size, -1)[data_rank].clone()


LAYOUTS = list(itertools.product([1, 2, 3], [1, 2, 3, 4]))


@pytest.mark.parametrize(("data", "ranks"), LAYOUTS)
def test_each_element_counts_once(data: int, ranks: int) -> None:
    """Sums over what counts on each rank are sums over whole parameters."""
    numbers = {
        spec.name: torch.rand(spec.shape).round(decimals=2) + 1 for spec in specs_of(ranks, 0)
    }
    counted: list[float] = []
    for rank, data_rank in itertools.product(range(ranks), range(data)):
        layout = lay_out(specs_of(ranks, rank), data)
        replicas = Replicas(layout, data_rank, _Named(rank, ranks))  # type: ignore[arg-type]
        shard = marked(layout, data_rank, numbers)
        counted += itertools.chain.from_iterable(
            shard[start:end].tolist() for start, end in replicas.counted
        )
    found = sorted(value for value in counted if value)
    assert found == sorted(torch.cat([value.flatten() for value in numbers.values()]).tolist())


class _Named:
    """A group that never exchanges."""

    device = torch.device("cpu")

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size


def summed(ranks: ThreadRank, data: int) -> tuple[FlatLayout, Tensor, Tensor]:
    """Return layout, and shard before and after the sum of gradients."""
    layout = lay_out(specs_of(ranks.tensor.world_size, ranks.tensor.rank), data)
    generator = torch.Generator().manual_seed(10 * ranks.rank)
    before = torch.randn(layout.shard_numel, generator=generator)
    after = before.clone()
    Replicas(layout, ranks.data.rank, ranks.tensor).sum_gradients(after)
    return layout, before, after


@pytest.mark.parametrize(("data", "ranks"), LAYOUTS)
def test_copies_get_the_sum_over_their_holders(data: int, ranks: int) -> None:
    """Element by element, in rank order, the same bits on all holders; nothing else changes."""
    found = on_threads(data, ranks, summed, data)
    for data_rank in range(data):
        group = found[data_rank * ranks : (data_rank + 1) * ranks]
        for rank, (layout, before, after) in enumerate(group):
            expected = before.clone()
            low = data_rank * layout.shard_numel
            for slot, start, end in layout.pieces(data_rank):
                if not slot.spec.split.sums_gradients:
                    continue
                for element in range(start, end):
                    holders = holders_of(slot.spec, element)
                    place = slot.offset - low + element
                    parts = torch.stack([group[holder][1][place] for holder in holders])
                    expected[place] = before[place] if len(holders) == 1 else parts.sum()
            torch.testing.assert_close(after, expected, rtol=1e-6, atol=1e-6)
            assert torch.equal(after[expected == before], before[expected == before])
            for slot, start, end in layout.pieces(data_rank):
                for element in range(start, end):
                    holders = holders_of(slot.spec, element)
                    if slot.spec.split.sums_gradients and rank == holders[0]:
                        place = slot.offset - low + element
                        assert len({float(group[holder][2][place]) for holder in holders}) == 1


def equalized(ranks: ThreadRank) -> tuple[FlatLayout, Tensor, Tensor]:
    ranks.tensor.device = torch.device("cuda")  # whose ranks may round differently
    return summed(ranks, 1)


def test_on_gpus_other_copies_are_those_of_the_first_holder() -> None:
    found = on_threads(1, 3, equalized)
    for layout, before, after in found:
        for slot, start, end in layout.pieces(0):
            place = slice(slot.offset + start, slot.offset + end)
            if slot.spec.name == "output.bias":
                assert torch.equal(after[place], found[0][1][place]) and torch.equal(
                    found[0][2][place], after[place]
                )
            elif slot.spec.name == "output":
                assert torch.equal(after[place], before[place])
            elif slot.spec.name == "norm":
                torch.testing.assert_close(after[place], sum(rank[1][place] for rank in found))


def holders_of(spec: ParameterSpec, element: int) -> tuple[int, ...]:
    """Return the ranks that have a local element of a parameter."""
    return next(tile.holders for tile in spec.tiles if tile.offset <= element < tile.end)


def assembled(ranks: ThreadRank, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters that are gathered from this rank's and other ranks' parts."""
    specs = specs_of(ranks.tensor.world_size, ranks.tensor.rank)
    return {
        spec.name: whole_parameter(spec, spec.local(values[spec.name]), ranks.tensor)
        for spec in specs
    }


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_parts_are_gathered_to_the_whole(ranks: int) -> None:
    values = {spec.name: torch.randn(spec.shape) for spec in specs_of(ranks, 0)}
    for found in on_threads(1, ranks, assembled, values):
        assert found.keys() == values.keys()
        assert all(torch.equal(found[name], value) for name, value in values.items())


def test_one_rank_has_no_copies() -> None:
    part = FlatShard(specs_of(1, 0), False, True, Alone(), ADAM_STATE)
    assert (
        part.replicas is None
        and part.counted() == [(0, part.layout.shard_numel)]
        and part.counted(3, 5) == [(3, 5)]
    )
