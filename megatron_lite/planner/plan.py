"""What a run will need, before anything is allocated: memory and traffic of one rank, and the values of `auto`.

The books are kept by the engine itself: a `MultiStage` is built on the meta device, for one rank among as many as are
asked for, and its collectives are counted while its own schedule is replayed. Only what layers keep between forward and
backward is written down apart, in `activations.py` and `transients.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config import RECOMPUTE_LEVELS, Config
from megatron_lite.distributed.process_group import reduction_scratch_bytes
from megatron_lite.distributed.traffic import Total, Traffic
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.model.embedding_and_head import chunk_tokens
from megatron_lite.model.gpt import model_layers
from megatron_lite.planner.activations import FP32_BYTES, Kept, Pass, kept_by_layer, made_by_layer
from megatron_lite.planner.peaks import evaluation_peaks, peaks_by_layer
from megatron_lite.zero.multi_stage import MultiStage


class Done:
    """A collective that there is nothing to wait for."""

    def wait(self) -> None:
        """Return at once."""


class SimulatedGroup:
    """One rank among `world_size` that do not exist: counts the collectives, moves nothing."""

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
        """As on the device that is planned for."""
        return reduction_scratch_bytes(self._device_type, self.world_size, shard_numel, dtype)


@dataclass(frozen=True)
class ActivationMemory:
    """At one level of recomputation, in bytes."""

    level: str
    kept: list[Kept]  # by layer, of one micro-batch
    held: int  # by all layers and micro-batches, when the backward pass begins
    peak: int  # `held`, or a little less or more, and what is needed for a moment
    peak_at: str  # the layer and pass of the peak


@dataclass(frozen=True)
class Plan:
    """What one rank of a run will need."""

    config: Config  # without `auto`
    world_size: int
    device_type: str
    model: MultiStage  # on the meta device
    traffic: dict[str, Total]  # of one step, once the first is done
    activations: dict[str, ActivationMemory]  # by level

    @property
    def state_bytes(self) -> int:
        """Weights, gradients, moments, buffers, scratch."""
        return sum(self.model.memory_bytes().values())

    def peak_bytes(self, level: str | None = None) -> int:
        """State and activations at their peak; without the reserve."""
        return self.state_bytes + self.activations[level or self.config.performance.mlp_recompute_level].peak


def make_plan(config: Config, world_size: int, device_type: str, rank: int = 0) -> Plan:
    """The plan of a resolved configuration without `auto`, for one rank of `world_size` on `device_type`."""
    group = SimulatedGroup(rank, world_size, device_type)
    layers = model_layers(config, choose_kernels(config, torch.device(device_type), planned=True))
    dtype = config.distributed.training_dtype
    model = MultiStage(
        layers,
        config.multi_stage,
        config.batch,
        dtype,
        group,
        moments=config.optimizer.moments,
        whole_matrices=config.optimizer.whole_matrices,
        averaged=config.averaging.enabled,
    )
    activations = {level: activation_memory(config, model, device_type, level) for level in RECOMPUTE_LEVELS}
    return Plan(config, world_size, device_type, model, count_traffic(model, group), activations)


def count_traffic(model: MultiStage, group: SimulatedGroup) -> dict[str, Total]:
    """The collectives of a step by kind, as `Traffic` counts them, from a replay of the schedule without computing.

    It is the second step that counts: what a buffer holds from the step before is not gathered again.
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
            if stage.gradients is not None:
                stage.gradients.wait()
        for stage in model.stages:
            if stage.update_buffer is not None:
                stage.gather_update()
                stage.update_buffer.wait()
                stage.reduce_update()
                stage.update_buffer.wait()
            if stage.trainable is not None:
                model.updated(stage)
        model.gather_ahead()
    return group.traffic.take()


def activation_memory(config: Config, model: MultiStage, device_type: str, level: str) -> ActivationMemory:
    """What the layers of a model keep, and its peak, found by going through the schedule."""
    one = one_pass(config, model, device_type, level)
    made = made_by_layer(config.model, one)
    kept = kept_by_layer(config.model, one, made)
    peaks = peaks_by_layer(config.model, one, made)
    names = [layer.name for stage in model.stages for layer in stage.layers]
    totals = [layer.total for layer in kept]
    hidden = one.residual(config.model.hidden_size)
    live = peak = held = 0
    peak_at = ""
    on_way: set[int] = set()  # micro-batches that are on their way back
    first = min(stage.index for stage in model.stages if stage.runs_backward)
    for step in model.training_schedule:
        layers = model.split[step.stage]
        forward = step.kind == "forward"
        for index in layers if forward else reversed(layers):
            moment = peaks[index].forward if forward else peaks[index].backward
            live += totals[index] if forward else 0
            between = 2 * hidden * len(on_way)
            if not forward and index != layers[-1]:
                between += hidden  # the gradient inside of the stage, beside the one that the stage began with
            if live + between + moment > peak:
                peak, peak_at = live + between + moment, f"{names[index]} {step.kind}"
            live -= 0 if forward else totals[index]
        held = max(held, live)
        if not forward:
            # Between stages: a gradient, and the output of the stage that it goes to.
            (on_way.add if step.stage > first else on_way.discard)(step.micro_batch)
    if config.training.validation_iters or config.training.test_iters:
        peak, peak_at = max((peak, peak_at), evaluation_peak(config, model, device_type))
    return ActivationMemory(level, kept, held, peak, peak_at)


def evaluation_peak(config: Config, model: MultiStage, device_type: str) -> tuple[int, str]:
    """The most that the layers need in an evaluation, which keeps nothing for a backward pass, and where."""
    one = one_pass(config, model, device_type, "none", config.batch.eval_micro_batch_size)
    peaks, hidden = evaluation_peaks(config.model, one), one.residual(config.model.hidden_size)
    needed = []
    for stage, layers in zip(model.stages, model.split, strict=True):
        for index, layer in zip(layers, stage.layers, strict=True):
            # The layer's input and, if that is another one, the stage's.
            held = hidden * ((index > 0) + (index > 0 and index != layers[0]))
            needed.append((held + peaks[index], f"{layer.name} evaluation"))
    return max(needed, key=lambda entry: entry[0])


def one_pass(
    config: Config, model: MultiStage, device_type: str, level: str, micro_batch_size: int | None = None
) -> Pass:
    """The sizes that the arithmetic of a micro-batch needs; None: of one in training."""
    batch, precision = config.batch, model.precision
    size = micro_batch_size or batch.micro_batch_size
    assert size is not None
    tokens = size * batch.sequence_length
    return Pass(
        batch=size,
        length=batch.sequence_length,
        itemsize=precision.training.itemsize,
        residual_itemsize=FP32_BYTES if config.model.full_precision_residual else precision.training.itemsize,
        grad_itemsize=precision.gradients.itemsize,
        on_gpu=device_type == "cuda",
        chunk_tokens=chunk_tokens(
            config.performance.cross_entropy_splits, tokens, torch.device(device_type), precision.training.itemsize
        ),
        trained={name for name, parameter in model.parameters() if parameter.requires_grad},
        level=level,
        kernels=choose_kernels(config, torch.device(device_type), planned=True),
    )
