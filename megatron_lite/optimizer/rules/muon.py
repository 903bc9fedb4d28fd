"""Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for everything else, on shards.

A matrix lies across the shards of several ranks, and has to be orthogonalized as a whole. Stage by stage:

    momentum on the shard            every rank, its own elements
    all_gather                       bf16: what is orthogonalized is rounded to that anyway
    orthogonalize                    every rank the matrices that are assigned to it, in place; all else becomes zero
    reduce_scatter                   the sum of one rank's result and zeros: exact
    descend on the shard             every rank, its own elements

As many stages as there are buffers make a round. Its gathers are started together, and its reductions are waited for
when all that a rank has to orthogonalize is done: they run beside that, and matrices are shared out over a whole round.
Weights that are stored as one, but are several linear maps (queries, keys and values; the two halves of a gated MLP),
are orthogonalized and scaled one by one, as if they were stored apart (`ParameterSpec.matrix_rows`).

What a rank computes depends on neither ZeRO stage nor buffers, so neither does a bit of the result. The number of ranks
changes sums of gradients in the last bit, which rounding to bf16 makes larger: runs agree to that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_lite.config import OptimizerConfig
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.adamw import Range
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.momentum import descend, muon_momentum
from megatron_lite.kernels.newton_schulz import orthogonalize, orthogonalize_flops
from megatron_lite.optimizer.rules.adamw import AdamW
from megatron_lite.optimizer.rules.rule import Rule, StepNumbers, Trained
from megatron_lite.zero.stage import Stage


@dataclass(frozen=True)
class Matrix:
    """One matrix (rows, columns) in its stage's trainable range, in which it begins at element `offset`."""

    offset: int
    rows: int
    columns: int
    lr_scale: float
    weight_decay: bool

    @property
    def end(self) -> int:
        return self.offset + self.rows * self.columns


def matrices_of(stage: Stage) -> list[Matrix]:
    """All matrices of a stage that are trained, in order."""
    assert stage.trainable is not None
    matrices = []
    for slot in stage.trainable.layout.slots:
        offset, spec = slot.offset, slot.spec
        for rows in spec.matrix_rows:
            matrices.append(Matrix(offset, rows, spec.shape[1], spec.lr_scale, spec.weight_decay))
            offset = matrices[-1].end
        assert not spec.matrix_rows or offset == slot.end, spec
    return matrices


def assign(matrices: Sequence[Matrix], world_size: int) -> list[int]:
    """The rank that orthogonalizes each matrix of a round: the largest first, each to the rank with least to do."""
    ranks, load = [0] * len(matrices), [0] * world_size
    work = [orthogonalize_flops(matrix.rows, matrix.columns, 1) for matrix in matrices]
    for index in sorted(range(len(matrices)), key=lambda index: -work[index]):
        ranks[index] = load.index(min(load))
        load[ranks[index]] += work[index]
    return ranks


def rounds_of(stages: Sequence[Stage]) -> list[list[Stage]]:
    """The stages with matrices, in order, as many in each round as there are buffers."""
    found = [stage for stage in stages if stage.update_buffer is not None]
    count = len({id(stage.update_buffer) for stage in found})
    return [found[start : start + count] for start in range(0, len(found), max(count, 1))]


def describe(stages: Sequence[Stage]) -> str:
    """One line for the log: what Muon updates of the trained parameters, and how the ranks share in it."""
    rounds = [[m for stage in some for m in matrices_of(stage)] for some in rounds_of(stages)]
    every = [matrix.rows * matrix.columns for matrices in rounds for matrix in matrices]
    parts = [stage.trainable for stage in stages if stage.trainable is not None]
    total = sum(slot.numel for part in parts for slot in part.layout.slots)
    text = (
        f"muon: {len(every)} matrices ({sum(every):,} of {total:,} trained weights) are orthogonalized, "
        "AdamW updates everything else"
    )
    world_size, most = parts[0].layout.world_size, max(map(len, rounds), default=0)
    if not 0 < most < world_size:
        return text
    return f"{text}; {most} of {world_size} ranks at a time: more --layers_per_stage give work to more of them"


def shape_factor(rows: int, columns: int, style: str) -> float:
    """The factor on the learning rate of a matrix: `adjust_lr_fn` of torch.optim.Muon."""
    if style == "match_rms_adamw":  # Liu et al. (2025), "Muon is scalable for LLM training"
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


