"""Every option of the program, declared once: name, type, default, bounds and help.

`cli` turns these dataclasses into flat `--flags`, docs/flags.md is generated from them, and the
rest of the program receives a read-only `Config`. `None` means "derived": `validation.resolve`
fills in a `Draft`. This room imports no torch, so that `--help` answers fast. `other_programs.txt`
lists these options' names and values in other programs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.config.adapters import AdapterConfig
from megatron_lite.config.experts import ModelConfig
from megatron_lite.config.model import RECOMPUTE_LEVELS as RECOMPUTE_LEVELS
from megatron_lite.config.model import PerformanceConfig
from megatron_lite.config.monitoring import ProfilingConfig, RunConfig, TrackingConfig
from megatron_lite.config.optimizer import AveragingConfig, LearningRateConfig, OptimizerConfig
from megatron_lite.config.option import Area
from megatron_lite.config.source import CheckpointConfig, SourceConfig
from megatron_lite.config.system import DistributedConfig, MultiStageConfig
from megatron_lite.config.training import BatchConfig, DataConfig, TrainingConfig

Options = dict[str, Any]  # values by name
JsonObject = dict[str, Any]  # decoded


@dataclass(frozen=True)
class Config:
    """All options of one run, as `config.<area>.<name>`; names are unique across areas."""

    source: SourceConfig = field(default_factory=SourceConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    adapters: AdapterConfig = field(default_factory=AdapterConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    learning_rate: LearningRateConfig = field(default_factory=LearningRateConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    averaging: AveragingConfig = field(default_factory=AveragingConfig)
    performance: PerformanceConfig = field(default_factory=PerformanceConfig)
    multi_stage: MultiStageConfig = field(default_factory=MultiStageConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    run: RunConfig = field(default_factory=RunConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    profiling: ProfilingConfig = field(default_factory=ProfilingConfig)


AREAS: dict[str, type[Area]] = {
    field.name: type(getattr(Config(), field.name)) for field in dataclasses.fields(Config)
}
# A start unflattens a configuration and checks for changes a hundred times.
_NAMES = {area: [field.name for field in dataclasses.fields(kind)] for area, kind in AREAS.items()}
_DEFAULTS = {name: getattr(AREAS[area], name) for area, names in _NAMES.items() for name in names}


class Draft(
    SourceConfig,
    ModelConfig,
    AdapterConfig,
    BatchConfig,
    LearningRateConfig,
    OptimizerConfig,
    AveragingConfig,
    PerformanceConfig,
    MultiStageConfig,
    DistributedConfig,
    DataConfig,
    TrainingConfig,
    CheckpointConfig,
    RunConfig,
    TrackingConfig,
    ProfilingConfig,
):
    """All options of one run in one writable object, as `draft.<name>`, which validation checks and
    completes."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def changed(self, *names: str) -> list[str]:
        """Return the `names` whose values differ from their defaults."""
        values = vars(self)
        return [name for name in names if values[name] != _DEFAULTS[name]]


def flatten(config: Config) -> Options:
    """Return all options as one flat {name: value}, in the order of this file."""
    return {name: value for area in AREAS for name, value in vars(getattr(config, area)).items()}


def unflatten(values: Options) -> Config:
    """Return a configuration from flat {name: value}; missing names get their defaults.

    Raises:
        KeyError: if a name is not an option.
    """
    areas: dict[str, Any] = {}
    every = _DEFAULTS | values
    for area, kind in AREAS.items():
        areas[area] = object.__new__(kind)  # __init__ would check each of its assignments
        vars(areas[area]).update({name: every[name] for name in _NAMES[area]})
    if unknown := values.keys() - _DEFAULTS.keys():
        raise KeyError(f"not options: {sorted(unknown)}")
    return Config(**areas)


def changed(config: Config, changes: Options) -> Config:
    """Return the options with `changes` applied, without resolving them."""
    return unflatten({**flatten(config), **changes})
