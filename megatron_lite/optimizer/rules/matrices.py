"""The matrices that Muon updates as a whole, in the gathered shards of all ranks.

A tensor-parallel rank holds some rows (of queries, keys or values; of gate or up) or some columns of a matrix; several
ranks may hold the same elements (shared key/value heads).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from megatron_lite.tiles import Tile, overlaps
from megatron_lite.zero.layout import FlatLayout
from megatron_lite.zero.stage import Stage


@dataclass(frozen=True)
class Matrix:
    """A matrix (rows, columns) and its tiles on the ranks of a tensor-parallel group, in rank order."""

    rows: int
    columns: int
    lr_scale: float
    weight_decay: bool
    tiles: tuple[tuple[int, Tile], ...] = ()  # (rank, tile of the matrix with its offset in the trainable range)


def matrices_of(stage: Stage) -> list[Matrix]:
    """Return the trained matrices of a stage, in order."""
    assert stage.trainable is not None
    matrices = []
    for slot in stage.trainable.layout.slots:
        spec, first = slot.spec, 0
        for rows in spec.matrix_rows:
            matrix = Tile.run(first * spec.shape[1], rows * spec.shape[1])
            tiles = [
                (rank, shared.wanted._replace(offset=slot.offset + shared.saved.first, holders=held.holders))
                for rank in range(spec.split.ranks)
                for held in spec.on(rank).tiles
                for shared in overlaps(matrix, held)
            ]
            matrices.append(Matrix(rows, spec.shape[1], spec.lr_scale, spec.weight_decay, tuple(tiles)))
            first += rows
        assert not spec.matrix_rows or first == spec.shape[0], spec
    return matrices


class GatheredMatrix:
    """A matrix in the gathered shards of all ranks, where those of a tensor-parallel group are neighbours."""

    def __init__(self, matrix: Matrix, full: Tensor, layout: FlatLayout) -> None:
        self._shape, self._full = (matrix.rows, matrix.columns), full
        self.tiles: list[Tile] = []  # their offsets are in `full`
        self._firsts: list[Tile] = []  # of copies, those on the first rank
        ranks = full.numel() // layout.numel  # of a tensor-parallel group
        numel = layout.shard_numel if ranks > 1 else layout.numel  # alone, a rank's shards follow each other
        for rank, tile in matrix.tiles:
            for shard in range(tile.offset // numel, -(-tile.end // numel)):
                moved = (shard * (ranks - 1) + rank) * numel
                parts = tile.cut(shard * numel, (shard + 1) * numel)
                self.tiles += (found := [part._replace(offset=part.offset + moved) for part in parts])
                self._firsts += found if tile.holders[0] == rank else []

    def read(self) -> Tensor:
        """Return the matrix, as a view if it is contiguous (without tensor parallelism it is)."""
        if len(self.tiles) == 1:
            return self._memory(self.tiles[0]).view(self._shape)
        whole = self._full.new_empty(self._shape)
        for tile in self._firsts:
            tile.view(whole.view(-1)).copy_(self._memory(tile))
        return whole

    def write(self, whole: Tensor) -> None:
        """Replace the matrix on all its holders."""
        flat = whole.reshape(-1)
        for tile in self.tiles:
            self._memory(tile).copy_(tile.view(flat))

    def _memory(self, tile: Tile) -> Tensor:
        return self._full[tile.offset : tile.end].view(tile.rows, tile.width)
