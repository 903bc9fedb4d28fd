"""Regions of a parameter: the elements of a rank's shard, of a slice in a file, of both. Pure arithmetic, no tensors.

A tensor-parallel rank holds rows or columns of a parameter, and its shard any consecutive elements of those. Rows of a
whole parameter (`shape[0]` of them) have `row_numel` elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from megatron_lite.parameter import ParameterSpec


class Region(NamedTuple):
    """Elements of a flattened parameter: runs of `run` elements, in successive rows, from `first` on.

    A region of one run (`run` is `numel`) may begin and end anywhere; several runs are a part of each row.
    """

    first: int
    numel: int
    run: int

    @classmethod
    def of(cls, first: int, numel: int) -> Region:
        """Return consecutive elements."""
        return cls(first, numel, numel)

    @property
    def is_contiguous(self) -> bool:
        return self.run == self.numel


class Part(NamedTuple):
    """A region that a rank holds: it begins at element `start` of the rank's part of the parameter."""

    start: int
    region: Region
    holders: tuple[int, ...]  # ranks of the tensor-parallel group that hold the same elements, in order


class Place(NamedTuple):
    """Where shared elements begin, counted within a region: in a column of rows of `pitch`, the first at `start`."""

    start: int
    column: int
    pitch: int

    @property
    def first(self) -> int:
        return self.start + self.column


class Overlap(NamedTuple):
    """The elements that two regions share: `rows` runs of `width`, and the place of the first in each region."""

    rows: int
    width: int
    wanted: Place
    saved: Place

    @property
    def numel(self) -> int:
        return self.rows * self.width

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow each other in both regions."""
        return self.rows == 1 or self.width == self.wanted.pitch == self.saved.pitch


def row_numel(shape: Sequence[int]) -> int:
    """Return the elements of a row of a parameter."""
    return math.prod(shape[1:])


def held(spec: ParameterSpec, start: int, end: int) -> list[Part]:
    """Return the elements start to end of this rank's part of a parameter as regions of the whole, in order."""
    if spec.local_numel == spec.numel:
        return [Part(start, Region.of(start, end - start), spec.pieces[0].holders)]
    return list(_columns(spec, start, end) if spec.split.dim else _rows(spec, start, end))


def _rows(spec: ParameterSpec, start: int, end: int) -> Iterator[Part]:
    offset, row = 0, row_numel(spec.shape)
    for piece in spec.pieces:
        low, high = max(start, offset), min(end, offset + (piece.end - piece.start) * row)
        if low < high:
            yield Part(low, Region.of(piece.start * row + low - offset, high - low), piece.holders)
        offset += (piece.end - piece.start) * row


def _columns(spec: ParameterSpec, start: int, end: int) -> Iterator[Part]:
    assert spec.split.dim == 1, spec.split
    (piece,) = spec.pieces  # of several, a row would be no run
    pitch, column = row_numel(spec.shape), piece.start * row_numel(spec.shape[1:])
    for part in _rectangles(Region.of(start, end - start), row_numel(spec.local_shape)):
        first = part.row * pitch + column + part.column
        yield Part(start + part.start, Region(first, part.rows * part.width, part.width), piece.holders)


class _Rectangle(NamedTuple):
    """Rows and columns of a parameter; within a region, its rows follow each other from `start` on."""

    row: int
    column: int
    rows: int
    width: int
    start: int


def _rectangles(region: Region, pitch: int) -> Iterator[_Rectangle]:
    """Yield the rectangles of a region: one of runs; the end of a row, whole rows and the beginning of a row."""
    first, end = region.first, region.first + region.numel
    if not region.is_contiguous:
        yield _Rectangle(*divmod(first, pitch), region.numel // region.run, region.run, 0)
        return
    cuts = sorted({first, min(end, -(-first // pitch) * pitch), max(first, end // pitch * pitch), end})
    for low, high in itertools.pairwise(cuts):
        yield _Rectangle(*divmod(low, pitch), max(1, (high - low) // pitch), min(pitch, high - low), low - first)


def overlaps(wanted: Region, saved: Region, pitch: int) -> Iterator[Overlap]:
    """Yield the elements that two regions of a parameter with rows of `pitch` elements share."""
    if wanted.is_contiguous and saved.is_contiguous:
        start, end = max(wanted.first, saved.first), min(wanted.first + wanted.numel, saved.first + saved.numel)
        if start < end:
            places = (Place(start - region.first, 0, end - start) for region in (wanted, saved))
            yield Overlap(1, end - start, *places)
        return
    for mine, theirs in itertools.product(_rectangles(wanted, pitch), _rectangles(saved, pitch)):
        top, bottom = max(mine.row, theirs.row), min(mine.row + mine.rows, theirs.row + theirs.rows)
        left = max(mine.column, theirs.column)
        right = min(mine.column + mine.width, theirs.column + theirs.width)
        if top < bottom and left < right:
            places = (
                Place(part.start + (top - part.row) * part.width, left - part.column, part.width)
                for part in (mine, theirs)
            )
            yield Overlap(bottom - top, right - left, *places)
