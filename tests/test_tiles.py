"""Tiles of parameters against plain lists of indices: what each rank holds, in each shard, and what
two tiles share."""

import dataclasses
import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from megatron_lite.parameter import Initializer, ParameterSpec
from megatron_lite.tiles import Block, Split, Tile, overlaps
from megatron_lite.zero.layout import lay_out

ZEROS = Initializer("constant", 0.0)


def random_specs(ranks: int, seed: int, count: int = 20) -> Iterator[ParameterSpec]:
    """Yield specs as layers have them, those of rank 0."""
    draw = random.Random(seed)
    divisors = [parts for parts in range(1, ranks + 1) if ranks % parts == 0]
    for index in range(count):
        kind = draw.choice(["rows", "columns", "whole", "vocabulary", "bias"])
        shape = (draw.randint(1, 9), draw.randint(1, 9))
        split = Split(ranks, 0)
        padding = 0
        if kind in ("rows", "bias"):
            parts = [draw.choice(divisors) for _ in range(draw.randint(1, 3))]
            blocks = tuple(Block.of(some * draw.randint(1, 4), some) for some in parts)
            size = sum(block.size for block in blocks)
            shape = (size, shape[1])
            split = Split(ranks, 0, 0, blocks, sums_gradients=draw.random() < 0.5)
        elif kind == "columns":
            size = ranks * draw.randint(1, 4)
            shape = (shape[0], size)
            split = Split(ranks, 0, 1, (Block.of(size, ranks),), sums_gradients=True)
        elif kind == "vocabulary":
            rows = draw.randint(1, 6)
            size = draw.randint(rows * (ranks - 1) + 1, rows * ranks)
            shape = (size, shape[1])
            split = Split(ranks, 0, 0, (Block(size, ranks, rows),), sums_gradients=True)
            padding = 0 if ranks > 1 else rows - size
        else:
            split = Split(ranks, 0, sums_gradients=draw.random() < 0.5)
        shape = shape[:1] if kind == "bias" else shape
        yield ParameterSpec(f"{index}.{kind}", shape, ZEROS, split=split, padding_rows=padding)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_parts_make_up_the_whole(ranks: int) -> None:
    """Cut and put together again; an element has as many holders as ranks have it."""
    for spec in random_specs(ranks, ranks, 60):
        whole = torch.arange(spec.numel, dtype=torch.float32).view(spec.shape)
        together, times = torch.full_like(whole, -1.0), torch.zeros_like(whole)
        every = [spec.on(rank) for rank in range(ranks)]
        for rank, own in enumerate(every):
            assert own.split.rank == rank and own.shape == spec.shape and own.numel == spec.numel
            local = own.local(whole)
            assert local.shape == own.local_shape and local.numel() == own.local_numel
            own.place(local, together)
            back = torch.full_like(whole, -1.0)
            own.place(local, back)
            held = back >= 0
            assert torch.equal(back[held], whole[held]) and int(held.sum()) == own.local_numel
            times += held
        assert torch.equal(together, whole) and int(times.min()) >= 1, spec
        for own in every:
            for tile in own.tiles:
                assert bool((tile.view(times.view(-1)) == len(tile.holders)).all())


def indices(tile: Tile) -> list[int]:
    """Return the elements of a tile, one by one."""
    return [
        tile.first + row * tile.pitch + place
        for row in range(tile.rows)
        for place in range(tile.width)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_the_tiles_of_a_shard(ranks: int) -> None:
    """Each shard holds the elements that it should where it should; the holders are the ranks that
    have the same."""
    for spec in random_specs(ranks, 20 + ranks, 40):
        parts = [
            spec.on(rank).local(torch.arange(spec.numel).view(spec.shape)).flatten()
            for rank in range(ranks)
        ]
        owners = [set(part.tolist()) for part in parts]
        layout = lay_out([spec], 3)
        for numel in {1, 3, 64, layout.shard_numel}:
            layout = dataclasses.replace(
                layout, world_size=-(-spec.padded_numel // numel), shard_numel=numel
            )
            for rank, shard in itertools.product(range(ranks), range(layout.world_size)):
                wanted = parts[rank][shard * numel : (shard + 1) * numel].tolist()
                place, count = 0, 0
                for of_rank, tile in layout.tiles(shard, rank):
                    assert of_rank == spec.on(rank) and tile.offset == place
                    assert wanted[place : tile.end] == indices(tile)
                    assert tile.holders == tuple(
                        r for r, elements in enumerate(owners) if {*indices(tile)} <= elements
                    )
                    place, count = tile.end, count + 1
                assert place == len(wanted)
                most = 1 if ranks == 1 else 3 if spec.split.dim else max(1, len(spec.split.blocks))
                assert count <= most, "few slices in a checkpoint"


def random_tile(chance: random.Random, rows: int, pitch: int) -> Tile:
    if chance.random() < 0.4:
        first = chance.randrange(rows * pitch)
        return Tile.run(first, chance.randint(1, rows * pitch - first))
    width, top = chance.randint(1, pitch), chance.randrange(rows)
    return Tile(
        top * pitch + chance.randint(0, pitch - width), chance.randint(1, rows - top), width, pitch
    )


def test_the_elements_that_two_tiles_share() -> None:
    """Their positions in both memories are those of equal elements, each once; columns never leave
    the saved rows."""
    chance = random.Random(1)
    for _ in range(2000):
        rows, pitch = chance.randint(1, 6), chance.randint(1, 7)
        wanted, saved = (random_tile(chance, rows, pitch) for _ in range(2))
        mine, theirs = indices(wanted), indices(saved)
        found = []
        for shared in overlaps(wanted, saved):
            assert shared.is_run or 0 <= shared.column <= shared.saved.pitch - shared.saved.width
            pairs = list(zip(indices(shared.wanted), indices(shared.saved), strict=True))
            if shared.is_run:
                assert pairs == [(pairs[0][0] + i, pairs[0][1] + i) for i in range(len(pairs))]
            found += pairs
        assert sorted(found) == sorted(
            (mine.index(one), theirs.index(one)) for one in {*mine} & {*theirs}
        )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_memory_is_the_same_on_all_ranks(ranks: int) -> None:
    """Sizes in memory, and so offsets in a flat range, do not depend on the rank."""
    specs = list(random_specs(ranks, 7))
    layouts = [lay_out([spec.on(rank) for spec in specs], 3) for rank in range(ranks)]
    for layout in layouts:
        assert [slot.offset for slot in layout.slots] == [slot.offset for slot in layouts[0].slots]
        assert layout.shard_numel == layouts[0].shard_numel
        for slot, following in itertools.pairwise(layout.slots):
            assert slot.offset + slot.spec.padded_numel <= following.offset
    for spec, rank in itertools.product(specs, range(ranks)):
        assert spec.on(rank).on(0) == spec.on(0), "from any rank to any other"
        assert spec.on(rank).padded_numel == spec.padded_numel


def test_one_run_is_a_view() -> None:
    whole = torch.arange(24.0).view(6, 4)
    spec = ParameterSpec("w", (6, 4), ZEROS, split=Split(2, 1, 0, (Block.of(6, 2),)))
    assert spec.local(whole).data_ptr() == whole[3:].data_ptr()
    assert dataclasses.replace(spec, split=Split()).local(whole).data_ptr() == whole.data_ptr()
