"""Plan a run before anything is allocated: one rank's memory and traffic.

The engine itself does the counting: a `MultiStage` is built on the meta device, as one of any
number of ranks. Its collectives are counted while its own schedule is replayed, and each kind of
stage runs once, on tensors without memory (`stage_costs.py`). A search uses a `Planner`, which
builds and measures nothing twice.
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

from megatron_lite.config import RECOMPUTE_LEVELS, Config, DistributedConfig, changed
from megatron_lite.config.dimensions import DIMENSIONS, RankGrid, layer_options
from megatron_lite.distributed.cpu_collectives import Works
from megatron_lite.distributed.expert_group import ExpertGroup
from megatron_lite.distributed.grid import Groups
from megatron_lite.distributed.pipeline_group import PipelineGroup
from megatron_lite.distributed.rank_group import Group
from megatron_lite.distributed.step_watch import Event
from megatron_lite.distributed.traffic import Handle, Total, Traffic
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.model.gpt import model_layers
from megatron_lite.model.layer import MicroBatch
from megatron_lite.optimizer.partition import partitioned
from megatron_lite.planner.runtime import runtime_bytes
from megatron_lite.planner.stage_costs import Cost, traffic_sum
from megatron_lite.planner.step_memory import (
    ActivationMemory,
    Measured,
    Partition,
    activation_memory,
    planned_micro_batch,
)
from megatron_lite.zero.messages import FirstLayer
from megatron_lite.zero.multi_stage import MultiStage
from megatron_lite.zero.pipeline import Durations
from megatron_lite.zero.runner import execute
from megatron_lite.zero.schedule import Order, Step

UNDIVIDED = DistributedConfig()  # one group of all ranks
IN_LAYERS = frozenset(row.name for row in DIMENSIONS if row.in_layers)


class SimulatedGroup(Groups):
    """One rank of a simulated group: counts collectives and moves nothing.

    Like `Distributed`, it has groups along each dimension of the grid of ranks, which share its
    counts.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        device_type: str,
        device: str = "meta",
        options: DistributedConfig = UNDIVIDED,
        traffic: Traffic | None = None,
    ) -> None:
        super().__init__(rank, world_size, torch.device(device), None, traffic or Traffic())
        self.device_type = device_type
        grid = RankGrid(world_size, options)
        place = grid.place(rank)

        def make(name: str, of_type: type[Group]) -> Group:
            size = grid.size(name)
            if of_type is PipelineGroup:
                return SimulatedPipeline(place[name], size, self.device, None, self.traffic)
            if of_type is ExpertGroup:
                return SimulatedExperts(place[name], size, self.device, None, self.traffic)
            # Groups inside of layers allocate nothing; their traffic depends on the planned device
            # type (`zero/replicas.py`).
            on = device_type if device == "meta" and name in IN_LAYERS else device
            return SimulatedGroup(place[name], size, device_type, on, traffic=self.traffic)

        self.take(grid, make)

    def all_gather(self, buffer: Tensor, kind: str = "gather") -> Handle:
        return self._started(kind, buffer, Works())

    def reduce_scatter(self, buffer: Tensor, kind: str = "reduce") -> Handle:
        return Works() if self.world_size == 1 else self._started(kind, buffer, Works())

    def all_reduce(self, buffer: Tensor, kind: str) -> Handle:
        return self._started(kind, buffer, Works(), passes=2)

    def wait_for(self, event: Event) -> None:
        """Return immediately: a plan queues nothing."""


class SimulatedExperts(ExpertGroup):
    """One rank of those that share out the experts: counts exchanges and moves nothing."""

    def _exchange(
        self, found: Tensor, rows: Tensor, sent: Sequence[int], received: Sequence[int]
    ) -> Handle:
        return Works()


class SimulatedPipeline(PipelineGroup):
    """One rank of a simulated pipeline: counts messages and moves nothing."""

    def send(self, tensor: Tensor, peer: int) -> Handle:
        return self.traffic.started("send", tensor, Works(), tensor.nbytes)

    def receive(self, tensor: Tensor, peer: int) -> Handle:
        return self.traffic.started("receive", tensor, Works(), 0)


