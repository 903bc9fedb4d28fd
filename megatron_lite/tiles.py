"""Tiles: the elements of a parameter that a rank owns, and their places in its memory. Pure
arithmetic, no tensors.

A tensor-parallel rank owns rows or columns of a parameter, its shard any consecutive elements of
these, and a slice of a checkpoint the contents of one shard.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Tile(NamedTuple):
    """A rectangle of a parameter: `rows` runs of `width` consecutive elements.

    Several runs are the same columns of successive rows; a single run may start and end in any
    column. The holder's memory stores a tile contiguously.
    """

    first: int  # index of the first element in the flattened parameter
    rows: int
    width: int
    pitch: int  # elements from one run to the next: a row's length in the parameter
    offset: int = 0  # of the first element in the holder's memory
    holders: tuple[int, ...] = (0,)  # tensor-parallel ranks with the same elements, sorted
    name: str = ""  # the rank's part that contains the tile: "up.weight[0:16]"

    @classmethod
    def run(cls, first: int, numel: int, offset: int = 0) -> Tile:
        """Return a tile of consecutive elements."""
        return cls(first, 1, numel, numel, offset)

    @property
    def numel(self) -> int:
        return self.rows * self.width

    @property
    def end(self) -> int:
        """End offset in the holder's memory, exclusive."""
        return self.offset + self.numel

    @property
    def is_run(self) -> bool:
        """Whether the tile is contiguous in the parameter."""
        return self.rows == 1 or self.width == self.pitch

    def view(self, flat: Tensor) -> Tensor:
        """Return the elements, (rows, width), as a view of the flattened parameter."""
        return flat[self.first :].as_strided((self.rows, self.width), (self.pitch, 1))

    def cut(self, start: int, end: int) -> Iterator[Tile]:
        """Yield the elements from `start` to `end` in memory: one run, or up to three tiles of
        columns."""
        start, end = max(start, self.offset), min(end, self.end)
        if start >= end:
            return
        if self.is_run:
            numel = end - start
            yield self._replace(
                first=self.first + start - self.offset,
                rows=1,
                width=numel,
                pitch=numel,
                offset=start,
            )
            return
        for low, rows, width in _by_rows(start - self.offset, end - self.offset, self.width):
            row, column = divmod(low, self.width)
            first = self.first + row * self.pitch + column
            yield self._replace(first=first, rows=rows, width=width, offset=self.offset + low)


