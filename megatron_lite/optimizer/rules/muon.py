"""Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for everything else, on shards.

A matrix spans the shards of several ranks and must be orthogonalized whole. Stage by stage:

    momentum on the shard            every rank, its own elements
    all_gather                       in bf16, to which Muon rounds before orthogonalizing
    orthogonalize                    every rank, its assigned matrices; the other elements become zero
    reduce_scatter                   one rank's result plus zeros: exact
    descend on the shard             every rank, its own elements

Matrix products alone turn U S V^T into U S' V^T with all singular values S' near 1:

    X = G / ||G||        A = X X^T        X = a X + (b A + c A^2) X, a few times

in bf16, transposed if that makes A smaller. The coefficients of the quintic maximize the slope at
zero, so five steps raise small singular values quickly, but all end between about 0.7 and 1.2
instead of exactly at 1. Operations and their order match torch.optim.Muon: the bits are the same if
the same library multiplies.

Both collectives run over all ranks. With tensor parallelism, a rank stores some rows (of queries,
keys or values; of gate or up) or some columns of a matrix, and several ranks may store the same
elements (shared key/value heads). A matrix is assembled from its group's parts, and its result is
written to all holders; otherwise it is orthogonalized in place.

A round has as many stages as there are buffers. Its gathers start together, its matrices are
distributed over all ranks, and its reductions overlap with orthogonalization. Linear maps stored in
one weight (queries, keys and values; the two halves of a gated MLP) are orthogonalized and scaled
separately (`ParameterSpec.matrix_rows`).

Equal gradients give bit-identical results in every layout. The number of ranks changes the last bit
of gradient sums, which rounding to bf16 amplifies.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.config import OptimizerConfig
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.adamw import Range, StepNumbers
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.products import product, scaled_product
from megatron_lite.optimizer.rules.adamw import AdamW
from megatron_lite.optimizer.rules.momentum import descend, muon_momentum
from megatron_lite.optimizer.rules.rule import Trained
from megatron_lite.tiles import Tile, overlaps
from megatron_lite.zero.flat_shard import FlatShard, Moment, OptimizerState
from megatron_lite.zero.layout import FlatLayout
from megatron_lite.zero.stage import Buffer, Stage

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7


def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return the bf16 matrix (m, n) after `steps` steps of orthogonalization, in new memory; zeros
    stay zeros.

    Temporaries: two matrices of this size and two square ones of the smaller dimension.
    """
    assert matrix.dtype == torch.bfloat16 and matrix.dim() == 2, (matrix.dtype, matrix.shape)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.t() if is_tall else matrix
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = product(x, x)
        x = scaled_product(
            x, scaled_product(gram, gram, gram, beta=b, alpha=c), x, beta=a, alpha=1.0
        )
    return x.t() if is_tall else x


def orthogonalize_flops(rows: int, columns: int, steps: int) -> int:
    """Return the FLOPs of `orthogonalize`."""
    small, large = sorted((rows, columns))
    return steps * 2 * small * small * (2 * large + small)


class Matrix(NamedTuple):
    """A matrix (rows, columns) and its tiles on a tensor-parallel group's ranks, in rank order."""

    rows: int
    columns: int
    lr_scale: float
    weight_decay: float
    tiles: tuple[
        tuple[int, Tile], ...
    ] = ()  # (rank, tile of the matrix with its offset in the trainable range)


def matrices_of(part: FlatShard) -> list[Matrix]:
    """Return a part's matrices, in order."""
    matrices = []
    for slot in part.layout.slots:
        spec, first = slot.spec, 0
        for rows in spec.matrix_rows:
            matrix = Tile.run(first * spec.shape[1], rows * spec.shape[1])
            tiles = [
                (
                    rank,
                    shared.wanted._replace(
                        offset=slot.offset + shared.saved.first, holders=held.holders
                    ),
                )
                for rank in range(spec.split.ranks)
                for held in spec.on(rank).tiles
                for shared in overlaps(matrix, held)
            ]
            matrices.append(
                Matrix(rows, spec.shape[1], spec.lr_scale, spec.weight_decay, tuple(tiles))
            )
            first += rows
        assert not spec.matrix_rows or first == spec.shape[0], spec
    return matrices


