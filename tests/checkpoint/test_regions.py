"""Regions of parameters against plain lists of indices: of a rank's part, of what two regions share, of a whole."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from megatron_lite.checkpoint.regions import Region, coverage_problem, held, overlaps, row_numel
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


def is_exact(regions: Sequence[Region], rows: int, pitch: int) -> bool:
    """Whether each element is in one region, columns are less than a row, and all are sorted."""
    counts: Counter[int] = Counter()
    for region in regions:
        if not region.is_contiguous:
            column = region.first % pitch
            if region.numel % region.run or column + region.run > pitch or region.run == pitch:
                return False
        counts.update(indices(region, pitch))
    starts = [region.first for region in regions]
    return starts == sorted(starts) and counts == Counter(range(rows * pitch))


def test_coverage_is_exact() -> None:
    """Parts of tensor-parallel ranks, cut anywhere, cover a parameter; after a random change only if each index is
    there once."""
    chance, accepted = random.Random(2), 0
    for _ in range(3000):
        rows, ranks, width = chance.randint(1, 5), chance.choice((1, 2, 3)), chance.randint(1, 3)
        split = chance.choice([Split(ranks, 0, 1, (Block.of(width * ranks, ranks),)), Split(ranks, 0)])
        spec, regions = ParameterSpec("x", (rows, width * ranks), ZERO, split=split), []
        for rank in range(ranks if split.blocks else 1):
            part = spec.on(rank)
            cuts = sorted({0, part.local_numel, *(chance.randrange(part.local_numel + 1) for _ in range(2))})
            for low, high in zip(cuts, cuts[1:], strict=False):
                regions += [item.region for item in held(part, low, high)]
        regions.sort()
        assert coverage_problem(regions, spec.shape) is None
        for _ in range(chance.choice((1, 1, 2))):
            place = chance.randrange(len(regions))
            first, numel, run = (max(0, value + chance.choice((-1, 0, 0, 1))) for value in regions[place])
            way = chance.random()
            if way < 0.1 and len(regions) > 1:
                regions.pop(place)
            elif way < 0.2:
                regions.insert(place, regions[chance.randrange(len(regions))])
            elif 1 <= run <= numel:
                regions[place] = Region(first, numel, run)
            if chance.random() < 0.5:
                regions.sort()
        exact = is_exact(regions, *spec.shape)
        assert (coverage_problem(regions, spec.shape) is None) == exact, (regions, spec.shape)
        accepted += exact
    assert 100 < accepted < 2500, accepted


def test_coverage_of_many_regions_takes_no_time_that_grows_with_elements() -> None:
    """60,000 columns, and elements without number, are checked at once."""
    ranks, rows = 20_000, 2**40
    regions = [Region(rank * 7, rows * 7, 7) for rank in range(ranks)]
    cut = [Region(first + part * ranks * 7, rows * 7 if part else 7, 7) for part in (0, 1) for first, _, _ in regions]
    start_s = time.process_time()
    assert coverage_problem(regions, (rows, ranks * 7)) is None
    assert coverage_problem(cut, (rows + 1, ranks * 7)) is None
    assert coverage_problem(regions[1:], (rows, ranks * 7)) == "leave a gap or overlap at element 0"
    assert time.process_time() - start_s < 1.0


@pytest.mark.parametrize(
    ("regions", "shape", "problem"),
    [
        ([(0, 4, 2), (2, 4, 2)], (2, 4), None),
        ([(0, 4, 2), (2, 2, 2), (6, 2, 2)], (2, 4), None),
        ([(0, 4, 2), (2, 4, 2), (2, 4, 2)], (2, 4), "are not sorted by element"),
        ([(2, 4, 2), (0, 4, 2)], (2, 4), "are not sorted by element"),
        ([(0, 4, 2), (2, 2, 2)], (2, 4), "hold 6 of 8 elements"),
        ([(0, 4, 2), (2, 6, 2)], (2, 4), "hold 10 of 8 elements"),
        ([(0, 4, 2), (1, 2, 1), (3, 2, 1)], (2, 4), "leave a gap or overlap at element 2"),
        ([(0, 8, 4)], (2, 4), "hold no rectangle at element 0"),
        ([(0, 4, 2), (3, 4, 2)], (2, 4), "hold no rectangle at element 3"),
        ([(0, 3, 2), (2, 4, 2)], (2, 4), "hold no rectangle at element 0"),
        ([(0, 4, 2)], (4,), "hold no rectangle at element 0"),
        ([(0, 4, 2)], (), "hold no rectangle at element 0"),
        ([(0, 1, 1)], (), None),
    ],
)
def test_problems_of_coverage(regions: list[tuple[int, int, int]], shape: tuple[int, ...], problem: str | None) -> None:
    assert coverage_problem([Region(*region) for region in regions], shape) == problem
