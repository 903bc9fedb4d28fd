"""The memory of a step: the costs of its stages, summed along the engine's own schedule.

A search looks at thousands of configurations, so equal stages are measured once: those whose layers compute and
recompute the same, with the same micro-batch size. Depth-first micro-batches after the second repeat its costs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import Config
from megatron_lite.config.model import by_block
from megatron_lite.kernels.eight_bit import eight_bit_of
from megatron_lite.model.block import Block
from megatron_lite.model.layer import MicroBatch
from megatron_lite.optimizer.rules.muon import matrices_of
from megatron_lite.planner.speeds import Product
from megatron_lite.planner.stage_costs import Saved, StageCosts, StageMeter
from megatron_lite.zero.multi_stage import MultiStage
from megatron_lite.zero.schedule import Step
from megatron_lite.zero.stage import Stage


def training_steps(model: MultiStage, depth_first: int, breadth_first: int) -> list[Step]:
    """Return the steps of an iteration of depth_first times breadth_first micro-batches."""
    passes = model.order.training(depth_first * breadth_first, breadth_first)
    return model.order.steps(model.ranks.rank, model.memory.plans, passes)


Measured = dict[Any, Any]  # costs, keyed by what they depend on


class Partition:
    """A rank's model for plans, shared by configurations that differ only in their steps.

    measured: costs of equal stages; models that compute the same may share it.
    """

    def __init__(self, model: MultiStage, traffic: Any, device_type: str, measured: Measured | None = None) -> None:
        self.model, self.device_type = model, device_type
        self._meter = StageMeter(torch.device(device_type), traffic)
        self._measured: Measured = {} if measured is None else measured
        self._streams: dict[int, Tensor] = {}
        self._schedules: dict[tuple[int, int], list[Step]] = {}
        self.state_bytes = sum(row.bytes for row in model.memory.table())
        trained = [stage.trainable for stage in model.stages if stage.trainable is not None]
        self.largest_shard = max((part.layout.shard_numel for part in trained), default=0)  # elements
        self.update_bytes, self.update_products = 0, Counter[Product]()  # of Muon, for one matrix at a time
        updated = [stage for stage in model.stages if stage.update_buffer is not None]
        matrices = ((m.rows, m.columns, len(m.tiles) > 1) for stage in updated for m in matrices_of(stage))
        for (rows, columns, assembled), count in Counter(matrices).items():
            cost = self._meter.orthogonalization(rows, columns)
            self.update_bytes = max(self.update_bytes, cost.peak + 2 * rows * columns * assembled)
            products = (item for item in cost.work if isinstance(item, Product))
            self.update_products.update({product: count * cost.work[product] for product in products})
        gathered = max((part.replicas.gathered_numel for part in trained if part.replicas), default=0)
        self.replica_bytes = gathered * model.precision.gradients.itemsize  # for summing gradients over ranks
        self._alike = [[_alike(layer) for layer in stage.layers] for stage in model.stages]

    def training(self, config: Config, level: str) -> list[StageCosts]:
        """Return each stage's costs in training. level: one recompute level for all MLPs, or levels by block."""
        assert config.batch.micro_batch_size, "resolved"
        levels, whole = by_block(level, config.model.num_layers), config.performance.recompute_layers
        micro_batch, costs, blocks = _micro_batch(config, config.batch.micro_batch_size), [], 0
        for stage, alike in zip(self.model.stages, self._alike, strict=True):
            recomputation = []
            for layer in stage.layers:
                if isinstance(layer, Block):
                    recomputation.append((levels[blocks], blocks < whole))
                    layer.recompute(*recomputation[-1])
                    blocks += 1
            makes_angles = stage.index == 1 and micro_batch.positions is not None
            keeps_input = stage.index > 0 and self.model.stages[stage.index - 1].runs_backward
            key = (*alike, *recomputation, stage.runs_backward, stage.wants_input_gradient, keeps_input, makes_angles)
            key = (len(micro_batch.tokens), key)
            if key not in self._measured:
                stream = self._stream(stage, micro_batch)
                shared = {} if makes_angles else micro_batch.shared
                batch = dataclasses.replace(micro_batch, shared=shared)
                self._measured[key] = self._meter.training(stage, batch, stream, keeps_input)
            costs.append(self._measured[key])
        return costs

    def evaluation(self, config: Config) -> list[tuple[int, str]]:
        """Return the bytes that each stage needs in an evaluation, excluding the state, and its name."""
        samples = config.batch.eval_micro_batch_size or config.batch.micro_batch_size
        assert samples, "resolved"
        micro_batch, needed = (
            dataclasses.replace(_micro_batch(config, samples), gradient_scale=None, dropout_seed=None),
            [],
        )
        for stage, alike in zip(self.model.stages, self._alike, strict=True):
            key = ("evaluation", len(micro_batch.tokens), *alike)
            if key not in self._measured:
                stream = self._stream(stage, micro_batch)
                cost, _ = self._meter.evaluation(stage, micro_batch, stream)
                self._measured[key] = cost.peak + (0 if stream is None else stream.nbytes)
            needed.append((self._measured[key], f"{_name(stage)} evaluation"))
        return needed

    def schedule(self, config: Config) -> list[Step]:
        """Return an iteration's steps, without the depth-first micro-batches that repeat the second."""
        batch = config.batch
        assert batch.depth_first_micro_batches and batch.breadth_first_micro_batches, "resolved"
        depth, breadth = key = min(batch.depth_first_micro_batches, 2), batch.breadth_first_micro_batches
        if key not in self._schedules:
            self._schedules[key] = training_steps(self.model, depth, breadth)
        return self._schedules[key]

    def _stream(self, stage: Stage, micro_batch: MicroBatch) -> Tensor | None:
        """Return a tensor shaped as a stage's input, after the first block has made what all blocks share."""
        samples = len(micro_batch.tokens)
        if samples not in self._streams or (micro_batch.positions is not None and not micro_batch.shared):
            _, self._streams[samples] = self._meter.evaluation(self.model.stages[0], micro_batch, None)
            self._meter.evaluation(self.model.stages[1], micro_batch, self._streams[samples])
        return self._streams[samples] if stage.index else None


