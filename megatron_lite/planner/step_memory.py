"""The memory of a step beside the state: the passes of a step in the order of the schedule, and the peak among them.

A search looks at thousands of configurations, so nothing is computed twice that is alike. The state of a model is read
once (`Partition`). Blocks with the same level of recomputation and the same frozen parts are walked through once. Of
equal micro-batches only the first two and the last can reach a peak: what is held rises from one to the next in the
forward pass, and falls or rises evenly in the backward pass; only the first finds no gradients in the buffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_lite.checkpoint.space import host_copy_bytes
from megatron_lite.config import Config
from megatron_lite.distributed.rank_group import reduction_scratch_bytes
from megatron_lite.optimizer.rules.matrices import Matrix, matrices_of
from megatron_lite.planner.activations import FP32_BYTES, Saved, Sizes, Trained, kept_by_layer, saved_by_layer
from megatron_lite.planner.peaks import Peaks, evaluation_peaks, largest_temporaries, peaks_by_layer
from megatron_lite.planner.runtime import runtime_needs
from megatron_lite.zero.multi_stage import MultiStage


class Partition:
    """A rank's model as plans read it, the same for configurations with the same state."""

    def __init__(self, model: MultiStage) -> None:
        self.model = model
        names = [name for name, parameter in model.parameters() if parameter.requires_grad]
        self.trained = Trained(names, sum(len(layers) for layers in model.split) - 2)
        self.names = [layer.name for stage in model.stages for layer in stage.layers]
        table = model.memory.table()
        self.state_bytes, self.state_tensors = sum(row.bytes for row in table), sum(row.count for row in table)
        trained = [stage.trainable for stage in model.stages if stage.trainable is not None]
        self.largest_shard = max((part.layout.shard_numel for part in trained), default=0)  # elements
        # Of the optimizer's temporaries, for one matrix at a time: see `kernels/newton_schulz.py`.
        matrices = [(*sorted((m.rows, m.columns)), len(m.tiles) > 1) for m in _matrices(model)]
        self.update_bytes = max(
            (4 * small * (large + small) + 2 * small * large * assembled for small, large, assembled in matrices),
            default=0,
        )
        gathered = max((part.replicas.gathered_numel for part in trained), default=0)
        self.replica_bytes = gathered * model.precision.gradients.itemsize  # of a sum of gradients over ranks
        self.first = min(stage.index for stage in model.stages if stage.runs_backward)
        users = Counter(plan.grad_buffer for plan in model.memory.plans)
        # Whether a stage finds gradients of an earlier group of micro-batches: no other stage takes its buffer.
        self.keeps_gradients = [
            any(users[model.memory.plans[used].grad_buffer] == 1 for used in (stage, *plan.borrows_from))
            for stage, plan in enumerate(model.memory.plans)
        ]