class _Plan:
    """What is to be done for one stage: all that does not change from step to step."""

    def __init__(self, stage: Stage, matrices: Sequence[Matrix], ranks: Sequence[int], rank: int, style: str) -> None:
        assert stage.update_buffer is not None and stage.trainable is not None
        self.stage, self.part, self.buffer = stage, stage.trainable, stage.update_buffer
        layout, full = self.part.layout, stage.full_update
        low, numel = rank * layout.shard_numel, layout.shard_numel
        self.own = full[low : low + numel]
        # Matrices come last: what is behind the beginning of the first is theirs, or padding.
        self.bounds = slice(min(max(layout.first_matrix - low, 0), numel), numel)
        mine = [matrix for matrix, assigned in zip(matrices, ranks, strict=True) if assigned == rank]
        self.mine = [full[m.offset : m.end].view(m.rows, m.columns) for m in mine]
        borders = [0, *(border for matrix in mine for border in (matrix.offset, matrix.end)), layout.numel]
        self.others = [full[a:b] for a, b in zip(borders[::2], borders[1::2], strict=True) if a < b]
        self.rows: list[Range] = []
        self.factors: list[float] = []
        for matrix in matrices:
            start, end = max(matrix.offset - low, 0), min(matrix.end - low, numel)
            if start < end:
                self.rows.append(Range(start, end, matrix.lr_scale, float(matrix.weight_decay)))
                self.factors.append(shape_factor(matrix.rows, matrix.columns, style))


class Muon(Rule):
    """See the module."""

    def __init__(
        self, config: OptimizerConfig, trained: Sequence[Trained], distributed: Distributed, kernels: Kernels
    ) -> None:
        self._config = config
        self._adamw = AdamW(config, trained, distributed, kernels)
        self._rounds: list[list[_Plan]] = []
        for stages in rounds_of([stage for stage, _ in trained]):
            matrices = [matrices_of(stage) for stage in stages]
            ranks = iter(assign(list(itertools.chain(*matrices)), distributed.world_size))
            of_stages = [list(itertools.islice(ranks, len(some))) for some in matrices]
            self._rounds.append(
                [
                    _Plan(stage, some, assigned, distributed.rank, config.muon_adjust_lr)
                    for stage, some, assigned in zip(stages, matrices, of_stages, strict=True)
                ]
            )
        self._places = {plan.stage.index: (i, plan) for i, plans in enumerate(self._rounds) for plan in plans}

    def begin(self, trained: Sequence[Trained], numbers: StepNumbers) -> None:
        """See `Rule`. Starts to gather the first round."""
        self._adamw.begin(trained, numbers)
        if self._rounds:
            self._gather(self._rounds[0], numbers)

    def apply(self, trained: Trained, numbers: StepNumbers) -> None:
        """See `Rule`."""
        self._adamw.apply(trained, numbers)
        if trained.stage.index not in self._places:
            return
        index, plan = self._places[trained.stage.index]
        plans = self._rounds[index]
        if plan is plans[0]:
            self._orthogonalize(plans)
        plan.buffer.wait()
        descend(plan.part.weights, plan.own, plan.rows, numbers, plan.factors)
        if plan is plans[-1] and index + 1 < len(self._rounds):
            self._gather(self._rounds[index + 1], numbers)

    def record(self) -> dict[str, Any]:
        """See `Rule`."""
        return self._adamw.record()

    def state(self) -> dict[str, Any]:
        """See `Rule`."""
        return self._adamw.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """See `Rule`."""
        self._adamw.load_state(state)

    def _gather(self, plans: Sequence[_Plan], numbers: StepNumbers) -> None:
        """Update the momentum of a round, and start to gather what is to be orthogonalized."""
        config = self._config
        for plan in plans:
            muon_momentum(
                plan.part.grad_shard,
                plan.part.moments["exp_avg"],
                plan.own,
                plan.bounds,
                numbers,
                config.muon_momentum,
                config.muon_nesterov,
            )
            plan.stage.gather_update()

    def _orthogonalize(self, plans: Sequence[_Plan]) -> None:
        """Orthogonalize what is this rank's of a round, and start to bring every rank its shard of the results."""
        for plan in plans:
            plan.buffer.wait()
            for matrix in plan.mine:
                matrix.copy_(orthogonalize(matrix, self._config.muon_ns_steps))
            if plan.others:
                torch._foreach_zero_(plan.others)
            plan.stage.reduce_update()
