"""The interface of the optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lite.config import JsonObject, OptimizerConfig
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.adamw import Range, Ranges, StepNumbers
from megatron_lite.kernels.choice import Kernels
from megatron_lite.zero.flat_shard import FlatShard, OptimizerState
from megatron_lite.zero.stage import Stage


class Trained(NamedTuple):
    """A trainable part of one stage, possibly on another pipeline rank."""

    stage: Stage
    part: FlatShard


class Rule:
    """Base class of the optimizers."""

    declared: OptimizerState  # allocated by `zero`

    def __init__(
        self,
        config: OptimizerConfig,
        trained: Sequence[Trained],
        distributed: Distributed,
        kernels: Kernels,
    ) -> None:
        raise NotImplementedError

    def begin(self, trained: Sequence[Trained], numbers: StepNumbers) -> None:
        """Prepare an update of all shards, before any weight changes; may start collectives."""

    def apply(self, trained: Trained, numbers: StepNumbers) -> None:
        """Update one shard in place; called in the order of `trained`."""
        raise NotImplementedError

    def record(self) -> JsonObject:
        """Return entries for a log line (reads the device)."""
        return {}

    def state(self) -> JsonObject:
        """Return state other than the moments for a checkpoint, as JSON (reads the device)."""
        return {}

    def load_state(self, state: JsonObject) -> None:
        """Restore `state`; an empty one restarts."""


def ranges_of(
    part: FlatShard, distributed: Distributed, counted: bool = False, separate: bool = False
) -> Ranges:
    """Return this rank's ranges of elements with the same update rule, without the matrices that
    Muon updates.

    counted: also cut where elements start or stop counting on this rank. separate: one range per
    parameter.
    """
    rows: list[Range] = []
    for row in part.layout.update_ranges(part.rank, separate):
        if row.is_matrix and part.whole_matrices:
            continue
        segments = (
            part.replicas.segments if counted and part.replicas else [(row.start, row.end, True)]
        )
        for start, end, counts in segments:
            start, end = max(start, row.start), min(end, row.end)
            if start < end:
                rows.append(Range(start, end, row.lr_scale, row.weight_decay, row.slot, counts))
    return Ranges(rows, distributed.device)