@dataclass(frozen=True)
class Plan:
    """One rank's memory and traffic: among pipeline ranks, the one that needs the most memory."""

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
    def order(self) -> Order:
        """The order of all pipeline ranks' steps."""
        return self.partition.order(self.config, self.config.performance.mlp_recompute_level)

    @property
    def costs(self) -> list[Cost]:
        """Costs of a micro-batch's passes, per stage of the rank."""
        costs = self.partition.training(self.config, self.config.performance.mlp_recompute_level)
        return [pair[1] for stage in self.model.stages for pair in costs[stage.index].passes]

    @functools.cached_property
    def traffic(self) -> dict[str, Total]:
        """Traffic of one step after the first, by kind, over all of the rank's groups."""
        micro_batches = self.config.batch.sequential_micro_batches
        between = _traffic_between_passes(self.config, self.partition)
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
        return (
            self.state_bytes
            + self.activations[level or self.config.performance.mlp_recompute_level].peak
        )

    def needed_bytes(self, level: str | None = None) -> int:
        """Memory that the device must have: the peak and the runtime."""
        return self.peak_bytes(level) + sum(self.runtime.values())


def make_plan(config: Config, world_size: int, device_type: str, rank: int | None = None) -> Plan:
    """Plan one of `world_size` ranks on `device_type`; see `Planner`. `config`: resolved, without
    `auto`."""
    return Planner(world_size, device_type, rank).plan(config, RECOMPUTE_LEVELS)


def planned_durations(
    config: Config, world_size: int, device_type: str
) -> Sequence[Durations] | None:
    """Return the durations of stages that a run's schedule is made with; None without a
    pipeline."""
    if RankGrid(world_size, config.distributed).sizes["pipeline"] == 1:
        return None
    partition = Planner(world_size, device_type).partition(config)
    return partition.order(config, config.performance.mlp_recompute_level).durations


def planned_model(config: Config, group: SimulatedGroup, device_type: str) -> MultiStage:
    """Return the engine's own model for one rank of `group`, on the meta device."""
    kernels = choose_kernels(config, torch.device(device_type), planned=True)
    return partitioned(config, model_layers(config, kernels, group), group)


