"""The plan of a run, before anything is allocated: memory and traffic of one rank.

The engine itself does the counting: a `MultiStage` is built on the meta device, as one of any number of ranks. Its
collectives are counted while its own schedule is replayed, and each kind of stage runs once, on tensors without memory
(`stage_costs.py`). A search uses a `Planner`, which builds and measures nothing twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from megatron_lite.config import RECOMPUTE_LEVELS, Config
from megatron_lite.distributed.cpu_collectives import Works
from megatron_lite.distributed.pipeline_group import one_pipeline_rank
from megatron_lite.distributed.rank_group import Group, alone, reduction_scratch_bytes
from megatron_lite.distributed.step_watch import Event
from megatron_lite.distributed.traffic import Handle, Total, Traffic
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.model.gpt import model_layers
from megatron_lite.optimizer.optimizer import rule_of
from megatron_lite.planner.runtime import runtime_bytes
from megatron_lite.planner.stage_costs import Cost, traffic_sum
from megatron_lite.planner.step_memory import ActivationMemory, Measured, Partition, activation_memory, training_steps
from megatron_lite.zero.multi_stage import MultiStage
from megatron_lite.zero.runner import forward_backward
from megatron_lite.zero.schedule import Step


class SimulatedGroup(Group):
    """One rank of a simulated group: counts collectives and moves nothing.

    Like `Distributed`, it has a data-parallel and a tensor-parallel group, which share its counts.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device_type: str,
        device: str = "meta",
        tensor_parallel: int = 1,
        traffic: Traffic | None = None,
    ) -> None:
        super().__init__(rank, world_size, torch.device(device), None, traffic or Traffic())
        self._device_type = device_type
        self.layers: SimulatedGroup = self
        self.pipeline = one_pipeline_rank(self.device)
        self.data: SimulatedGroup = self
        self.tensor: Group = alone(self.device)
        if tensor_parallel > 1:
            of_data, of_tensor = divmod(rank, tensor_parallel)
            ranks = world_size // tensor_parallel
            self.data = SimulatedGroup(of_data, ranks, device_type, device, traffic=self.traffic)
            # Allocates nothing itself; its traffic depends on the planned device type (`zero/replicas.py`).
            of_plan = device_type if device == "meta" else device
            self.tensor = SimulatedGroup(of_tensor, tensor_parallel, device_type, of_plan, traffic=self.traffic)

    def all_gather(self, buffer: Tensor, kind: str = "gather") -> Handle:
        return self._started(kind, buffer, Works())

    def reduce_scatter(self, buffer: Tensor, kind: str = "reduce") -> Handle:
        return self._started(kind, buffer, Works())

    def all_reduce(self, buffer: Tensor, kind: str) -> Handle:
        return self._started(kind, buffer, Works(), passes=2)

    def reduction_scratch_bytes(self, shard_numel: int, dtype: torch.dtype) -> int:
        """Bytes on the planned device type."""
        return reduction_scratch_bytes(self._device_type, self.world_size, shard_numel, dtype)

    def wait_for(self, event: Event) -> None:
        """Return immediately: a plan queues nothing."""


@dataclass(frozen=True)
class Plan:
    """Memory and traffic of one rank of a run."""

    config: Config  # without `auto`
    world_size: int
    device_type: str
    partition: Partition
    activations: dict[str, ActivationMemory]  # by recompute level

    @property
    def model(self) -> MultiStage:
        """The model, on the meta device."""
        return self.partition.model

    @property
    def costs(self) -> list[Cost]:
        """Costs of a micro-batch's two passes in each stage."""
        stages = self.partition.training(self.config, self.config.performance.mlp_recompute_level)
        return [cost for stage in stages for cost in (stage.forward[1], stage.backward[1])]

    @functools.cached_property
    def traffic(self) -> dict[str, Total]:
        """Traffic of one step after the first, by kind, over all of the rank's groups."""
        micro_batches = self.config.batch.sequential_micro_batches
        assert micro_batches, "resolved"
        between = _traffic_between_passes(self.config, self.model)
        return traffic_sum((between, 1), *((cost.traffic, micro_batches) for cost in self.costs))

    @property
    def state_bytes(self) -> int:
        """Weights, gradients, moments, buffers, scratch."""
        return self.partition.state_bytes

    @property
    def runtime(self) -> dict[str, int]:
        """Bytes needed in addition to a step's tensors, by name."""
        return runtime_bytes(self.config, self.partition)

    def peak_bytes(self, level: str | None = None) -> int:
        """Peak bytes of state and activations."""
        return self.state_bytes + self.activations[level or self.config.performance.mlp_recompute_level].peak

    def needed_bytes(self, level: str | None = None) -> int:
        """Memory that the device must have: the peak and the runtime."""
        return self.peak_bytes(level) + sum(self.runtime.values())


