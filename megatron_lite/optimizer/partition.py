"""Partition the model over a run's ranks, with the state that its optimizer declares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_lite.config import Config
from megatron_lite.optimizer.optimizer import rule_of
from megatron_lite.zero.layer import Layer
from megatron_lite.zero.multi_stage import MultiStage
from megatron_lite.zero.pipeline import Durations


def partitioned(
    config: Config,
    layers: Sequence[Layer],
    groups: Any,
    training: bool = True,
    durations: Sequence[Durations] | None = None,
) -> MultiStage:
    """Return the partitioned model. groups, durations: see `MultiStage`."""
    return MultiStage(
        layers,
        config.multi_stage,
        config.batch,
        config.distributed.training_dtype,
        groups,
        training,
        state=rule_of(config.optimizer).declared,
        averaged=config.averaging.enabled,
        base_elsewhere=config.adapters.lora_rank > 0,
        durations=durations,
    )
