"""Update all shards: global norm, verdict, clipping, the optimizer's rule, averages, loss scale.

The host reads no device value: clipping and unscaling are one factor inside the update, and a bad
update is dropped on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_lite.config import Config, JsonObject, OptimizerConfig
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.adamw import StepNumbers
from megatron_lite.kernels.choice import REFERENCES, Kernels
from megatron_lite.kernels.gradient_norm import squared_norms
from megatron_lite.optimizer.averaging import Averaging
from megatron_lite.optimizer.balance import Balance
from megatron_lite.optimizer.delayed_scaling import DelayedScales
from megatron_lite.optimizer.guards import Guard, Verdict
from megatron_lite.optimizer.loss_scale import LossScale
from megatron_lite.optimizer.rules.adamw import AdamW
from megatron_lite.optimizer.rules.momentum import Momentum
from megatron_lite.optimizer.rules.muon import Muon
from megatron_lite.optimizer.rules.rule import Rule, Trained
from megatron_lite.schedules.learning_rate import peak_learning_rate
from megatron_lite.zero.stage import Stage


class Update(NamedTuple):
    """The result of an optimizer step; tensors on the device, ()."""

    loss: Tensor  # summed over all ranks
    tokens: int  # tokens with a loss, over all ranks
    grad_norm: Tensor  # of the unscaled global gradient, before clipping
    verdict: Verdict


class Follower(Protocol):
    """State of the model that follows each step without a gradient."""

    def end_step(self, skipped: Tensor) -> None:
        """Follow a step. skipped: whether its update was dropped, () bool."""

    def record(self) -> JsonObject:
        """Return entries for a log line (reads the device)."""

    def state(self) -> JsonObject:
        """Return the state for a checkpoint (reads the device)."""

    def load_state(self, state: JsonObject) -> None:
        """Restore `state`, or start fresh from an empty one."""


class Optimizer:
    """Updates the shards of a rank's stages in place. all_stages: other pipeline ranks' too."""

    def __init__(
        self,
        config: Config,
        all_stages: Sequence[Stage],
        distributed: Distributed,
        kernels: Kernels = REFERENCES,
    ) -> None:
        self._config = config
        self._distributed = distributed
        self._triton = kernels.triton
        self._num_stages = len(all_stages)
        self._stages = stages = [
            stage for stage in all_stages if any(part.has_memory for part in stage.parts)
        ]
        self._indices = torch.tensor([stage.index for stage in stages], device=distributed.device)
        trained = [Trained(stage, part) for stage in all_stages for part in stage.trainable]
        self._trained = [each for each in trained if each.part.has_memory]
        # gradients of this rank's stages that count in the norm
        self._counted = [
            [
                part.grad_shard[start:end]
                for part in stage.trainable
                for start, end in part.counted()
            ]
            for stage in stages
        ]
        self._rule = rule_of(config.optimizer)(config.optimizer, trained, distributed, kernels)
        self._averages = config.averaging.enabled
        self.averaging = Averaging(
            config.averaging, [part for stage in stages for part in stage.parts]
        )
        self.loss_scale = LossScale(
            config.optimizer, config.distributed.training_dtype, distributed.device
        )
        self.guard = Guard(
            config.optimizer,
            self.loss_scale.dynamic,
            distributed.device,
            config.training.train_iters,
        )
        # State of the model that follows each step, by name in checkpoints.
        self._followers: dict[str, Follower] = {}
        if config.performance.fp8 == "delayed":
            length = config.performance.amax_history_length
            self._followers["scales"] = DelayedScales(all_stages, length, distributed)
        self.router_sums: dict[str, Tensor] = {}  # see `Balance.sums`
        if config.model.num_experts > 1:
            balance = Balance(config.model, all_stages, distributed)
            self._followers["balance"], self.router_sums = balance, balance.sums
        # Adam's t: good updates
        self._updates = torch.zeros((), dtype=torch.float32, device=distributed.device)

    def step(
        self,
        iteration: int,
        learning_rate: float,
        loss: Tensor,
        tokens: int,
        updated: Callable[[Stage], None],
    ) -> Update:
        """Update all stages from their gradient shards.

        Args:
            iteration: counted from 1.
            loss: this rank's sum over its tokens, (); reduced over ranks together with the gradient
                norm. Tensor-parallel ranks have the same loss except for rounding; only the first
                one's counts.
            tokens: tokens of the global batch with a loss.
            updated: called after each stage, in stage order, so that its gather overlaps later
                updates.
        """
        norm_squared, loss = self._sums_over_ranks(loss.double())
        scale = self.loss_scale.scale
        grad_norm = (norm_squared.sqrt() / scale).float()
        can_shrink = self.loss_scale.can_shrink() if self.loss_scale.dynamic else None
        verdict = self.guard.judge(iteration, loss / max(tokens, 1), grad_norm, can_shrink)
        self._updates.add_(~verdict.skipped)
        divisor = scale / self.guard.clipping_factor(grad_norm)
        numbers = StepNumbers(
            learning_rate=learning_rate,
            weight_decay=self._weight_decay(learning_rate),
            divisor=divisor,
            skipped=verdict.skipped.float(),
            updates=self._updates,
        )
        self._rule.begin(self._trained, numbers)
        if self._averages:
            self.averaging.begin()
        for trained in self._trained:
            trained.stage.begin_update()
            self._rule.apply(trained, numbers)
            if self._averages:
                self.averaging.follow(trained.part)
            if trained.part is trained.stage.trainable[-1]:
                updated(trained.stage)
        if self.loss_scale.dynamic:
            self.loss_scale.update(verdict.overflow)
        for follower in self._followers.values():
            follower.end_step(verdict.skipped)
        return Update(loss, tokens, grad_norm, verdict)

    def _sums_over_ranks(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient's squared norm and the loss, () fp64 each, equal on all ranks.

        Sums over a stage's shards, then over all pipeline ranks' stages, then over a stage's ranks,
        so P changes no bit.
        """
        own = loss.new_zeros(self._num_stages + 1)
        own.index_copy_(0, self._indices, squared_norms(self._counted, loss.device, self._triton))
        if self._distributed.tensor.rank == 0:
            own[-1] = loss
        every = self._distributed.pipeline.sum_in_rank_order(own)
        norm_squared, total = self._distributed.layers.sum_in_rank_order(
            torch.stack([every[:-1].sum(), every[-1]])
        )
        return norm_squared, total

    def record(self) -> JsonObject:
        """Return entries of the rule and of experts for a log line (reads the device)."""
        record = self._rule.record()
        for follower in self._followers.values():
            record |= follower.record()
        return record

    def state(self) -> JsonObject:
        """Return the state for a checkpoint, without the shards (reads the device)."""
        return {
            "updates": int(self._updates),
            "loss_scale": self.loss_scale.state(),
            "guard": self.guard.state(),
            "rule": self._rule.state(),
            "averaging": self.averaging.state(),
            **{name: follower.state() for name, follower in self._followers.items()},
        }

    def load_state(self, state: JsonObject) -> None:
        """Restore `state`; older checkpoints may lack guards, rules and averages."""
        self.load_rule(state)
        self.loss_scale.load_state(state["loss_scale"])
        self.guard.load_state(state.get("guard", {}))
        self.averaging.load_state(state.get("averaging", {}))
        for name, follower in self._followers.items():
            follower.load_state(state.get(name, {}))

    def load_rule(self, state: JsonObject) -> None:
        """Restore only Adam's count and the rule's state, which belong to another run's moments.

        Loss scale and guards start fresh.
        """
        self._updates.fill_(state["updates"])
        self._rule.load_state(state.get("rule", {}))

    def _weight_decay(self, learning_rate: float) -> float:
        """Return this step's weight decay; AdamC (Defazio 2025) multiplies it by lr / peak lr."""
        options, peak = self._config.optimizer, peak_learning_rate(self._config)
        factor = learning_rate / peak if options.adamc_weight_decay and peak else 1.0
        return options.weight_decay * factor


def rule_of(config: OptimizerConfig) -> type[Rule]:
    """Return the class for --optimizer; its `declared` is the state to allocate."""
    rules: dict[str, type[Rule]] = {"adamw": AdamW, "muon": Muon, "lion": Momentum, "sgd": Momentum}
    return rules[config.optimizer]