def _by_rows(start: int, end: int, width: int) -> Iterator[tuple[int, int, int]]:
    """Cut a range into the end of a row, whole rows and the start of a row; yield (first, rows,
    width) for each."""
    cuts = sorted(
        {start, min(end, -(-start // width) * width), max(start, end // width * width), end}
    )
    for low, high in itertools.pairwise(cuts):
        yield low, max(1, (high - low) // width), min(width, high - low)


class Overlap(NamedTuple):
    """Elements that two tiles share, as a tile in each holder's memory."""

    wanted: Tile
    saved: Tile
    column: int  # column of the first shared element within a run of the saved tile

    @property
    def is_run(self) -> bool:
        """Whether the elements are contiguous in both memories."""
        return self.wanted.is_run and self.saved.is_run


def overlaps(wanted: Tile, saved: Tile) -> Iterator[Overlap]:
    """Yield the elements that two tiles of a parameter share."""
    if wanted.is_run and saved.is_run:
        start = max(wanted.first, saved.first)
        end = min(wanted.first + wanted.numel, saved.first + saved.numel)
        if start < end:
            mine, theirs = (
                Tile.run(tile.offset + start - tile.first, end - start) for tile in (wanted, saved)
            )
            yield Overlap(mine, theirs, 0)
        return
    pitch = saved.pitch if wanted.is_run else wanted.pitch
    for mine, theirs in itertools.product(rectangles(wanted, pitch), rectangles(saved, pitch)):
        (row, column), (their_row, their_column) = (
            divmod(mine.first, pitch),
            divmod(theirs.first, pitch),
        )
        top, bottom = max(row, their_row), min(row + mine.rows, their_row + theirs.rows)
        left = max(column, their_column)
        right = min(column + mine.width, their_column + theirs.width)
        if top < bottom and left < right:
            first = mine.offset + (top - row) * mine.width + left - column
            their_first = theirs.offset + (top - their_row) * theirs.width + left - their_column
            own = Tile(first, bottom - top, right - left, mine.width)
            yield Overlap(
                own, own._replace(first=their_first, pitch=theirs.width), left - their_column
            )


def rectangles(tile: Tile, pitch: int) -> Iterator[Tile]:
    """Yield a tile as rectangles of a parameter with rows of `pitch` elements."""
    if tile.rows > 1:
        yield tile
        return
    for first, rows, width in _by_rows(tile.first, tile.first + tile.width, pitch):
        yield Tile(first, rows, width, pitch, tile.offset + first - tile.first)


class Block(NamedTuple):
    """Consecutive indices of a parameter's split dimension, cut into `parts` of `part_size`.

    With fewer parts than ranks, neighbouring ranks have the same part. The last part may be
    shorter.
    """

    size: int
    parts: int
    part_size: int

    @classmethod
    def of(cls, size: int, parts: int) -> Block:
        """Cut a block into equal parts."""
        assert size % parts == 0, (size, parts)
        return cls(size, parts, size // parts)


@dataclass(frozen=True)
class Split:
    """How a tensor-parallel group splits a parameter (Shoeybi et al. 2019, section 3).

    A group of one has the whole parameter, and so does every rank if `blocks` is empty. With
    expert parallelism, the rows of a parameter of experts are first cut into `expert_ranks` equal
    ranges, each of which as many neighbouring ranks split.
    """

    ranks: int = 1  # tensor times expert-parallel ones
    rank: int = 0  # this rank in the group
    dim: int = 0
    blocks: tuple[Block, ...] = ()  # queries, keys and values; gate and up
    sums_gradients: bool = (
        False  # whether holders of the same tile compute partial gradients; otherwise equal ones
    )
    expert_ranks: int = 1

    def own_rows(self, name: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...], int]:
        """Return name and shape of the rows of this rank's experts, and the index of their first
        element."""
        rows = shape[0] // self.expert_ranks
        first = self.rank * self.expert_ranks // self.ranks * rows
        name = name_part(name, shape, 0, [(first, first + rows)])
        return name, (rows, *shape[1:]), first * math.prod(shape[1:])

    def tiles(self, name: str, shape: Sequence[int]) -> tuple[Tile, ...]:
        """Return this rank's tiles of a parameter, in order; adjacent tiles with the same holders
        are merged."""
        name, shape, first = self.own_rows(name, shape)
        ranks = self.ranks // self.expert_ranks
        experts, own = divmod(self.rank, ranks)
        count = len(self.blocks) // (self.expert_ranks if self.dim == 0 else 1)
        blocks = self.blocks[count * experts :][:count] if self.dim == 0 else self.blocks
        rows, unit = math.prod(shape[: self.dim]), math.prod(shape[self.dim + 1 :])
        found: list[
            tuple[int, int, tuple[int, ...]]
        ] = []  # start and end along the split dimension, holders
        begin = 0  # of the block
        for block in blocks or (Block.of(shape[self.dim], 1),):
            part = own * block.parts // ranks
            holders = tuple(
                experts * ranks + rank
                for rank in range(ranks)
                if rank * block.parts // ranks == part
            )
            start, end = (
                begin + min(index * block.part_size, block.size) for index in (part, part + 1)
            )
            if found and found[-1][1:] == (start, holders):
                start = found.pop()[0]
            found.append((start, end, holders))
            begin += block.size
        # otherwise no run is a row
        assert begin == shape[self.dim] and (self.dim == 0 or len(found) == 1), (self, shape)
        tiles, offset = [], 0
        for start, end, holders in found:
            part_name = name_part(name, shape, self.dim, [(start, end)])
            tile = Tile(
                first + start * unit,
                rows,
                (end - start) * unit,
                shape[self.dim] * unit,
                offset,
                holders,
                part_name,
            )
            tiles.append(tile)
            offset = tile.end
        return tuple(tiles)


WHOLE = Split()


def name_part(name: str, shape: Sequence[int], dim: int, spans: Sequence[tuple[int, int]]) -> str:
    """Return a name with the indices of a dimension, as "up.weight[0:16 + 64:80]", unless it is
    complete."""
    if sum(end - start for start, end in spans) == shape[dim]:
        return name
    return f"{name}[{':, ' * dim}{' + '.join(f'{start}:{end}' for start, end in spans)}]"
