"""The plan of a run, before anything is allocated: memory and traffic of one rank.

The engine itself does the counting: a `MultiStage` is built on the meta device, for one of any number of ranks, and its
collectives are counted while its own schedule is replayed. Only the memory that layers need between and during their
passes is modelled separately, in `activations.py` and `peaks.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.checkpoint.space import host_copy_bytes
from megatron_lite.config import RECOMPUTE_LEVELS, Config
from megatron_lite.distributed.process_group import reduction_scratch_bytes
from megatron_lite.distributed.step_watch import Event
from megatron_lite.distributed.traffic import Total, Traffic
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.model.gpt import model_layers
from megatron_lite.planner.activations import Saved, Sizes, kept_by_layer, saved_by_layer
from megatron_lite.planner.peaks import evaluation_peaks, largest_temporaries, peaks_by_layer
from megatron_lite.planner.runtime import runtime_needs
from megatron_lite.zero.multi_stage import MultiStage


class Done:
    """A collective that has finished already."""

    def wait(self) -> None:
        """Return at once."""


class SimulatedGroup:
    """One rank of a group that does not exist: counts collectives and moves nothing."""

    def __init__(self, rank: int, world_size: int, device_type: str, device: str = "meta") -> None:
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self.traffic = Traffic(world_size)
        self._device_type = device_type

    def all_gather(self, buffer: Tensor, kind: str = "gather") -> Done:
        self.traffic.started(kind, buffer, Done())
        return Done()

    def reduce_scatter(self, buffer: Tensor, kind: str = "reduce") -> Done:
        self.traffic.started(kind, buffer, Done())
        return Done()

    def reduction_scratch_bytes(self, shard_numel: int, dtype: torch.dtype) -> int:
        """Bytes on the planned type of device."""
        return reduction_scratch_bytes(self._device_type, self.world_size, shard_numel, dtype)

    def wait_for(self, event: Event) -> None:
        """Return at once: a plan queues nothing."""


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes of activations at one level of recomputation, the same in all blocks or by block."""

    level: str
    kept: list[Saved]  # per layer, for one micro-batch
    held: int  # by all layers and micro-batches, when the backward pass begins
    peak: int  # most at any time, temporary tensors included
    peak_at: str  # layer and pass of the peak


@dataclass(frozen=True)
class Plan:
    """Memory and traffic of one rank of a run."""

    config: Config  # without `auto`
    world_size: int
    device_type: str
    model: MultiStage  # on the meta device
    traffic: dict[str, Total]  # of one step after the first
    activations: dict[str, ActivationMemory]  # by level

    @property
    def state_bytes(self) -> int:
        """Weights, gradients, moments, buffers, scratch."""
        return self.model.memory.total_bytes()

    @property
    def runtime(self) -> dict[str, int]:
        """Bytes beside the tensors of a step, by name."""
        return runtime_bytes(self.config, self.model, self.device_type)

    def peak_bytes(self, level: str | None = None) -> int:
        """State and activations at their peak."""
        return self.state_bytes + self.activations[level or self.config.performance.mlp_recompute_level].peak

    def needed_bytes(self, level: str | None = None) -> int:
        """Memory that the device must have: the peak and the runtime."""
        return self.peak_bytes(level) + sum(self.runtime.values())


def make_plan(config: Config, world_size: int, device_type: str, rank: int = 0) -> Plan:
    """Plan one of `world_size` ranks on `device_type`. `config`: resolved, without `auto`."""
    group = SimulatedGroup(rank, world_size, device_type)
    model = planned_model(config, group, device_type)
    levels = dict.fromkeys((*RECOMPUTE_LEVELS, config.performance.mlp_recompute_level))
    activations = {level: activation_memory(config, model, device_type, level) for level in levels}
    return Plan(config, world_size, device_type, model, count_traffic(model, group), activations)


def planned_model(config: Config, group: SimulatedGroup, device_type: str) -> MultiStage:
    """The engine's own model for one rank of `group`, on the meta device."""
    return MultiStage(
        model_layers(config, choose_kernels(config, torch.device(device_type), planned=True)),
        config.multi_stage,
        config.batch,
        config.distributed.training_dtype,
        group,
        moments=config.optimizer.moments,
        whole_matrices=config.optimizer.whole_matrices,
        averaged=config.averaging.enabled,
    )


def needed_bytes(config: Config, model: MultiStage, device_type: str) -> int:
    """Memory that the device must have, as `Plan.needed_bytes`, without the rest of a plan.

    model: the `planned_model` of `config`, or of one that differs in recomputation only.
    """
    peak = activation_memory(config, model, device_type, config.performance.mlp_recompute_level).peak
    return model.memory.total_bytes() + peak + sum(runtime_bytes(config, model, device_type).values())


