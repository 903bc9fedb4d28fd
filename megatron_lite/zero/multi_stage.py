"""All stages of a model: their iterations, their full weights, and gathers ahead of the next
iteration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import BatchConfig, MultiStageConfig
from megatron_lite.distributed.pipeline_group import PipelineGroup
from megatron_lite.distributed.rank_group import Group
from megatron_lite.parameter import DTYPES, ParameterSpec
from megatron_lite.zero import runner
from megatron_lite.zero.flat_shard import ADAM_STATE, FlatShard, OptimizerState, Precision
from megatron_lite.zero.layer import Layer
from megatron_lite.zero.layout import split_into_stages
from megatron_lite.zero.loans import BorrowedStage, Loans
from megatron_lite.zero.memory import Memory, lenders
from megatron_lite.zero.messages import Messages
from megatron_lite.zero.pipeline import Durations, evaluation_passes, place
from megatron_lite.zero.replica_shards import HybridStage, begin_reductions
from megatron_lite.zero.replicas import whole_parameter
from megatron_lite.zero.schedule import Order, Step
from megatron_lite.zero.stage import Observer, Stage
from megatron_lite.zero.throttle import Throttle


class MultiStage:
    """A chain of layers, partitioned over ranks.

    groups: this rank's `Distributed`, or a plan's substitute.
    training: False (inference) allocates no gradients and no moments.
    averaged: allocate a running average of the trainable weights, which `optimizer.Averaging`
    updates. base_elsewhere: frozen weights are those of a folder: they are kept in the training
    dtype, and checkpoints omit them. state: the optimizer state, as the rule declares it.
    durations: of a micro-batch's passes through each stage, for the schedule; must match on all
    ranks. Default: equal.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        config: MultiStageConfig,
        batch: BatchConfig,
        training_dtype: str,
        groups: Any,
        training: bool = True,
        *,
        averaged: bool = False,
        base_elsewhere: bool = False,
        state: OptimizerState = ADAM_STATE,
        durations: Sequence[Durations] | None = None,
    ) -> None:
        self.group: Group = groups.data
        self.tensor: Group = groups.tensor
        self.ranks: PipelineGroup = groups.pipeline
        self.training, dtype = training, DTYPES[training_dtype]
        self.precision = Precision(
            training=dtype,
            gradients=torch.float32 if config.full_precision_gradients else dtype,
            frozen_weights=torch.float32
            if config.store_frozen_weights_in_optimization_precision and not base_elsewhere
            else dtype,
            split_master=config.split_master_weights and training,
            rounds_half_up=config.split_master_weights and not training,
        )
        assert config.layers_per_stage != "auto", "resolved before"
        self.split = split_into_stages(len(layers) - 2, config.layers_per_stage)
        of_type = HybridStage if groups.replicate.world_size > 1 else Stage
        of_all = groups, training, state
        self.all_stages = [  # other pipeline ranks' stages have no memory here
            of_type(i, [layers[j] for j in some], *of_all) for i, some in enumerate(self.split)
        ]
        for _, part in self.all_parts():
            is_weight = part.frozen and not part.is_state
            part.dtype = self.precision.frozen_weights if is_weight else torch.float32
            part.keeps_average = averaged and not part.frozen
            part.is_saved = not (base_elsewhere and part.frozen)
        name = config.pipeline_schedule if self.ranks.world_size > 1 else "breadth_first"
        assert name != "auto", "resolved before"
        every = self.all_stages
        ties = tuple((lender, stage.index) for stage in every for lender in lenders(stage, every))
        head = every[-1].numel + sum(
            every[lender].numel for lender, borrower in ties if borrower == every[-1].index
        )
        # matrix products cost in proportion to the weights
        work = head * len(every[1:-1]) / max(1, sum(stage.numel for stage in every[1:-1]))
        self.pipeline = place(
            self.ranks.world_size, len(every), name, config.pipeline_placement, work
        )
        self.stages = [every[index] for index in self.pipeline.stages_of(self.ranks.rank)]
        apart, rank_of = self.pipeline.apart(ties), self.pipeline.rank_of
        copies = [
            BorrowedStage(i, every[i].layers, *of_all)
            for i, j in apart
            if rank_of[j] == self.ranks.rank
        ]
        used = [*self.stages, *copies]
        self._by_index = {stage.index: stage for stage in used}
        self._verbs: Mapping[int, Stage] = self._by_index
        self.memory = Memory(
            used, config, self.precision, groups.shard, averaged, name == "breadth_first", ties
        )
        self._shows_average = False
        first_trained = next(
            (stage.index for stage in self.all_stages if stage.trainable), len(self.split)
        )
        for stage in self.all_stages:
            stage.runs_backward = training and stage.index >= first_trained
            stage.wants_input_gradient = stage.index > first_trained
        self.order = Order(
            self.pipeline, name, first_trained, ties, durations or [Durations()] * len(self.split)
        )
        self._breadth_first = batch.breadth_first_micro_batches
        loans = Loans(self.ranks, layers, dtype, self._by_index) if apart else None
        self.messages = loans or Messages(self.ranks, layers[0], dtype)
        self._schedules: dict[tuple[str, int], list[Step]] = {}
        # The schedule of the largest batch; every schedule begins with the same gathers.
        self.training_schedule = self._schedule(
            "training", batch.depth_first_micro_batches * self._breadth_first
        )
        self._throttle: Throttle | None = None
        several = groups.layers.world_size > 1  # one rank frees and reuses memory on one stream
        if config.throttle_cpu and several and self.group.device.type == "cuda":
            self._throttle = Throttle(
                config.throttle_cpu_rate, config.throttle_cpu_delay, self.group.wait_for
            )

    def initialize(self, seed: int, frozen: bool = True) -> None:
        """Draw the initial weights. frozen: also of what is not trained."""
        for _, part in self.parts():
            if frozen or not part.frozen:
                part.initialize(seed)
        self.invalidate()

    def observe(self, observer: Observer) -> None:
        """Report layer outputs and gradients to an observer from now on."""
        for stage in self.stages:
            stage.observer = observer

    def wrap(self, wrapped: Callable[[Stage], Stage] | None) -> None:
        """Run training steps and their early gathers through `wrapped(stage)`; None: unwrap the
        stages."""
        self._verbs = {
            index: wrapped(stage) if wrapped else stage for index, stage in self._by_index.items()
        }

    # -- computing
    # --------------------------------------------------------------------------------------------------

    def forward_backward(self, micro_batches: Sequence[Any]) -> Tensor:
        """Compute one iteration's gradients into the shards; return this rank's summed loss, 0
        without the head."""
        assert self.training, "a model in inference mode has no gradients"
        assert not self._shows_average, "averages are not trained"
        steps = self._schedule("training", len(micro_batches))
        if isinstance(self.stages[0], HybridStage):
            begin_reductions(self.stages, steps)
        losses = runner.execute(self._verbs, steps, micro_batches, self.messages, self._throttle)
        return self._sum(losses)

    def evaluate(self, micro_batches: Sequence[Any]) -> Tensor:
        """Return this rank's summed loss, without gradients; 0 without the head."""
        kind = "average" if self._shows_average else "evaluation"
        steps = self._schedule(kind, len(micro_batches))
        return self._sum(
            runner.execute(self._by_index, steps, micro_batches, self.messages, trains=False)
        )

    def output(self, micro_batch: Any) -> Tensor:
        """Return the last layer's output for one micro-batch, without gradients, on every rank."""
        assert not self._shows_average, "averages are only evaluated"
        steps = self._schedule("evaluation", 1)
        found = runner.execute(self._by_index, steps, [micro_batch], self.messages, trains=False)
        return self.ranks.from_owner(found[0] if found else None, self.pipeline.rank_of[-1])

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the averages instead of the weights in `evaluate` and `full_weights` inside this
        context.

        Averages have their own buffers, because a weight buffer may be the memory of the master
        weights. Weight buffers and their pending gathers are not touched.
        """
        assert self.memory.averages, "this model keeps no averages"
        self._show_averages(True)
        try:
            yield
        finally:
            self._show_averages(False)

    def _show_averages(self, shown: bool) -> None:
        self._shows_average = shown
        for buffer in self.memory.averages:
            buffer.holder = None  # the averages may change before they are shown again
        plans, buffers = self.memory.plans, self.memory.weights
        if shown:
            plans, buffers = self.memory.average_plans, self.memory.averages
        for stage, plan in zip(self.memory.stages, plans, strict=True):
            stage.compute_with(buffers[plan.weight_buffer], averages=shown)

    def updated(self, stage: Stage) -> None:
        """Mark this stage's full weights as stale after its shard was updated.

        If the next step begins with their gather, start it now, while later stages are updated.
        """
        if stage.weights.holder == stage.index:
            stage.weights.holder = None
        if isinstance(stage, HybridStage):
            stage.updated()
        elif stage.index in self.training_schedule[0].gather:
            self._verbs[stage.index].gather()

    def gather_ahead(self) -> None:
        """Start the gathers with which the next step begins."""
        for index in self.training_schedule[0].gather:
            self._verbs[index].gather()

    def finish(self) -> None:
        """Wait for pending gathers; call before closing the group."""
        for stage in self.stages:
            stage.begin_update()

    def invalidate(self) -> None:
        """Mark all full weights as stale after the shards changed."""
        for stage in self.stages:
            stage.weights.holder = None
            for part in stage.parts:
                part.is_whole = False
            if isinstance(stage, HybridStage):
                stage.invalidate()

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Gather stage by stage and yield (name, full weight in the training dtype), valid until
        the next is requested.

        Every rank must iterate to the end.
        """
        for stage in self.all_stages:
            owner = self.pipeline.rank_of[stage.index]
            weights = self._weights_of(stage) if owner == self.ranks.rank else iter(())
            for part, spec in stage.specs_by_part():
                _, local = next(weights, (spec, None))
                whole = None if local is None else whole_parameter(spec, local, part.split_over)
                yield spec.name, self.ranks.from_owner(whole, owner)

    def local_weights(self) -> Iterator[tuple[ParameterSpec, Tensor]]:
        """Like `full_weights`, but yield this rank's part with its spec, without tensor-parallel
        communication."""
        for stage in self.stages:
            yield from self._weights_of(stage)

    def _weights_of(self, stage: Stage) -> Iterator[tuple[ParameterSpec, Tensor]]:
        stage.gather()
        stage.require_weights()
        for _, parameter in stage.parameters():
            yield parameter.spec, parameter.detach()

    def _schedule(self, kind: str, micro_batches: int) -> list[Step]:
        """Return the steps of an iteration, computed on the first request."""
        if (kind, micro_batches) not in self._schedules:
            plans = self.memory.average_plans if kind == "average" else self.memory.plans
            if kind == "training":
                passes = self.order.training(micro_batches, self._breadth_first)
            else:
                passes = evaluation_passes(self.pipeline, micro_batches)
            self._schedules[kind, micro_batches] = self.order.steps(self.ranks.rank, plans, passes)
        return self._schedules[kind, micro_batches]

    def _sum(self, losses: Sequence[Tensor]) -> Tensor:
        return torch.stack([*losses]).sum() if losses else torch.zeros((), device=self.group.device)

    # -- contents
    # -----------------------------------------------------------------------------------------------------

    def parts(self) -> Iterator[tuple[int, FlatShard]]:
        """Return (stage index, flat shard) of this rank in order."""
        return ((stage.index, part) for stage in self.stages for part in stage.parts)

    def all_parts(self) -> Iterator[tuple[int, FlatShard]]:
        """Return (stage index, flat shard) of all stages; other pipeline ranks' shards have layouts
        and kinds, but no memory."""
        return ((stage.index, part) for stage in self.all_stages for part in stage.parts)

    def saved_parts(self, of_all: bool = False) -> Iterator[tuple[int, FlatShard]]:
        """Return the shards that checkpoints contain: this rank's, or those of all stages."""
        parts = self.all_parts() if of_all else self.parts()
        return ((index, part) for index, part in parts if part.is_saved)

    def specs(self) -> Iterator[ParameterSpec]:
        return (spec for stage in self.all_stages for spec in stage.specs())

    @property
    def num_parameters(self) -> int:
        return sum(spec.numel for spec in self.specs() if not spec.is_state)

    @property
    def num_frozen(self) -> int:
        return self.num_parameters - sum(spec.numel for spec in self.specs() if spec.trainable)
