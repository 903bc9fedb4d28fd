"""Muon (Jordan et al. 2024) for the matrices of the blocks, AdamW for everything else, on shards.

A matrix lies across the shards of several ranks, and has to be orthogonalized as a whole. Stage by stage:

    momentum on the shard            every rank, its own elements
    all_gather                       bf16: what is orthogonalized is rounded to that anyway
    orthogonalize                    every rank the matrices that are assigned to it, in place; all else becomes zero
    reduce_scatter                   the sum of one rank's result and zeros: exact
    descend on the shard             every rank, its own elements

The momentum of the next stage is gathered while this one's matrices are orthogonalized, if there is a second buffer.
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
from megatron_lite.distributed import Distributed
from megatron_lite.kernels.adamw import Range
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.momentum import descend, muon_momentum
from megatron_lite.kernels.newton_schulz import orthogonalize, orthogonalize_flops
from megatron_lite.optimizer.rules.adamw import AdamW
from megatron_lite.optimizer.rules.rule import Rule, Step, Trained, numbers_of, weights_of
from megatron_lite.zero.layout import FlatLayout


@dataclass(frozen=True)
class Matrix:
    """One matrix (rows, columns) in its part's flat range, in which it begins at element `offset`."""

    offset: int
    rows: int
    columns: int
    lr_scale: float
    weight_decay: bool

    @property
    def end(self) -> int:
        return self.offset + self.rows * self.columns


def matrices_of(layout: FlatLayout) -> list[Matrix]:
    """All matrices of a part, in order."""
    matrices = []
    for slot in layout.slots:
        offset, spec = slot.offset, slot.spec
        for rows in spec.matrix_rows:
            matrices.append(Matrix(offset, rows, spec.shape[1], spec.lr_scale, spec.weight_decay))
            offset = matrices[-1].end
        assert not spec.matrix_rows or offset == slot.end, spec
    return matrices


def assign(stages: Sequence[Sequence[Matrix]], world_size: int) -> list[list[int]]:
    """The rank that orthogonalizes each matrix of each stage: the largest first, each to the rank with least to do.

    A stage is done when its slowest rank is; so that ranks without work there can begin with the next one, ties go to
    who had least to do before.
    """
    before = [0] * world_size
    assigned = []
    for matrices in stages:
        ranks, now = [0] * len(matrices), [0] * world_size
        work = [orthogonalize_flops(matrix.rows, matrix.columns, 1) for matrix in matrices]
        for index in sorted(range(len(matrices)), key=lambda index: -work[index]):
            rank = min(range(world_size), key=lambda rank: (now[rank], before[rank]))
            ranks[index] = rank
            now[rank] += work[index]
        before = [a + b for a, b in zip(before, now, strict=True)]
        assigned.append(ranks)
    return assigned


def describe(layouts: Sequence[FlatLayout]) -> str:
    """One line for the log: what Muon updates of the trained parameters, and how the ranks share in it."""
    stages = [matrices for layout in layouts if (matrices := matrices_of(layout))]
    every = [matrix.rows * matrix.columns for matrices in stages for matrix in matrices]
    total = sum(slot.numel for layout in layouts for slot in layout.slots)
    text = (
        f"muon: {len(every)} matrices ({sum(every):,} of {total:,} trained weights) are orthogonalized, "
        "AdamW updates everything else"
    )
    world_size, most = layouts[0].world_size, max(map(len, stages), default=0)
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

    following: _Plan | None = None

    def __init__(
        self, trained: Trained, matrices: Sequence[Matrix], ranks: Sequence[int], rank: int, style: str
    ) -> None:
        assert trained.stage.update_buffer is not None
        self.stage, self.part, self.buffer = trained.stage, trained.part, trained.stage.update_buffer
        layout, full = self.part.layout, self.stage.full_update
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
        found = [(one, matrices) for one in trained if (matrices := matrices_of(one.part.layout))]
        ranks = assign([matrices for _, matrices in found], distributed.world_size)
        self._plans = [
            _Plan(one, matrices, assigned, distributed.rank, config.muon_adjust_lr)
            for (one, matrices), assigned in zip(found, ranks, strict=True)
        ]
        for plan, following in itertools.pairwise(self._plans):
            plan.following = following
        self._by_stage = {plan.stage.index: plan for plan in self._plans}

    def begin(self, trained: Sequence[Trained], step: Step) -> None:
        """See `Rule`. Starts to gather the first stage's momentum."""
        self._adamw.begin(trained, step)
        if self._plans:
            self._start(self._plans[0], step)

    def apply(self, trained: Trained, step: Step) -> None:
        """See `Rule`."""
        self._adamw.apply(trained, step)
        plan = self._by_stage.get(trained.stage.index)
        if plan is None:
            return
        following = plan.following
        if following is not None and following.buffer is not plan.buffer:
            self._start(following, step)
        self._finish(plan, step)
        if following is not None and following.buffer is plan.buffer:
            self._start(following, step)

    def record(self) -> dict[str, Any]:
        """See `Rule`."""
        return self._adamw.record()

    def state(self) -> dict[str, Any]:
        """See `Rule`."""
        return self._adamw.state()

    def load_state(self, state: dict[str, Any]) -> None:
        """See `Rule`."""
        self._adamw.load_state(state)

    def _start(self, plan: _Plan, step: Step) -> None:
        """Update the momentum, and start to gather what is to be orthogonalized."""
        config, part = self._config, plan.part
        muon_momentum(
            part.grad_shard, part.moments["exp_avg"], plan.own, plan.bounds, numbers_of(step), config.muon_momentum,
            config.muon_nesterov,
        )  # fmt: skip
        plan.stage.gather_update()

    def _finish(self, plan: _Plan, step: Step) -> None:
        """Orthogonalize, and move the weights."""
        plan.buffer.wait()
        for matrix in plan.mine:
            matrix.copy_(orthogonalize(matrix, self._config.muon_ns_steps))
        if plan.others:
            torch._foreach_zero_(plan.others)
        plan.stage.reduce_update()
        descend(weights_of(plan.part), plan.own, plan.rows, numbers_of(step), plan.factors)
