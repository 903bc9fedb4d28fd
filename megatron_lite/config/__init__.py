"""Every option of the program: name, type, default, bounds and help, once.

The dataclasses below are the only place where an option is described: `arguments.py` makes the flat `--flags` from
them, `docs/flags.md` is generated from them, and the rest of the program receives them as frozen values. `None` means
"derived": `validation.resolve` fills it in. This module imports no torch, so that `--help` answers at once.

Options of Fast-LLM's flat-flag era that this program does not have (yet) stand in `refused.py` with the reason.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron_lite.config.learning_rate import LearningRateConfig
from megatron_lite.config.model import RECOMPUTE_LEVELS as RECOMPUTE_LEVELS
from megatron_lite.config.model import ModelConfig, PerformanceConfig
from megatron_lite.config.optimizer import AveragingConfig, OptimizerConfig
from megatron_lite.config.source import SourceConfig
from megatron_lite.config.system import DistributedConfig, MultiStageConfig, RunConfig
from megatron_lite.config.training import BatchConfig, DataConfig, TrainingConfig


@dataclass(frozen=True)
class Config:
    """All options of one run. Each is reached as `config.<area>.<name>`; names are unique over the areas."""

    source: SourceConfig = dataclasses.field(default_factory=SourceConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    learning_rate: LearningRateConfig = dataclasses.field(default_factory=LearningRateConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    averaging: AveragingConfig = dataclasses.field(default_factory=AveragingConfig)
    performance: PerformanceConfig = dataclasses.field(default_factory=PerformanceConfig)
    multi_stage: MultiStageConfig = dataclasses.field(default_factory=MultiStageConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)


AREAS: dict[str, type] = {
    "source": SourceConfig,
    "model": ModelConfig,
    "batch": BatchConfig,
    "learning_rate": LearningRateConfig,
    "optimizer": OptimizerConfig,
    "averaging": AveragingConfig,
    "performance": PerformanceConfig,
    "multi_stage": MultiStageConfig,
    "distributed": DistributedConfig,
    "data": DataConfig,
    "training": TrainingConfig,
    "run": RunConfig,
}


def flatten(config: Config) -> dict[str, Any]:
    """All options as one flat {name: value}, in the order of this file."""
    return {
        field.name: getattr(getattr(config, area), field.name)
        for area, kind in AREAS.items()
        for field in dataclasses.fields(kind)
    }


def unflatten(values: dict[str, Any]) -> Config:
    """The inverse of `flatten`; absent names take their default.

    Raises:
        KeyError: if a name is not an option.
    """
    left = dict(values)
    areas = {
        area: kind(**{field.name: left.pop(field.name) for field in dataclasses.fields(kind) if field.name in left})
        for area, kind in AREAS.items()
    }
    if left:
        raise KeyError(f"not options: {sorted(left)}")
    return Config(**areas)