def make_plan(config: Config, world_size: int, device_type: str, rank: int = 0) -> Plan:
    """Plan one of `world_size` ranks on `device_type`. `config`: resolved, without `auto`."""
    return Planner(world_size, device_type, rank).plan(config, RECOMPUTE_LEVELS)


def planned_model(config: Config, group: SimulatedGroup, device_type: str) -> MultiStage:
    """The engine's own model for one rank of `group`, on the meta device."""
    return MultiStage(
        model_layers(config, choose_kernels(config, torch.device(device_type), planned=True), group.tensor),
        config.multi_stage,
        config.batch,
        config.distributed.training_dtype,
        group.data,
        tensor=group.tensor,
        world=group,
        state=rule_of(config.optimizer).declared,
        averaged=config.averaging.enabled,
    )


class Planner:
    """Plans many configurations of a run for one rank, most in a few milliseconds.

    A `MultiStage` of 32 blocks takes 20 ms to build, and its stages 100 ms to measure. The planner caches one per
    partition: configurations that differ only in recomputation, micro-batches and the like share it. Models that
    compute the same but partition differently share measurements.
    """

    def __init__(self, world_size: int, device_type: str, rank: int = 0) -> None:
        self.world_size, self.device_type, self.rank = world_size, device_type, rank
        self._partitions: dict[str, Partition] = {}
        self._measured: dict[str, Measured] = {}

    def plan(self, config: Config, levels: Sequence[str] = ()) -> Plan:
        """Return the plan of `config`, resolved and without `auto`.

        levels: recompute levels to plan activations for, in addition to that of `config`.
        """
        partition, chosen = self.partition(config), config.performance.mlp_recompute_level
        activations = {level: activation_memory(config, partition, level) for level in dict.fromkeys((*levels, chosen))}
        return Plan(config, self.world_size, self.device_type, partition, activations)

    def partition(self, config: Config) -> Partition:
        """Return the model's partition, shared by configurations that differ only in their steps."""
        options, optimizer = config.distributed, config.optimizer
        layout = options.tensor_parallel, options.sequence_tensor_parallel, options.parallel_embeddings
        computed = repr(
            (
                vars(config.model),
                choose_kernels(config, torch.device(self.device_type), planned=True),
                (options.training_dtype, config.multi_stage.full_precision_gradients),
                (layout, options.overlap_tensor_reduce),
                (config.batch.sequence_length, config.data.reset_position_ids, config.training.logit_z_loss),
                (optimizer.freeze, optimizer.lr_scales),
                (config.performance.eight_bit, config.performance.quantization_targets),
            )
        )
        key = repr((computed, *map(vars, (config.multi_stage, optimizer, config.averaging))))
        if key not in self._partitions:
            one = dataclasses.replace(config.batch, depth_first_micro_batches=1, breadth_first_micro_batches=1)
            group = SimulatedGroup(
                self.rank, self.world_size, self.device_type, tensor_parallel=options.tensor_parallel
            )
            model = planned_model(dataclasses.replace(config, batch=one), group, self.device_type)
            measured = self._measured.setdefault(computed, {})
            self._partitions[key] = Partition(model, group.traffic, self.device_type, measured)
        return self._partitions[key]


def _traffic_between_passes(config: Config, model: MultiStage) -> dict[str, Total]:
    """Return the whole step's traffic. Depth-first micro-batches after the second repeat its communication."""
    batch = config.batch
    assert batch.depth_first_micro_batches and batch.breadth_first_micro_batches, "resolved"
    depth, breadth = batch.depth_first_micro_batches, batch.breadth_first_micro_batches

    def counted(depth: int) -> dict[str, Total]:
        return count_traffic(model, training_steps(model, depth, breadth))

    return counted(depth) if depth <= 3 else traffic_sum((counted(2), 3 - depth), (counted(3), depth - 2))


def count_traffic(model: MultiStage, schedule: Sequence[Step]) -> dict[str, Total]:
    """Replay the schedule of a step without computing; return its collectives by kind, as `Traffic` counts them.

    Excludes collectives inside the passes. Counts the second of two steps, which does not gather again what a buffer
    still holds.
    """
    traffic, micro_batches = model.group.traffic, range(1 + max(step.micro_batch for step in schedule))
    no_passes: dict[str, Any] = {"forward": lambda *_: torch.zeros(()), "backward": lambda *_: None}
    names = "gather", "require_weights", "accumulate", "reduce", "finish_reduction"
    verbs = {
        stage.index: SimpleNamespace(**{name: getattr(stage, name) for name in names}, **no_passes)
        for stage in model.stages
    }
    for _ in range(2):
        traffic.take()
        forward_backward(cast(Any, verbs), schedule, micro_batches, model.messages, None)
        for stage in model.stages:
            if stage.update_buffer is not None:
                for exchange in (stage.gather_update, stage.reduce_update):
                    exchange()
                    stage.update_buffer.wait()
            if stage.trainable is not None:
                model.updated(stage)
        model.gather_ahead()
    return traffic.take()
