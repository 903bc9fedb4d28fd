"""All stages of a model, and the buffers they share."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import BatchConfig, MultiStageConfig
from megatron_lite.distributed.process_group import Group
from megatron_lite.parameter import DTYPES, Parameter
from megatron_lite.zero import runner
from megatron_lite.zero.flat_shard import ADAM_MOMENTS, FlatShard, Precision
from megatron_lite.zero.layer import Layer
from megatron_lite.zero.layout import BufferPlan, plan_buffers, split_into_stages
from megatron_lite.zero.schedule import StagePlan, Step, evaluation_schedule, first_trained, training_schedule
from megatron_lite.zero.stage import Buffer, Observer, Stage
from megatron_lite.zero.throttle import Throttle


@dataclass(frozen=True)
class MemoryRow:
    """One kind of memory of this rank."""

    kind: str
    count: int
    bytes: int


class MultiStage:
    """A chain of layers, partitioned over the data-parallel ranks.

    training: False (inference) allocates no gradients and no moments.
    moments: names of the optimizer state kept per element.
    averaged: keep a running average of the trainable weights, which `optimizer.Averaging` updates.
    whole_matrices: the optimizer needs the matrices between hidden layers whole and keeps no second moment of them.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        config: MultiStageConfig,
        batch: BatchConfig,
        training_dtype: str,
        group: Group,
        training: bool = True,
        *,
        moments: Sequence[str] = ADAM_MOMENTS,
        averaged: bool = False,
        whole_matrices: bool = False,
    ) -> None:
        self.group, self.training = group, training
        dtype = DTYPES[training_dtype]
        self.precision = Precision(
            training=dtype,
            gradients=torch.float32 if config.full_precision_gradients else dtype,
            frozen_weights=torch.float32 if config.store_frozen_weights_in_optimization_precision else dtype,
            split_master=config.split_master_weights,
        )
        assert config.layers_per_stage != "auto", "resolved before"
        self.split = split_into_stages(len(layers) - 2, config.layers_per_stage)
        self.stages = [
            Stage(i, [layers[j] for j in some], group, training, moments, whole_matrices)
            for i, some in enumerate(self.split)
        ]
        self._borrows = [self._lenders(stage) for stage in self.stages]
        self._allocate(config)
        plans = self._plans = [self._plan(stage, self.weight_plan) for stage in self.stages]
        self._average_buffers: list[Buffer] = []
        self._average_plans: list[StagePlan] = []
        self._shows_average = False
        if averaged:
            self._allocate_averages()
        for stage in self.stages:
            stage.runs_backward = training and stage.index >= first_trained(plans)
            stage.wants_input_gradient = stage.index > first_trained(plans)
        assert batch.depth_first_micro_batches and batch.breadth_first_micro_batches
        self._breadth_first = batch.breadth_first_micro_batches
        self._schedules: dict[tuple[str, int], list[Step]] = {}
        # The schedule of the largest batch; every schedule begins with the same gathers.
        self.training_schedule = self._schedule("training", batch.depth_first_micro_batches * self._breadth_first)
        throttled = config.throttle_cpu and group.device.type == "cuda"
        self._throttle = Throttle(config.throttle_cpu_rate, config.throttle_cpu_delay) if throttled else None

    def initialize(self, seed: int) -> None:
        """Draw the initial weights."""
        for stage in self.stages:
            stage.initialize(seed)
        self.invalidate()

    def observe(self, observer: Observer) -> None:
        """Report layer outputs and gradients to an observer."""
        for stage in self.stages:
            stage.observer = observer

    # -- computing --------------------------------------------------------------------------------------------------

    def forward_backward(self, micro_batches: Sequence[Any]) -> Tensor:
        """Compute one iteration's gradients into the shards and return this rank's summed loss."""
        assert self.training, "a model in inference mode has no gradients"
        assert not self._shows_average, "averages are not trained"
        schedule = self._schedule("training", len(micro_batches))
        return runner.forward_backward(self.stages, schedule, micro_batches, self._throttle)

    def evaluate(self, micro_batches: Sequence[Any]) -> Tensor:
        """Return this rank's summed loss, without gradients."""
        kind = "average" if self._shows_average else "evaluation"
        return runner.evaluate(self.stages, self._schedule(kind, len(micro_batches)), micro_batches)

    def output(self, micro_batch: Any) -> Tensor:
        """Return the last layer's output for one micro-batch, without gradients."""
        assert not self._shows_average, "averages are only evaluated"
        (result,) = runner.outputs(self.stages, self._schedule("evaluation", 1), [micro_batch])
        return result

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Let `evaluate` and `full_weights` use the averages in place of the weights inside this context.

        Averages are gathered into buffers of their own, because a weight buffer may be the master weights' memory.
        Weight buffers and their gathers under way stay as they are.
        """
        assert self._average_buffers, "this model keeps no averages"
        self._show_averages(True)
        try:
            yield
        finally:
            self._show_averages(False)

    def _show_averages(self, shown: bool) -> None:
        self._shows_average = shown
        for buffer in self._average_buffers:
            buffer.holder = None  # the averages may change before they are shown again
        plans, buffers = self._plans, self._weight_buffers
        if shown:
            plans, buffers = self._average_plans, self._average_buffers
        for stage, plan in zip(self.stages, plans, strict=True):
            stage.compute_with(buffers[plan.weight_buffer], averages=shown)

    def updated(self, stage: Stage) -> None:
        """Declare this stage's full weights stale after an update of its shard.

        If the next step begins with their gather, start the gather now, while later stages are updated.
        """
        if stage.weights.holder == stage.index:
            stage.weights.holder = None
        if stage.index in self.training_schedule[0].gather:
            stage.gather()

    def gather_ahead(self) -> None:
        """Start the gathers with which the next step begins."""
        for index in self.training_schedule[0].gather:
            self.stages[index].gather()

    def finish(self) -> None:
        """Wait for gathers under way; call before ranks leave the group."""
        for stage in self.stages:
            stage.weights.wait()

    def invalidate(self) -> None:
        """Declare all full weights stale after a change of the shards."""
        for stage in self.stages:
            stage.weights.holder = None

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Gather stage by stage and yield (name, full weight in the training dtype), valid until the next is requested.

        Every rank must iterate to the end.
        """
        for stage in self.stages:
            stage.gather()
            stage.require_weights()
            for name, parameter in stage.parameters():
                yield name, parameter.detach()

    def is_finite(self) -> bool:
        """Return whether all weights of this rank's shards are finite (reads the device)."""
        extremes = [torch.stack(torch.aminmax(part.read("weights"))).float() for _, part in self.parts()]
        return bool(torch.isfinite(torch.stack(extremes)).all())

    def time_collectives(self, barrier: Callable[[], None], repeats: int = 3) -> dict[str, float]:
        """Return the seconds that gathering and reducing all stages once take with nothing else running, by kind.

        Takes the fastest of a few repetitions. Call before training: gradient buffers hold garbage afterwards.
        """
        best = {}
        for kind in ("gather", "reduce"):
            runs = []
            for _ in range(repeats):
                barrier()
                start_s = time.perf_counter()
                for stage in self.stages:
                    if kind == "gather":
                        stage.weights.holder = None
                        stage.gather()
                        stage.weights.wait()
                    elif stage.trainable is not None and self.group.world_size > 1:
                        self.group.reduce_scatter(stage.trainable.full_gradients).wait()
                if self.group.device.type == "cuda":
                    torch.cuda.synchronize(self.group.device)
                runs.append(time.perf_counter() - start_s)
            best[kind] = min(runs)
        return best

    # -- contents -----------------------------------------------------------------------------------------------------

    def parts(self) -> Iterator[tuple[int, FlatShard]]:
        """Yield (stage index, flat shard) in order."""
        for stage in self.stages:
            for part in stage.parts:
                yield stage.index, part

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (global name, full parameter) of all stages."""
        for stage in self.stages:
            yield from stage.parameters()

    @property
    def num_parameters(self) -> int:
        return sum(slot.numel for _, part in self.parts() for slot in part.layout.slots)

    def memory_table(self) -> list[MemoryRow]:
        """Return this rank's memory by kind; memory that is both shard and buffer counts as buffer."""
        parts = [part for _, part in self.parts()]
        trained, frozen = [p for p in parts if not p.frozen], [p for p in parts if p.frozen]
        stateful = [part for part in parts if part.has_state]
        largest = max((part.layout.shard_numel for part in stateful), default=0)
        scratch = self.group.reduction_scratch_bytes(largest, self.precision.gradients)
        split = self.precision.split_master and self.training
        sizes = {
            "weight remainders" if split else "weight shards": [_weight_bytes(part) for part in trained],
            "frozen weight shards": [_weight_bytes(part) for part in frozen],
            "gradient shards": [0 if part.shares_gradients else part.grad_shard.nbytes for part in stateful],
            "optimizer moments": [moment.nbytes for part in stateful for moment in part.moments.values()],
            "averages": [0 if part.average is None else part.average.nbytes for part in parts],
            "weight buffers": [buffer.data.nbytes for buffer in self._weight_buffers],
            "gradient buffers": [buffer.data.nbytes for buffer in self._grad_buffers],
            "average buffers": [buffer.data.nbytes for buffer in self._average_buffers],
            "update buffers": [buffer.data.nbytes for buffer in self._update_buffers],
            "communication scratch": [scratch],
        }
        return [MemoryRow(kind, sum(size > 0 for size in every), sum(every)) for kind, every in sizes.items()]

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of `memory_table` by kind."""
        return {row.kind: row.bytes for row in self.memory_table()}

    def buffer_counts(self) -> tuple[int, int]:
        """Return the numbers of weight buffers and gradient buffers."""
        return sum(buffer.data.numel() > 0 for buffer in self._weight_buffers), len(self._grad_buffers)

    # -- building -----------------------------------------------------------------------------------------------------

    def _allocate(self, config: MultiStageConfig) -> None:
        weight_count, grad_count = self._buffer_counts(config)
        self.weight_plan = plan_buffers([stage.numel for stage in self.stages], weight_count, self._tied(), every=True)
        self.grad_plan = plan_buffers([stage.grad_numel for stage in self.stages], grad_count, self._tied())
        self._weight_buffers = self._buffers(self.weight_plan, self.precision.training)
        self._grad_buffers = self._buffers(self.grad_plan, self.precision.gradients)
        # bf16, to which Muon rounds before orthogonalizing. Two with other ranks: one is sent while the other is used.
        count = 1 if self.group.world_size == 1 else 2
        update_plan = plan_buffers([stage.update_numel for stage in self.stages], count, frozenset())
        self._update_buffers = self._buffers(update_plan, torch.bfloat16)
        for stage in self.stages:
            place = update_plan.placement[stage.index]
            stage.update_buffer = None if place is None else self._update_buffers[place]
            weights, gradients = (plan.placement[stage.index] for plan in (self.weight_plan, self.grad_plan))
            assert weights is not None
            stage.allocate(
                weights=self._weight_buffers[weights],
                owns_weights=self.weight_plan.own[stage.index],
                gradients=None if gradients is None else self._grad_buffers[gradients],
                owns_gradients=self.grad_plan.own[stage.index],
                precision=self.precision,
            )

    def _allocate_averages(self) -> None:
        """Allocate averages and, at any ZeRO stage, two buffers that all stages share: one to compute, one to gather.

        One rank has nothing to gather ahead and needs one. Allocating now keeps validation from running out of memory.
        """
        count = 1 if self.group.world_size == 1 else 2
        plan = plan_buffers([stage.numel for stage in self.stages], count, self._tied(), every=True)
        self._average_buffers = self._buffers(plan, self.precision.training)
        self._average_plans = [self._plan(stage, plan) for stage in self.stages]
        for _, part in self.parts():
            part.allocate_average()

    def _tied(self) -> frozenset[int]:
        """Return the stages whose parameters other stages use too."""
        return frozenset(lender for lenders in self._borrows for lender in lenders)

    def _buffer_counts(self, config: MultiStageConfig) -> tuple[int, int]:
        """Return the numbers of weight and gradient buffers: explicit counts win over the ZeRO stage."""
        every, alone = len(self.stages), self.group.world_size == 1
        zero_stage = config.zero_stage or 1
        assert zero_stage != "auto", "resolved before"
        weights = config.num_weight_buffers or (2 if zero_stage == 3 else every)
        gradients = config.num_grad_buffers or (2 if zero_stage >= 2 else every)
        # With one rank the shard is the full tensor: if it has the buffers' dtype, a buffer per stage costs nothing.
        if alone and self.precision.training == torch.float32:
            weights = every
        return weights, every if alone else gradients

    def _buffers(self, plan: BufferPlan, dtype: torch.dtype) -> list[Buffer]:
        return [Buffer(size, dtype, self.group.device) for size in plan.sizes]

    def _schedule(self, kind: str, micro_batches: int) -> list[Step]:
        """Return the steps of an iteration of N micro-batches, computed on the first request."""
        if (kind, micro_batches) not in self._schedules:
            depth_first, rest = divmod(micro_batches, self._breadth_first)
            if kind == "training":
                assert not rest, f"{micro_batches} micro-batches, not in {self._breadth_first}s"
                steps = training_schedule(self._plans, depth_first, self._breadth_first)
            else:
                steps = evaluation_schedule(self._average_plans if kind == "average" else self._plans, micro_batches)
            self._schedules[kind, micro_batches] = steps
        return self._schedules[kind, micro_batches]

    def _plan(self, stage: Stage, weight_plan: BufferPlan) -> StagePlan:
        weight_buffer, grad_buffer = weight_plan.placement[stage.index], self.grad_plan.placement[stage.index]
        assert weight_buffer is not None
        return StagePlan(
            weight_buffer=weight_buffer,
            grad_buffer=grad_buffer,
            borrows_from=self._borrows[stage.index],
            gradients_in_forward=any(layer.gradients_in_forward for layer in stage.layers),
            backward_needs_weights=stage.backward_needs_weights,
        )

    def _lenders(self, stage: Stage) -> tuple[int, ...]:
        """Return the other stages whose parameters this one uses."""
        borrowed = [lender for layer in stage.layers for lender in layer.borrows_from]
        return tuple(
            other.index
            for other in self.stages
            if other is not stage and any(layer is lender for layer in other.layers for lender in borrowed)
        )


def _weight_bytes(part: FlatShard) -> int:
    """Return the bytes of a weight shard outside the weight buffer."""
    return 0 if part.shares_weights else part.weights.nbytes
