"""What the optimizers have in common: what they are given, and when they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.kernels.adamw import Range, Ranges
from megatron_lite.kernels.momentum import Numbers
from megatron_lite.zero.flat_shard import FlatShard
from megatron_lite.zero.stage import Stage


class Trained(NamedTuple):
    """The trainable part of one stage."""

    stage: Stage
    part: FlatShard


@dataclass(frozen=True)
class StepNumbers(Numbers):
    """All numbers of one update. Tensors are on the device, () in fp32, and never read on the host."""

    updates: Tensor  # good updates, this one included: Adam's t


class Rule:
    """One optimizer; what it does not need it leaves as it is here."""

    def begin(self, trained: Sequence[Trained], numbers: StepNumbers) -> None:
        """What must see all shards before any weight changes; all ranks are here, so collectives are possible."""

    def apply(self, trained: Trained, numbers: StepNumbers) -> None:
        """Update one shard in place. Stages come in the order in which they were given."""
        raise NotImplementedError

    def record(self) -> dict[str, Any]:
        """What a line of the log has of its own (reads the device)."""
        return {}

    def state(self) -> dict[str, Any]:
        """For a checkpoint, beside the moments: JSON (reads the device)."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; an empty one begins anew."""


def ranges_of(part: FlatShard, rank: int, device: torch.device, separate: bool = False) -> Ranges:
    """Return the ranges of this rank's shard with one update rule each, without matrices that Muon updates whole.

    `separate`: one range per parameter.
    """
    rows = [row for row in part.layout.update_ranges(rank, separate) if not (row.is_matrix and part.whole_matrices)]
    return Ranges([Range(row.start, row.end, row.lr_scale, float(row.weight_decay)) for row in rows], device)