def runtime_bytes(config: Config, model: MultiStage, device_type: str) -> dict[str, int]:
    """Bytes beside the tensors of a step, by name."""
    sizes = micro_batch_sizes(config, model, device_type, config.performance.mlp_recompute_level)
    tensors = sum(row.count for row in model.memory.table())
    ranks = model.group.world_size
    needs = runtime_needs(device_type, ranks, config.data.num_workers, tensors, largest_temporaries(sizes))
    if device_type == "cpu" and (copy := host_copy_bytes(config, model)):
        needs["copy for async_checkpoint"] = copy
    return needs


def count_traffic(model: MultiStage, group: SimulatedGroup) -> dict[str, Total]:
    """Replay the schedule of a step without computing; return its collectives by kind, as `Traffic` counts them.

    The second of two steps counts: it does not gather again what a buffer still holds.
    """
    for _ in range(2):
        group.traffic.take()
        for step in model.training_schedule:
            for index in step.gather:
                model.stages[index].gather()
            for index in step.needs:
                model.stages[index].require_weights()
            for index in step.accumulate:
                model.stages[index].accumulate()
            for index, again in step.reduce:
                model.stages[index].reduce(again)
        for stage in model.stages:
            stage.finish_reduction()
        for stage in model.stages:
            if stage.update_buffer is not None:
                for exchange in (stage.gather_update, stage.reduce_update):
                    exchange()
                    stage.update_buffer.wait()
            if stage.trainable is not None:
                model.updated(stage)
        model.gather_ahead()
    return group.traffic.take()


def activation_memory(config: Config, model: MultiStage, device_type: str, level: str) -> ActivationMemory:
    """Walk through the schedule of a step, and an evaluation if there is one, to find what layers hold and its peak."""
    sizes = micro_batch_sizes(config, model, device_type, level)
    saved = saved_by_layer(sizes)
    kept, peaks = kept_by_layer(sizes, saved), [peaks_by_layer(sizes, saved, adds) for adds in (False, True)]
    names = [layer.name for stage in model.stages for layer in stage.layers]
    first = min(stage.index for stage in model.stages if stage.runs_backward)
    live = held = 0
    needed: list[tuple[int, str]] = []  # bytes at each layer and pass, and its name
    in_backward: set[int] = set()  # micro-batches between two stages of their backward pass
    written: set[int] = set()  # stages whose buffers hold gradients that no reduction has taken yet
    for step in model.training_schedule:
        layers = model.split[step.stage]
        own_peaks = peaks[not written.isdisjoint(step.accumulate)]
        written.update(step.accumulate)
        written.difference_update(stage for stage, _ in step.reduce)
        # Each holds a gradient, and the output of the stage that the gradient goes to.
        between_stages = 2 * sizes.stream * len(in_backward)
        if step.kind == "forward":
            for index in layers:
                live += kept[index].total()
                needed.append((live + between_stages + own_peaks[index].forward, f"{names[index]} forward"))
            held = max(held, live)
            continue
        for index in reversed(layers):
            # Below the last layer: a gradient within the stage, beside the one that the stage began with.
            within_stage = 0 if index == layers[-1] else sizes.stream
            needed.append(
                (live + between_stages + within_stage + own_peaks[index].backward, f"{names[index]} backward")
            )
            live -= kept[index].total()
        if step.stage > first:
            in_backward.add(step.micro_batch)
        else:
            in_backward.discard(step.micro_batch)
    if config.training.validation_iters or config.training.test_iters:
        needed += evaluation_memory(config, model, device_type)
    peak, peak_at = max(needed, key=lambda entry: entry[0])
    return ActivationMemory(level, kept, held, peak, peak_at)


def evaluation_memory(config: Config, model: MultiStage, device_type: str) -> list[tuple[int, str]]:
    """Bytes that each layer needs in an evaluation, which saves nothing for a backward pass, and the layer's name."""
    sizes = micro_batch_sizes(config, model, device_type, "none", config.batch.eval_micro_batch_size)
    peaks = evaluation_peaks(sizes)
    needed = []
    for stage, layers in zip(model.stages, model.split, strict=True):
        for index, layer in zip(layers, stage.layers, strict=True):
            # The layer's input and, if that is another tensor, the stage's.
            inputs = (index > 0) + (index > 0 and index != layers[0])
            needed.append((sizes.stream * inputs + peaks[index], f"{layer.name} evaluation"))
    return needed


def micro_batch_sizes(
    config: Config, model: MultiStage, device_type: str, level: str, micro_batch_size: int | None = None
) -> Sizes:
    """Sizes of a micro-batch, by default of one in training."""
    samples = micro_batch_size or config.batch.micro_batch_size
    assert samples is not None, "resolved"
    trained = {name for name, parameter in model.parameters() if parameter.requires_grad}
    return Sizes(config, model.precision, trained, torch.device(device_type), level, samples)