class Planner:
    """Plans many configurations of a run, most in a few milliseconds.

    rank: None: the pipeline rank that needs the most memory, which data- and tensor-parallel ranks
    share.

    A `MultiStage` of 32 blocks takes 20 ms to build, and its stages 100 ms to measure. The planner
    caches one per partition: configurations that differ only in recomputation, micro-batches and
    the like share it. Models that compute the same but partition differently share measurements.
    """

    def __init__(self, world_size: int, device_type: str, rank: int | None = None) -> None:
        self.world_size = world_size
        self.device_type = device_type
        self.rank = rank
        self._partitions: dict[tuple[int, str], Partition] = {}
        self._measured: dict[str, Measured] = {}
        self._whole: dict[
            str, tuple[MultiStage, Traffic]
        ] = {}  # all stages of a pipeline, to be measured

    def plan(self, config: Config, levels: Sequence[str] = ()) -> Plan:
        """Return the plan of `config`, resolved and without `auto`.

        levels: recompute levels to plan activations for, in addition to the one in `config`.
        """
        grid = RankGrid(self.world_size, config.distributed)
        stages = range(0, grid.span("pipeline"), grid.strides["pipeline"])
        ranks = stages if self.rank is None else [self.rank]
        return max((self._plan(config, rank, levels) for rank in ranks), key=Plan.needed_bytes)

    def _plan(self, config: Config, rank: int, levels: Sequence[str]) -> Plan:
        partition, chosen = self.partition(config, rank), config.performance.mlp_recompute_level
        activations = {
            level: activation_memory(config, partition, level)
            for level in dict.fromkeys((*levels, chosen))
        }
        return Plan(config, self.world_size, self.device_type, partition, activations)

    def partition(self, config: Config, rank: int = 0) -> Partition:
        """Return a rank's partition of the model, shared by configurations that differ only in
        their steps."""
        options, optimizer = config.distributed, config.optimizer
        shared = layer_options(options)
        layout = shared, options.sequence_tensor_parallel, options.parallel_embeddings
        computed = repr(
            (
                vars(config.model),
                choose_kernels(config, torch.device(self.device_type), planned=True),
                (options.training_dtype, config.multi_stage.full_precision_gradients),
                (layout, options.overlap_tensor_reduce),
                (
                    config.batch.sequence_length,
                    config.data.reset_position_ids,
                    config.training.logit_z_loss,
                ),
                (optimizer.freeze, optimizer.lr_scales, vars(config.adapters)),
                config.training.export_model_type,
                (config.performance.eight_bit, config.performance.quantization_targets),
            )
        )
        grid = RankGrid(self.world_size, options)
        key = (
            rank,
            repr(
                (
                    computed,
                    grid.strides,
                    *map(vars, (config.multi_stage, optimizer, config.averaging)),
                )
            ),
        )
        if key not in self._partitions:
            group = SimulatedGroup(rank, self.world_size, self.device_type, options=options)
            one = {"depth_first_micro_batches": 1, "breadth_first_micro_batches": 1}
            one_micro_batch = changed(config, one)
            model = planned_model(one_micro_batch, group, self.device_type)
            whole, traffic = model, group.traffic
            if model.ranks.world_size > 1:
                stages = repr((computed, config.multi_stage.layers_per_stage))
                if stages not in self._whole:
                    undivided = dataclasses.replace(UNDIVIDED, **shared)
                    size = group.layers.world_size
                    layers = SimulatedGroup(0, size, self.device_type, options=undivided)
                    self._whole[stages] = (
                        planned_model(one_micro_batch, layers, self.device_type),
                        layers.traffic,
                    )
                whole, traffic = self._whole[stages]
            measured = self._measured.setdefault(computed, {})
            self._partitions[key] = Partition(model, whole, traffic, self.device_type, measured)
        return self._partitions[key]


def _traffic_between_passes(config: Config, partition: Partition) -> dict[str, Total]:
    """Return the whole step's traffic; most micro-batches repeat their predecessors'
    communication."""
    few, more, periods = partition.periods(config)
    micro_batch, level = planned_micro_batch(config), config.performance.mlp_recompute_level

    def counted(size: tuple[int, int]) -> dict[str, Total]:
        return count_traffic(partition.model, partition.steps(config, level, size), micro_batch)

    return (
        traffic_sum((counted(few), 1 - periods), (counted(more), periods))
        if periods
        else counted(few)
    )


def count_traffic(
    model: MultiStage, schedule: Sequence[Step], micro_batch: MicroBatch
) -> dict[str, Total]:
    """Replay a step's schedule without computing; return its collectives by kind, as `Traffic`
    counts them.

    Excludes collectives inside the passes. Counts the second of two steps, which does not gather
    again what a buffer still contains.
    """
    traffic = model.group.traffic
    micro_batches = [micro_batch] * (1 + max(step.micro_batch for step in schedule))
    result = torch.empty(())
    names = ("gather", "require_weights", "accumulate", "reduce", "finish_reduction")
    if model.ranks.world_size > 1:
        shape, dtype = cast(FirstLayer, model.all_stages[0].layers[0]).boundary(micro_batch)
        result = torch.empty(shape, dtype=dtype or model.precision.training, device="meta")
    passes = "forward", "backward", "backward_input", "backward_weights"
    verbs = {
        stage.index: SimpleNamespace(
            **{name: getattr(stage, name) for name in names},
            **dict.fromkeys(passes, lambda *_: result),
        )
        for stage in model.memory.stages
    }
    for _ in range(2):
        traffic.take()
        execute(cast(Any, verbs), schedule, micro_batches, model.messages)
        for stage in model.stages:
            if stage.update_buffer is not None:
                for exchange in (stage.gather_update, stage.reduce_update):
                    exchange()
                    stage.update_buffer.wait()
            if stage.trainable:
                model.updated(stage)
            for part in stage.parts:
                part.is_whole = part.is_state  # all ranks update all of it
        model.gather_ahead()
    return traffic.take()