def _alike(layer: Any) -> tuple[Any, ...]:
    """Return a key that equal layers share, except for what they recompute."""
    parameters = ((name, parameter.shape, parameter.requires_grad) for name, parameter in layer.named_parameters())
    rounded = (eight_bit.name.rpartition(f"{layer.name}.")[2] for eight_bit in eight_bit_of([layer]))
    return (type(layer), *parameters, *rounded)


def _micro_batch(config: Config, samples: int) -> MicroBatch:
    """Return a micro-batch without values."""
    tokens = torch.empty(samples, config.batch.sequence_length, dtype=torch.int64, device="meta")
    positions = tokens if config.data.reset_position_ids else None
    return MicroBatch(tokens, tokens, torch.empty((), device="meta"), dropout_seed=0, positions=positions)


def _name(stage: Stage) -> str:
    names = [layer.name for layer in stage.layers]
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1].rpartition('.')[2]}"


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes of activations at one recompute level, uniform or by block."""

    level: str
    saved: list[Saved]  # per layer and micro-batch
    held: int  # in all layers and micro-batches when the backward pass begins
    peak: int  # including temporary tensors and 8-bit weights
    peak_at: str  # stage and pass of the peak


def activation_memory(config: Config, partition: Partition, level: str) -> ActivationMemory:
    """Walk through a step and any evaluation to find the saved activations and the peak."""
    costs = partition.training(config, level)
    held, needed = _walk(partition, partition.schedule(config), costs)
    needed += [(partition.update_bytes, "the update"), (partition.replica_bytes, "sums of gradients")]
    if config.training.validation_iters or config.training.test_iters:
        casts: Counter[int] = Counter()  # 8-bit weights by weight buffer, at most
        for plan, cost in zip(partition.model.memory.plans, costs, strict=True):
            casts |= Counter({plan.weight_buffer: cost.cast_bytes})
        needed += [(num_bytes + casts.total(), name) for num_bytes, name in partition.evaluation(config)]
    peak, peak_at = max(needed, key=lambda entry: entry[0])
    return ActivationMemory(level, [layer for stage in costs for layer in stage.saved], held, peak, peak_at)


def _walk(
    partition: Partition, schedule: Sequence[Step], costs: Sequence[StageCosts]
) -> tuple[int, list[tuple[int, str]]]:
    """Return the most bytes held after a forward step, and each step's peak with its name."""
    plans, names = partition.model.memory.plans, [_name(stage) for stage in partition.model.stages]
    holders: dict[int | None, int] = {}  # stage by gradient buffer
    casts: dict[int, int] = {}  # 8-bit weights by weight buffer
    live = held = 0
    needed = []
    for step in schedule:
        for stage in step.gather:
            casts.pop(plans[stage].weight_buffer, None)
        casts[plans[step.stage].weight_buffer] = costs[step.stage].cast_bytes
        adds = all(holders.get(plans[stage].grad_buffer) == stage for stage in step.accumulate)
        cost = getattr(costs[step.stage], step.kind)[adds]
        needed.append((live + sum(casts.values()) + cost.peak, f"{names[step.stage]} {step.kind}"))
        live += cost.change
        held = max(held, live) if step.kind == "forward" else held
        holders |= {plans[stage].grad_buffer: stage for stage in step.accumulate}
        for stage, _ in step.reduce:
            holders.pop(plans[stage].grad_buffer, None)
    return held, needed
