"""The matrices that Muon updates whole: their parts on the ranks of a tensor-parallel group, and in all ranks' shards.

A rank's part of a matrix is some of its rows (of queries, keys or values; of gate or up) or of its columns, and several
ranks may have copies of the same part (shared key/value heads).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.parameter import ParameterSpec
from megatron_lite.zero.layout import FlatLayout
from megatron_lite.zero.stage import Stage


class Part(NamedTuple):
    """The part of a matrix that a rank of a tensor-parallel group has, in one piece of the trainable range."""

    rank: int  # of the group
    offset: int  # of the first element in the range
    rows: slice
    columns: slice
    is_first: bool  # no rank before it has a copy

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape)


@dataclass(frozen=True)
class Matrix:
    """A matrix (rows, columns) and its parts, in the order of ranks."""

    rows: int
    columns: int
    lr_scale: float
    weight_decay: bool
    parts: tuple[Part, ...] = ()


def matrices_of(stage: Stage) -> list[Matrix]:
    """Return the trained matrices of a stage, in order."""
    assert stage.trainable is not None
    matrices = []
    for slot in stage.trainable.layout.slots:
        spec, first = slot.spec, 0
        specs = [spec.on(rank) for rank in range(spec.split.ranks)] if spec.matrix_rows else []
        for rows in spec.matrix_rows:
            parts = [part for of_rank in specs for part in _parts(of_rank, slot.offset, first, rows)]
            matrices.append(Matrix(rows, spec.shape[1], spec.lr_scale, spec.weight_decay, tuple(parts)))
            first += rows
        assert not spec.matrix_rows or first == spec.shape[0], spec
    return matrices


def _parts(spec: ParameterSpec, offset: int, first: int, rows: int) -> Iterator[Part]:
    """Yield the parts of the matrix in rows `first` to `first + rows` of a parameter at `offset`, on one rank."""
    rank, width, start = spec.split.rank, spec.local_shape[1], 0
    for piece in spec.pieces:
        is_first = piece.holders[0] == rank
        if spec.split.dim:
            assert len(spec.pieces) == 1, spec
            columns = slice(piece.start, piece.end)
            yield Part(rank, offset + first * width, slice(0, rows), columns, is_first)
            continue
        low, high = max(piece.start, first), min(piece.end, first + rows)
        if low < high:
            place = offset + (start + low - piece.start) * width
            yield Part(rank, place, slice(low - first, high - first), slice(0, width), is_first)
        start += piece.end - piece.start


class GatheredMatrix:
    """A matrix in the memory of all ranks' shards."""

    def __init__(self, matrix: Matrix, full: Tensor, layout: FlatLayout) -> None:
        ranks = full.numel() // layout.numel  # of a tensor-parallel group
        places = [_places(part, ranks, layout.shard_numel) for part in matrix.parts]
        self.places = [place for some in places for place in some]
        self._shape = (matrix.rows, matrix.columns)
        pieces = [[full[start:end] for start, end in some] for some in places]
        self._parts = list(zip(matrix.parts, pieces, strict=True))
        # In one place, as on any number of data-parallel ranks, it needs no other memory.
        self._view = pieces[0][0].view(self._shape) if len(self.places) == 1 else None

    def read(self) -> Tensor:
        """Return the matrix; a view if it is in one place."""
        if self._view is not None:
            return self._view
        whole = self._parts[0][1][0].new_empty(self._shape)
        for part, pieces in self._parts:
            if part.is_first:
                whole[part.rows, part.columns] = torch.cat(pieces).view(part.shape)
        return whole

    def write(self, whole: Tensor) -> None:
        """Replace the matrix on all ranks that have parts of it."""
        if self._view is not None:
            self._view.copy_(whole)
            return
        for part, pieces in self._parts:
            values = whole[part.rows, part.columns].reshape(-1)
            for piece, own in zip(pieces, values.split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(own)


def _places(part: Part, ranks: int, shard_numel: int) -> list[tuple[int, int]]:
    """Return (start, end) of a part in the memory of all ranks' shards, in order; `ranks` of a group are neighbours."""
    found: list[tuple[int, int]] = []
    for shard in range(part.offset // shard_numel, -(-part.end // shard_numel)):
        low = shard * shard_numel
        moved = (shard * ranks + part.rank) * shard_numel - low
        start, end = max(part.offset, low) + moved, min(part.end, low + shard_numel) + moved
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, end))
    return found
