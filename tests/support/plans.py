"""What the planner says of one rank, for tests that compare it with what is allocated."""

import torch

from megatron_lite.config import Config
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.model.gpt import model_layers
from megatron_lite.optimizer.partition import partitioned
from megatron_lite.planner.plan import Plan, Planner, SimulatedGroup, planned_durations
from megatron_lite.planner.step_memory import ActivationMemory
from megatron_lite.zero.multi_stage import MultiStage


def simulated_rank(
    config: Config, ranks: int, rank: int = 0, device_type: str = "cpu"
) -> MultiStage:
    """The model of one rank with memory on CPU; its groups do not exist: their collectives leave
    garbage."""
    group = SimulatedGroup(rank, ranks, device_type, "cpu", config.distributed)
    kernels = choose_kernels(config, torch.device("cpu"), planned=True)
    durations = planned_durations(config, ranks, "cpu")
    return partitioned(config, model_layers(config, kernels, group), group, durations=durations)


def one_plan(config: Config, ranks: int, device_type: str = "cpu", rank: int | None = None) -> Plan:
    """Plan as `make_plan` does, at the recompute level of the configuration, and no others."""
    return Planner(ranks, device_type, rank).plan(config)


def planned_memory(config: Config, ranks: int = 1) -> ActivationMemory:
    """Return the planned activations of a rank on a CPU."""
    return one_plan(config, ranks).activations[config.performance.mlp_recompute_level]
