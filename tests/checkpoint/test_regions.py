"""Regions of parameters against plain lists of indices: of a rank's part, of what two regions share."""

from __future__ import annotations

import random

import pytest
import torch

from megatron_lite.checkpoint.regions import Region, held, overlaps, row_numel
from megatron_lite.parameter import Block, Initializer, ParameterSpec, Split

ZERO = Initializer("constant", 0.0)


def indices(region: Region, pitch: int) -> list[int]:
    """The elements of a region, one by one."""
    return [
        region.first + row * pitch + place for row in range(region.numel // region.run) for place in range(region.run)
    ]


def split_specs() -> list[ParameterSpec]:
    """Parameters on the first of 1, 2 or 4 ranks: whole, rows in blocks of which ranks share parts, padded, columns."""
    specs = []
    for ranks in (1, 2, 4):
        shared = (Block.of(8, ranks), Block.of(4, min(ranks, 2)), Block.of(2, 1))
        for shape, dim, blocks in [
            ((14, 3), 0, ()),
            ((14, 3), 0, shared),
            ((14,), 0, shared),
            ((7, 3), 0, (Block(7, ranks, 2 if ranks == 4 else -(-7 // ranks)),)),
            ((5, 12), 1, (Block.of(12, ranks),)),
            ((1, 12), 1, (Block.of(12, ranks),)),
        ]:
            specs.append(ParameterSpec("x", shape, ZERO, split=Split(ranks, 0, dim, blocks)))
    return specs


@pytest.mark.parametrize("spec", split_specs(), ids=lambda spec: f"{spec.shape} {spec.split.ranks} {spec.split.blocks}")
def test_the_part_of_a_rank(spec: ParameterSpec) -> None:
    """Any consecutive elements of any rank's part are the regions that say so, and the holders have the same."""
    whole = torch.arange(spec.numel).view(spec.shape)
    locals_of = [spec.on(rank).local(whole).flatten().tolist() for rank in range(spec.split.ranks)]
    for rank, local in enumerate(locals_of):
        for start in range(len(local)):
            for end in range(start + 1, len(local) + 1):
                parts, place = held(spec.on(rank), start, end), start
                for part in parts:
                    found = indices(part.region, row_numel(spec.shape))
                    assert part.start == place and found == local[place : place + part.region.numel]
                    place += part.region.numel
                    assert part.holders == tuple(other for other, its in enumerate(locals_of) if {*found} <= {*its})
                assert place == end
                most = 3 if spec.split.dim else len(spec.pieces)
                assert len(parts) <= (1 if spec.split.ranks == 1 else most)


def random_region(chance: random.Random, rows: int, pitch: int) -> Region:
    if chance.random() < 0.4:
        first = chance.randrange(rows * pitch)
        return Region.of(first, chance.randint(1, rows * pitch - first))
    width, top = chance.randint(1, pitch), chance.randrange(rows)
    return Region(top * pitch + chance.randint(0, pitch - width), chance.randint(1, rows - top) * width, width)


def test_the_elements_that_two_regions_share() -> None:
    """The places in both are those of equal indices, each once; columns of a region never leave its rows."""
    chance = random.Random(1)
    for _ in range(2000):
        rows, pitch = chance.randint(1, 6), chance.randint(1, 7)
        wanted, saved = (random_region(chance, rows, pitch) for _ in range(2))
        mine, theirs = indices(wanted, pitch), indices(saved, pitch)
        found = []
        for part in overlaps(wanted, saved, pitch):
            for place in (part.wanted, part.saved):
                assert part.rows == 1 or place.column + part.width <= place.pitch
            for row in range(part.rows):
                for column in range(part.width):
                    found.append(tuple(place.first + row * place.pitch + column for place in (part.wanted, part.saved)))
            assert part.numel == part.rows * part.width
            if part.is_contiguous:
                low = part.wanted.first, part.saved.first
                assert [(low[0] + i, low[1] + i) for i in range(part.numel)] == found[-part.numel :]
        assert sorted(found) == sorted((mine.index(one), theirs.index(one)) for one in {*mine} & {*theirs})