def _matrices(model: MultiStage) -> Iterator[Matrix]:
    """Yield the matrices that the optimizer needs whole."""
    for stage in model.stages:
        if stage.update_buffer is not None:
            yield from matrices_of(stage)


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes of activations at one level of recomputation, the same in all blocks or by block."""

    level: str
    kept: list[Saved]  # per layer, for one micro-batch
    held: int  # by all layers and micro-batches, when the backward pass begins
    peak: int  # most at any time, temporary tensors included
    peak_at: str  # layer and pass of the peak


def activation_memory(config: Config, partition: Partition, device_type: str, level: str) -> ActivationMemory:
    """Walk through a step, and an evaluation if there is one, to find what layers hold and the peak."""
    sizes = micro_batch_sizes(config, partition, device_type, level)
    saved = saved_by_layer(sizes)
    kept = kept_by_layer(sizes, saved)
    peaks = [peaks_by_layer(sizes, saved, adds) for adds in (False, True)]
    walk = _StepWalk(partition, sizes.stream, [layer.total() for layer in kept], peaks)
    batch = config.batch
    assert batch.depth_first_micro_batches and batch.breadth_first_micro_batches, "resolved"
    for again in (False, True)[: batch.depth_first_micro_batches]:
        walk.forward(batch.breadth_first_micro_batches, again)
        walk.backward(batch.breadth_first_micro_batches, again)
    needed = [*walk.needed, (partition.update_bytes, "the update")]
    needed.append((partition.replica_bytes, "sums of gradients"))
    if config.training.validation_iters or config.training.test_iters:
        needed += evaluation_memory(config, partition, device_type)
    peak, peak_at = max(needed, key=lambda entry: entry[0])
    return ActivationMemory(level, kept, walk.held, peak, peak_at)


class _StepWalk:
    """Bytes that are needed at each layer and pass of a step.

    peaks: of each layer, if the buffers hold no gradients yet, and if they do.
    """

    def __init__(self, partition: Partition, stream: int, kept: list[int], peaks: list[list[Peaks]]) -> None:
        self.needed: list[tuple[int, str]] = []
        self.held = self._live = 0
        self._partition, self._stream, self._kept, self._peaks = partition, stream, kept, peaks

    def forward(self, micro_batches: int, again: bool) -> None:
        """Walk through the forward passes of a breadth-first group. again: another group came before."""
        names = self._partition.names
        for stage, layers in enumerate(self._partition.model.split):
            for _, count, adds in self._runs(stage, micro_batches, again):
                self._live += (count - 1) * sum(self._kept[index] for index in layers)
                for index in layers:
                    self._live += self._kept[index]
                    self.needed.append((self._live + self._peaks[adds][index].forward, f"{names[index]} forward"))
        self.held = max(self.held, self._live)

    def backward(self, micro_batches: int, again: bool) -> None:
        """Walk through the backward passes of the group."""
        names, first, last = self._partition.names, self._partition.first, len(self._partition.model.split) - 1
        for stage in range(last, first - 1, -1):
            layers = self._partition.model.split[stage]
            for number, count, adds in self._runs(stage, micro_batches, again):
                # Between two stages a micro-batch holds a gradient, and the output of the stage that it goes to.
                done, waiting = number * (stage > first), (micro_batches - number) * (stage < last)
                between = 2 * self._stream * (done + waiting)
                for index in reversed(layers):
                    # Below the last layer: a gradient within the stage, beside the one that the stage began with.
                    within = 0 if index == layers[-1] else self._stream
                    peak = self._live + between + within + self._peaks[adds][index].backward
                    self.needed.append((peak, f"{names[index]} backward"))
                    self._live -= self._kept[index]
                self._live -= (count - 1) * sum(self._kept[index] for index in layers)

    def _runs(self, stage: int, micro_batches: int, again: bool) -> Iterator[tuple[int, int, bool]]:
        """Yield runs of micro-batches: the number of the first, how many, whether the buffers hold gradients."""
        yield 0, 1, again and self._partition.keeps_gradients[stage]
        if micro_batches > 2:
            yield 1, micro_batches - 2, True
        if micro_batches > 1:
            yield micro_batches - 1, 1, True


def evaluation_memory(config: Config, partition: Partition, device_type: str) -> list[tuple[int, str]]:
    """Bytes that each layer needs in an evaluation, which saves nothing for a backward pass, and the layer's name."""
    sizes = micro_batch_sizes(config, partition, device_type, "none", config.batch.eval_micro_batch_size)
    peaks = evaluation_peaks(sizes)
    needed = []
    for layers in partition.model.split:
        for index in layers:
            # The layer's input and, if that is another tensor, the stage's.
            inputs = (index > 0) + (index > 0 and index != layers[0])
            needed.append((sizes.stream * inputs + peaks[index], f"{partition.names[index]} evaluation"))
    return needed


def runtime_bytes(config: Config, partition: Partition, device_type: str) -> dict[str, int]:
    """Bytes beside the tensors of a step, by name."""
    sizes = micro_batch_sizes(config, partition, device_type, config.performance.mlp_recompute_level)
    data, tensor = partition.model.group.world_size, partition.model.tensor.world_size
    # The group of all ranks, which is the data-parallel one if there is no other; and one that shares the layers.
    groups = [data * tensor, *([data, tensor] if tensor > 1 else [])]
    temporaries, workers = largest_temporaries(sizes), config.data.num_workers
    needs = runtime_needs(device_type, groups, workers, partition.state_tensors, temporaries)
    if device_type == "cpu" and tensor > 1:
        needs["scratch of tensor exchanges"] = _exchange_scratch_bytes(sizes)
    if device_type == "cpu" and (copy := host_copy_bytes(config, partition.model)):
        needs["copy for async_checkpoint"] = copy
    if "updates" in config.tracking.watch:
        needs["old weights for watch"] = partition.largest_shard * FP32_BYTES
    return needs


def _exchange_scratch_bytes(sizes: Sizes) -> int:
    """Bytes in which a CPU receives the parts of hidden states; two ranks send each other whole ones."""
    if sizes.ranks == 2 and not sizes.splits_tokens:
        return sizes.whole_hidden
    numel = sizes.tokens * sizes.model.hidden_size // sizes.ranks
    return reduction_scratch_bytes("cpu", sizes.ranks, numel, sizes.precision.training)


def micro_batch_sizes(
    config: Config, partition: Partition, device_type: str, level: str, micro_batch_size: int | None = None
) -> Sizes:
    """Sizes of a micro-batch, by default of one in training."""
    samples = micro_batch_size or config.batch.micro_batch_size
    assert samples is not None, "resolved"
    return Sizes(config, partition.model.precision, partition.trained, torch.device(device_type), level, samples)
