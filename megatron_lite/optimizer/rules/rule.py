"""The interface of the optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config import OptimizerConfig
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.adamw import Range, Ranges
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.momentum import Numbers
from megatron_lite.zero.flat_shard import FlatShard, OptimizerState
from megatron_lite.zero.stage import Stage


class Trained(NamedTuple):
    """The trainable part of one stage."""

    stage: Stage
    part: FlatShard


@dataclass(frozen=True)
class StepNumbers(Numbers):
    """Numbers of an update. Tensors are on the device, () in fp32; the host never reads them."""

    updates: Tensor  # good updates, including this one: Adam's t


class Rule:
    """Base class of the optimizers; override what an optimizer needs."""

    declared: OptimizerState  # allocated by `zero`

    def __init__(
        self, config: OptimizerConfig, trained: Sequence[Trained], distributed: Distributed, kernels: Kernels
    ) -> None:
        raise NotImplementedError

    def begin(self, trained: Sequence[Trained], numbers: StepNumbers) -> None:
        """Prepare an update with all shards, before any weight changes; may start collectives."""

    def apply(self, trained: Trained, numbers: StepNumbers) -> None:
        """Update one shard in place; called in the order of `trained`."""
        raise NotImplementedError

    def record(self) -> dict[str, Any]:
        """Return entries of a log line (reads the device)."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return state beyond the moments for a checkpoint, as JSON (reads the device)."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore `state`; an empty one restarts."""


@dataclass(frozen=True)
class CountedRanges:
    """Ranges of a shard, also cut where elements start or stop counting on this rank: see `zero.replicas`."""

    ranges: Ranges
    slots: list[int]  # of each range: index of its first parameter in the layout
    counts: list[bool]  # of each range


def counted_ranges_of(part: FlatShard, rank: int, device: torch.device, separate: bool) -> CountedRanges:
    """Return the ranges of this rank's shard for sums over all parameters. separate: one range per parameter."""
    assert not part.whole_matrices, "Muon's updates are not clipped"
    rows: list[Range] = []
    slots, counts = [], []
    for row in part.layout.update_ranges(rank, separate):
        for start, end, is_counted in part.replicas.segments if part.replicas else [(row.start, row.end, True)]:
            start, end = max(start, row.start), min(end, row.end)
            if start < end:
                rows.append(Range(start, end, row.lr_scale, float(row.weight_decay)))
                slots.append(row.slot)
                counts.append(is_counted)
    return CountedRanges(Ranges(rows, device), slots, counts)


def ranges_of(part: FlatShard, rank: int, device: torch.device) -> Ranges:
    """Return the ranges of this rank's shard with the same update rule, without the matrices that Muon updates."""
    rows = [row for row in part.layout.update_ranges(rank) if not (row.is_matrix and part.whole_matrices)]
    return Ranges([Range(row.start, row.end, row.lr_scale, float(row.weight_decay)) for row in rows], device)