class GatheredMatrix:
    """A matrix in the gathered shards of all ranks, where a tensor-parallel group's shards are
    adjacent."""

    def __init__(self, matrix: Matrix, full: Tensor, layout: FlatLayout) -> None:
        self._shape, self._full = (matrix.rows, matrix.columns), full
        self.tiles: list[Tile] = []  # their offsets are in `full`
        self._firsts: list[Tile] = []  # of copies, the first rank's
        ranks = full.numel() // layout.numel  # of a tensor-parallel group
        in_order = ranks == layout.replicas == 1  # the shards are consecutive
        numel = layout.numel if in_order else layout.shard_numel
        for rank, tile in matrix.tiles:
            for shard in range(tile.offset // numel, -(-tile.end // numel)):
                moved = (layout.holder(shard) * ranks + rank - shard) * numel
                parts = tile.cut(shard * numel, (shard + 1) * numel)
                self.tiles += (
                    found := [part._replace(offset=part.offset + moved) for part in parts]
                )
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


def assign(matrices: Sequence[Matrix], world_size: int) -> list[int]:
    """Assign each matrix of a round to a rank: largest first, each to the rank with the least
    work."""
    ranks, load = [0] * len(matrices), [0] * world_size
    work = [orthogonalize_flops(matrix.rows, matrix.columns, 1) for matrix in matrices]
    for index in sorted(range(len(matrices)), key=lambda index: -work[index]):
        ranks[index] = load.index(min(load))
        load[ranks[index]] += work[index]
    return ranks


def rounds_of(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Group the stages with matrices into rounds with one stage per buffer, in order."""
    found = [stage for stage in stages if stage.update_buffer is not None]
    count = len({id(stage.update_buffer) for stage in found})
    return [found[start : start + count] for start in range(0, len(found), max(count, 1))]


def describe(stages: Sequence[Stage]) -> str:
    """Return a log line: the weights that Muon updates, and the number of ranks that share the
    work.

    stages: all pipeline ranks'.
    """
    rounds = [
        [m for stage in some for part in stage.trainable for m in matrices_of(part)]
        for some in rounds_of(stages)
    ]
    parts = [part for stage in stages for part in stage.trainable]
    every = [matrix.rows * matrix.columns for part in parts for matrix in matrices_of(part)]
    total = sum(slot.spec.numel for part in parts for slot in part.layout.slots)
    text = (
        f"muon: {len(every)} matrices ({sum(every):,} of {total:,} trained weights) are orthogonalized, "
        "AdamW updates everything else"
    )
    world_size, most = stages[0].world.world_size, max(map(len, rounds), default=0)
    if not 0 < most < world_size:
        return text
    return f"{text}; {most} of {world_size} ranks at a time: more --layers_per_stage give work to more of them"


def shape_factor(rows: int, columns: int, style: str) -> float:
    """Return the factor on a matrix's learning rate: `adjust_lr_fn` of torch.optim.Muon."""
    if style == "match_rms_adamw":  # Liu et al. (2025), "Muon is scalable for LLM training"
        return 0.2 * math.sqrt(max(rows, columns))
    assert style == "original", style
    return math.sqrt(max(1.0, rows / columns))


class _Plan:
    """The work on a part of a stage, fixed over the run."""

    def __init__(
        self,
        part: FlatShard,
        full: Tensor,
        buffer: Buffer | None,
        matrices: Sequence[Matrix],
        ranks: Sequence[int],
        distributed: Distributed,
        style: str,
    ) -> None:
        assert buffer is not None
        self.part, self.buffer = part, buffer
        layout = part.layout
        rank, numel = distributed.layers.rank, layout.shard_numel
        self.own = full[rank * numel : (rank + 1) * numel]
        low = layout.start(part.rank)
        # Matrices come last: every element from the first matrix on belongs to a matrix or is
        # padding.
        self.bounds = slice(min(max(layout.first_matrix - low, 0), numel), numel)
        mine = [
            matrix for matrix, assigned in zip(matrices, ranks, strict=True) if assigned == rank
        ]
        self.mine = [GatheredMatrix(matrix, full, layout) for matrix in mine]
        places = sorted((tile.offset, tile.end) for matrix in self.mine for tile in matrix.tiles)
        borders = [0, *itertools.chain.from_iterable(places), full.numel()]
        self.others = [full[a:b] for a, b in zip(borders[::2], borders[1::2], strict=True) if a < b]
        self.rows: list[Range] = []
        self.factors: list[float] = []
        for matrix in matrices:
            for holder, tile in matrix.tiles:
                start, end = max(tile.offset - low, 0), min(tile.end - low, numel)
                if holder == part.split_over.rank and start < end:
                    self.rows.append(Range(start, end, matrix.lr_scale, matrix.weight_decay))
                    self.factors.append(shape_factor(matrix.rows, matrix.columns, style))


_Round = list[tuple[Stage, list[_Plan]]]  # with a buffer each


class Muon(AdamW):
    """Muon for matrices, AdamW for all other parameters."""

    declared = OptimizerState(
        (Moment("exp_avg"), Moment("exp_avg_sq", of_matrices=False)), whole_matrices=True
    )

    def __init__(
        self,
        config: OptimizerConfig,
        trained: Sequence[Trained],
        distributed: Distributed,
        kernels: Kernels,
    ) -> None:
        super().__init__(config, trained, distributed, kernels)
        self._config = config
        self._rounds: list[_Round] = []
        style = config.muon_adjust_lr
        for stages in rounds_of([*dict.fromkeys(stage for stage, _ in trained)]):
            parts = [(stage, *pair) for stage in stages for pair in stage.full_updates()]
            matrices = [matrices_of(part) for _, part, _ in parts]
            ranks = iter(assign(list(itertools.chain(*matrices)), distributed.layers.world_size))
            of_parts = [list(itertools.islice(ranks, len(some))) for some in matrices]
            plans = [
                _Plan(part, full, stage.update_buffer, some, assigned, distributed, style)
                for (stage, part, full), some, assigned in zip(
                    parts, matrices, of_parts, strict=True
                )
            ]
            self._rounds.append(
                [(it, [plan for plan in plans if plan.part in it.trainable]) for it in stages]
            )
        self._places = {
            plan.part: (index, plan)
            for index, some in enumerate(self._rounds)
            for _, plans in some
            for plan in plans
        }

    def begin(self, trained: Sequence[Trained], numbers: StepNumbers) -> None:
        """See `Rule`. Start gathering the first round."""
        super().begin(trained, numbers)
        if self._rounds:
            self._gather(self._rounds[0], numbers)

    def apply(self, trained: Trained, numbers: StepNumbers) -> None:
        """See `Rule`."""
        super().apply(trained, numbers)
        if trained.part not in self._places:
            return
        index, plan = self._places[trained.part]
        plans = self._rounds[index]
        if plan is plans[0][1][0]:
            self._orthogonalize(plans)
        plan.buffer.wait()
        descend(plan.part.weights, plan.own, plan.rows, numbers, plan.factors)
        if plan is plans[-1][1][-1] and index + 1 < len(self._rounds):
            self._gather(self._rounds[index + 1], numbers)

    def _gather(self, plans: _Round, numbers: StepNumbers) -> None:
        """Update a round's momentum and start gathering it."""
        config = self._config
        for stage, some in plans:
            for plan in some:
                muon_momentum(
                    plan.part.grad_shard,
                    plan.part.moments["exp_avg"],
                    plan.own,
                    plan.bounds,
                    numbers,
                    config.muon_momentum,
                    config.muon_nesterov,
                )
            stage.gather_update()

    def _orthogonalize(self, plans: _Round) -> None:
        """Orthogonalize this rank's matrices of a round and start scattering the results to the
        shards."""
        for stage, some in plans:
            for plan in some:
                plan.buffer.wait()
                for matrix in plan.mine:
                    matrix.write(orthogonalize(matrix.read(), self._config.muon_ns_steps))
                if plan.others:
                    torch._foreach_zero_(plan.others)
            stage.reduce_update()
