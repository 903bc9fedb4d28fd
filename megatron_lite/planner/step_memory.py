"""Compute a step's memory: the costs of its stages, summed along the engine's own schedule.

A search looks at thousands of configurations, so equal stages are measured once: those whose layers
compute and recompute the same, with the same micro-batch size. Depth-first micro-batches after the
second repeat its costs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.config import Config
from megatron_lite.config.model import by_block
from megatron_lite.kernels.eight_bit import eight_bit_of
from megatron_lite.model.block import Block
from megatron_lite.model.layer import MicroBatch
from megatron_lite.optimizer.rules.muon import matrices_of
from megatron_lite.planner.durations import scheduled_durations
from megatron_lite.planner.speeds import Product
from megatron_lite.planner.stage_costs import Cost, Saved, StageCosts, StageMeter
from megatron_lite.schedules.batch_size import Split
from megatron_lite.zero.messages import MOST_SENT
from megatron_lite.zero.multi_stage import MultiStage
from megatron_lite.zero.pipeline import evaluation_passes
from megatron_lite.zero.schedule import Order, Step
from megatron_lite.zero.simulation import LOANS
from megatron_lite.zero.stage import Stage

Measured = dict[Any, Any]  # costs, keyed by what they depend on
Size = tuple[int, int]  # per iteration: depth-first and breadth-first micro-batches


class Partition:
    """A rank's model for plans, shared by configurations that differ only in their steps.

    whole: a model with all stages, which are measured, and its groups' traffic; without a pipeline,
    `model`. measured: costs of equal stages; models that compute the same may share it.
    """

    def __init__(
        self,
        model: MultiStage,
        whole: MultiStage,
        traffic: Any,
        device_type: str,
        measured: Measured,
    ) -> None:
        self.model = model
        self.whole = whole
        self.device_type = device_type
        self._meter = StageMeter(torch.device(device_type), traffic)
        self._measured = measured
        self._streams: dict[int, Tensor] = {}
        self._orders: dict[Any, Order] = {}
        self._steps: dict[Any, list[Step]] = {}
        self.state_bytes = sum(row.bytes for row in model.memory.table())
        trained = [part for stage in model.stages for part in stage.trainable]
        # elements
        self.largest_shard = max(
            (sum(part.layout.shard_numel for part in stage.trainable) for stage in model.stages),
            default=0,
        )
        # of Muon, for one matrix at a time
        self.update_bytes = 0
        self.update_products = Counter[Product]()
        updated = [stage for stage in model.stages if stage.update_buffer is not None]
        matrices = (
            (m.rows, m.columns, len(m.tiles) > 1)
            for stage in updated
            for part in stage.trainable
            for m in matrices_of(part)
        )
        for (rows, columns, assembled), count in Counter(matrices).items():
            cost = self._meter.orthogonalization(rows, columns)
            self.update_bytes = max(self.update_bytes, cost.peak + 2 * rows * columns * assembled)
            products = (item for item in cost.work if isinstance(item, Product))
            self.update_products.update(
                {product: count * cost.work[product] for product in products}
            )
        gathered = max(
            (part.replicas.gathered_numel for part in trained if part.replicas), default=0
        )
        # for summing gradients over ranks
        self.replica_bytes = gathered * model.precision.gradients.itemsize
        self._alike = [[_alike(layer) for layer in stage.layers] for stage in whole.stages]

    def training(self, config: Config, level: str) -> list[StageCosts]:
        """Return each stage's training costs, on its pipeline rank.

        level: one recompute level for all MLPs, or levels by block.
        """
        levels = by_block(level, config.model.num_layers)
        whole = config.performance.recompute_layers
        micro_batch = planned_micro_batch(config)
        costs = []
        blocks = 0
        rank_of = self.model.pipeline.rank_of
        in_parts = self.model.order.schedule == "zero_bubble_v"
        for stage, alike in zip(self.whole.stages, self._alike, strict=True):
            recomputation = []
            for layer in stage.layers:
                if isinstance(layer, Block):
                    recomputation.append((levels[blocks], blocks < whole))
                    layer.recompute(*recomputation[-1])
                    blocks += 1
            # on its rank, apart from an embedding
            is_first = rank_of[stage.index] not in rank_of[1 : stage.index]
            makes_angles = stage.index > 0 and is_first and micro_batch.positions is not None
            before = self.whole.stages[stage.index - 1] if stage.index > 0 else None
            keeps_input = (
                before is not None
                and before.runs_backward
                and rank_of[before.index] == rank_of[stage.index]
            )
            key = (
                *alike,
                *recomputation,
                stage.runs_backward,
                stage.wants_input_gradient,
                keeps_input,
                makes_angles,
            )
            key = (len(micro_batch.tokens), key, in_parts)
            if key not in self._measured:
                stream = self._stream(stage, micro_batch)
                batch = dataclasses.replace(
                    micro_batch, shared={} if makes_angles else micro_batch.shared
                )
                self._measured[key] = self._meter.training(
                    stage, batch, stream, keeps_input, in_parts
                )
            costs.append(self._measured[key])
        return costs

    def evaluation(self, config: Config) -> list[StageCosts]:
        """Return each stage's costs in an evaluation."""
        micro_batch, costs = planned_micro_batch(config, evaluates=True), []
        for stage, alike in zip(self.whole.stages, self._alike, strict=True):
            key = ("evaluation", len(micro_batch.tokens), *alike)
            if key not in self._measured:
                stream = self._stream(stage, micro_batch)
                cost, _ = self._meter.evaluation(stage, micro_batch, stream)
                cost = dataclasses.replace(
                    cost, change=cost.change - (0 if stream is None else stream.nbytes)
                )
                self._measured[key] = StageCosts(
                    (cost, cost), (Cost(), Cost()), (Cost(), Cost()), (), 0
                )
            costs.append(self._measured[key])
        return costs

    def evaluation_steps(self, config: Config) -> list[Step]:
        """Return an evaluation's steps; one rank computes its micro-batches one by one."""
        batch, model = config.batch, self.model
        size = batch.eval_micro_batch_size or batch.micro_batch_size
        count = (
            Split(batch.batch_size, size, model.group.world_size).micro_steps
            if model.ranks.world_size > 1
            else 1
        )
        return model.order.steps(
            model.ranks.rank, model.memory.plans, evaluation_passes(model.pipeline, count)
        )

    def periods(self, config: Config) -> tuple[Size, Size, int]:
        """Return two smaller iterations, and how many times their difference is to be added to the
        first.

        Micro-batches repeat their predecessors' passes once a pipeline is full.
        """
        batch, ranks = config.batch, self.model.ranks.world_size
        depth, breadth = batch.depth_first_micro_batches, batch.breadth_first_micro_batches
        if self.model.order.schedule == "breadth_first":
            few = min(depth, 2)
            return (few, breadth), (few + 1, breadth), depth - few
        periods = max(0, depth * breadth // ranks - 3)
        few = depth * breadth - periods * ranks
        return (1, few), (1, few + ranks), periods

    def order(self, config: Config, level: str) -> Order:
        """Return the order of the model's steps in a run."""
        key = level, config.batch.micro_batch_size, config.performance.recompute_layers
        if key not in self._orders:
            order = self.model.order
            if self.model.ranks.world_size > 1:
                durations = scheduled_durations(
                    config, self.whole.stages, self.training(config, level)
                )
                order = dataclasses.replace(order, durations=durations)
            self._orders[key] = order
        return self._orders[key]

    def steps(self, config: Config, level: str, size: Size) -> list[Step]:
        """Return this rank's steps in an iteration."""
        (depth, breadth), order = size, self.order(config, level)
        key = depth, breadth, tuple(order.durations)
        if key not in self._steps:
            passes = order.training(depth * breadth, breadth)
            self._steps[key] = order.steps(self.model.ranks.rank, self.model.memory.plans, passes)
        return self._steps[key]

    def message_bytes(self, config: Config, evaluates: bool = False) -> int:
        """Return the bytes of a micro-batch's hidden states between layers; 0 without a
        pipeline."""
        if self.model.ranks.world_size == 1:
            return 0
        stream = self._stream(self.whole.stages[1], planned_micro_batch(config, evaluates))
        return 0 if stream is None else stream.nbytes

    def _stream(self, stage: Stage, micro_batch: MicroBatch) -> Tensor | None:
        """Return a tensor shaped like a stage's input, after the first block has created what all
        blocks share."""
        samples = len(micro_batch.tokens)
        if samples not in self._streams or (
            micro_batch.positions is not None and not micro_batch.shared
        ):
            _, self._streams[samples] = self._meter.evaluation(
                self.whole.stages[0], micro_batch, None
            )
            self._meter.evaluation(self.whole.stages[1], micro_batch, self._streams[samples])
        return self._streams[samples] if stage.index else None


def _alike(layer: Any) -> tuple[Any, ...]:
    """Return a key that equal layers share, apart from recomputation."""
    parameters = (
        (name, parameter.shape, parameter.requires_grad)
        for name, parameter in layer.named_parameters()
    )
    rounded = (
        eight_bit.name.rpartition(f"{layer.name}.")[2] for eight_bit in eight_bit_of([layer])
    )
    return (type(layer), layer.variant, *parameters, *rounded)


def planned_micro_batch(config: Config, evaluates: bool = False) -> MicroBatch:
    """Return a micro-batch without values."""
    batch = config.batch
    samples = (batch.eval_micro_batch_size if evaluates else None) or batch.micro_batch_size
    tokens = torch.empty(samples, batch.sequence_length, dtype=torch.int64, device="meta")
    positions = tokens if config.data.reset_position_ids else None
    scale, seed = (None, None) if evaluates else (torch.empty((), device="meta"), 0)
    return MicroBatch(tokens, tokens, scale, dropout_seed=seed, positions=positions)


def _name(stage: Stage) -> str:
    names = [layer.name for layer in stage.layers]
    return names[0] if len(names) == 1 else f"{names[0]}-{names[-1].rpartition('.')[2]}"


class ActivationMemory(NamedTuple):
    """Bytes of activations at one recompute level, uniform or by block."""

    level: str
    saved: list[Saved]  # per layer of the whole model and micro-batch
    held: int  # in all of the rank's layers and micro-batches when the backward pass begins
    peak: int  # including temporary tensors and 8-bit weights
    peak_at: str  # stage and pass of the peak


def activation_memory(config: Config, partition: Partition, level: str) -> ActivationMemory:
    """Walk through a step and any evaluation to find the saved activations and the peak."""
    costs = partition.training(config, level)
    few, more, periods = partition.periods(config)
    held, needed = _walk(config, partition, partition.steps(config, level, few), costs)
    if partition.model.order.ties and partition.model.ranks.world_size > 1 and periods:
        # A tied embedding keeps all micro-batches' outputs and gradients for its backward passes.
        grown = (
            max(_walk(config, partition, partition.steps(config, level, more), costs)[1])[0]
            - max(needed)[0]
        )
        needed = [(num_bytes + periods * grown, name) for num_bytes, name in needed]
    needed += [
        (partition.update_bytes, "the update"),
        (partition.replica_bytes, "sums of gradients"),
    ]
    if config.training.validation_iters or config.training.test_iters:
        casts: Counter[int] = Counter()  # 8-bit weights by weight buffer, at most
        for plan in partition.model.memory.plans:
            casts |= Counter({plan.weight_buffer: costs[plan.stage].cast_bytes})
        _, evaluated = _walk(
            config,
            partition,
            partition.evaluation_steps(config),
            partition.evaluation(config),
            True,
        )
        needed += [(num_bytes + casts.total(), name) for num_bytes, name in evaluated]
    peak, peak_at = max(needed, key=lambda entry: entry[0])
    return ActivationMemory(
        level, [layer for stage in costs for layer in stage.saved], held, peak, peak_at
    )


def _walk(
    config: Config,
    partition: Partition,
    schedule: Sequence[Step],
    costs: Sequence[StageCosts],
    evaluates: bool = False,
) -> tuple[int, list[tuple[int, str]]]:
    """Return the most bytes stored after a forward step, and each step's peak with its name."""
    plans = {plan.stage: plan for plan in partition.model.memory.plans}
    names = [_name(stage) for stage in partition.whole.stages]
    holders: dict[int | None, int] = {}  # stage by gradient buffer
    casts: dict[int, int] = {}  # 8-bit weights by weight buffer
    message_bytes, sent = partition.message_bytes(config, evaluates), deque[Any]()
    live = held = 0
    needed = []
    for step in schedule:
        for stage in step.gather:
            casts.pop(plans[stage].weight_buffer, None)
        casts[plans[step.stage].weight_buffer] = costs[step.stage].cast_bytes
        adds = all(holders.get(plans[stage].grad_buffer) == stage for stage in step.accumulate)
        cost = costs[step.stage].of(step.kind)[adds]
        live += sum(message.kind not in LOANS for message in step.receive) * message_bytes
        needed.append(
            (
                live + sum(casts.values()) + cost.peak,
                f"{names[step.stage]} {'evaluation' if evaluates else step.kind}",
            )
        )
        live += cost.change
        held = max(held, live) if step.kind == "forward" else held
        # A result in flight remains even after its stage has released it.
        holder = (step.stage, step.micro_batch)
        if step.kind in ("backward", "input") and holder in sent:
            sent[sent.index(holder)] = None
            live += message_bytes
        if step.send:
            if len(sent) == MOST_SENT:
                live -= message_bytes * (sent.popleft() is None)
            keeps = (
                step.kind == "forward"
                and not evaluates
                and partition.whole.stages[step.stage].runs_backward
            )
            sent.append(holder if keeps else None)
        holders |= {plans[stage].grad_buffer: stage for stage in step.accumulate}
        for stage, _ in step.reduce:
            holders.pop(plans[stage].grad_buffer, None)
    return held, needed
