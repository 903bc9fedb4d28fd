"""All stages of a model, and the memory that they share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import BatchConfig, MultiStageConfig
from megatron_lite.distributed import Distributed
from megatron_lite.zero import runner
from megatron_lite.zero.layout import BufferPlan, plan_buffers, split_into_stages
from megatron_lite.zero.schedule import StagePlan, Step, evaluation_schedule, training_schedule
from megatron_lite.zero.stage import Buffer, Stage

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class MultiStage:
    """A chain of layers, partitioned over the data-parallel ranks.

    Layers may carry `borrows_from` (layers whose parameters they also use), `gradients_in_forward` and
    `backward_needs_weights`.
    """

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        config: MultiStageConfig,
        batch: BatchConfig,
        training_dtype: str,
        distributed: Distributed,
    ) -> None:
        self.distributed = distributed
        self.training_dtype = DTYPES[training_dtype]
        self.grad_dtype = torch.float32 if config.full_precision_gradients else self.training_dtype
        groups = split_into_stages(len(layers) - 2, config.layers_per_stage)
        self.stages = [Stage(i, [layers[j] for j in group], distributed) for i, group in enumerate(groups)]
        self._borrows = [self._lenders(stage) for stage in self.stages]
        self._allocate(config)
        plans = [
            StagePlan(
                self.weight_plan.placement[stage.index],
                self.grad_plan.placement[stage.index],
                self._borrows[stage.index],
                any(getattr(layer, "gradients_in_forward", False) for layer in stage.layers),
                stage.backward_needs_weights,
            )
            for stage in self.stages
        ]
        assert batch.depth_first_micro_batches and batch.breadth_first_micro_batches
        depth_first, breadth_first = batch.depth_first_micro_batches, batch.breadth_first_micro_batches
        self.training_schedule: list[Step] = training_schedule(plans, depth_first, breadth_first)
        self.evaluation_schedule: list[Step] = evaluation_schedule(plans, depth_first * breadth_first)

    def initialize(self, seed: int) -> None:
        """Fill the weight shards with their initial values."""
        for stage in self.stages:
            stage.initialize(seed)
        self.invalidate()

    def forward_backward(self, micro_batches: Sequence[Any]) -> Tensor:
        """One iteration's gradients, into the shards; returns the summed loss of this rank."""
        return runner.forward_backward(self.stages, self.training_schedule, micro_batches)

    def evaluate(self, micro_batches: Sequence[Any]) -> Tensor:
        """The summed loss of this rank, without gradients."""
        return runner.evaluate(self.stages, self.evaluation_schedule, micro_batches)

    def invalidate(self) -> None:
        """The shards have changed: no buffer holds current weights any more."""
        for stage in self.stages:
            stage.weights.holder = None

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full weight in the training dtype), gathered stage by stage: valid until the next one is asked for.

        Every rank has to iterate to the end.
        """
        for stage in self.stages:
            stage.gather()
            stage.require_weights()
            for name, parameter in stage.parameters():
                yield name, parameter.detach()

    def is_finite(self) -> bool:
        """Whether all weights of this rank's shards are finite (reads the device)."""
        extremes = [torch.stack(torch.aminmax(stage.weight_shard)) for stage in self.stages]
        return bool(torch.isfinite(torch.stack(extremes)).all())

    @property
    def num_parameters(self) -> int:
        return sum(slot.numel for stage in self.stages for slot in stage.layout.slots)

    def memory_bytes(self) -> dict[str, int]:
        """What this rank holds, by kind, counting memory that serves two kinds once (as the buffer)."""
        shards: dict[str, int] = {"weight shards": 0, "gradient shards": 0, "Adam moments": 0}
        for stage in self.stages:
            shards["weight shards"] += 0 if stage.shares_weights else stage.weight_shard.nbytes
            shards["gradient shards"] += 0 if self._owns_gradients(stage) else stage.grad_shard.nbytes
            shards["Adam moments"] += stage.exp_avg.nbytes + stage.exp_avg_sq.nbytes
        largest = max(stage.layout.shard_numel for stage in self.stages)
        return {
            **shards,
            "weight buffers": sum(buffer.data.nbytes for buffer in self._weight_buffers),
            "gradient buffers": sum(buffer.data.nbytes for buffer in self._grad_buffers),
            "communication scratch": self.distributed.reduction_scratch_bytes(largest, self.grad_dtype),
        }

    def buffer_counts(self) -> tuple[int, int]:
        """Weight buffers, gradient buffers."""
        return len(self._weight_buffers), len(self._grad_buffers)

    def _allocate(self, config: MultiStageConfig) -> None:
        sizes = [stage.layout.numel for stage in self.stages]
        zero_stage = config.zero_stage or 1
        weight_count = config.num_weight_buffers or (2 if zero_stage == 3 else len(sizes))
        grad_count = config.num_grad_buffers or (2 if zero_stage >= 2 else len(sizes))
        alone = self.distributed.world_size == 1
        if alone and self.training_dtype == torch.float32:
            weight_count = len(sizes)  # the shard is the whole: a buffer of its own costs nothing
        if alone:
            grad_count = len(sizes)
        tied = frozenset(lender for lenders in self._borrows for lender in lenders)
        self.weight_plan, self.grad_plan = (plan_buffers(sizes, count, tied) for count in (weight_count, grad_count))
        self._weight_buffers = self._buffers(self.weight_plan, self.training_dtype)
        self._grad_buffers = self._buffers(self.grad_plan, self.grad_dtype)
        for stage in self.stages:
            i = stage.index
            stage.allocate(
                self._weight_buffers[self.weight_plan.placement[i]], self.weight_plan.own[i],
                self._grad_buffers[self.grad_plan.placement[i]], self.grad_plan.own[i],
            )  # fmt: skip

    def _buffers(self, plan: BufferPlan, dtype: torch.dtype) -> list[Buffer]:
        return [Buffer(size, dtype, self.distributed.device) for size in plan.sizes]

    def _owns_gradients(self, stage: Stage) -> bool:
        return self.grad_plan.own[stage.index]

    def _lenders(self, stage: Stage) -> tuple[int, ...]:
        """The other stages whose parameters this one uses."""
        borrowed = [lender for layer in stage.layers for lender in getattr(layer, "borrows_from", ())]
        return tuple(
            other.index
            for other in self.stages
            if other is not stage and any(layer is lender for layer in other.layers for lender in borrowed)
        )
