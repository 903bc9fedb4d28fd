"""AdamW (Loshchilov & Hutter 2019) on the shards, with global clipping, loss scaling and bad-step protection.

Nothing is read on the host: clipping and unscaling are one factor inside the update, and an update whose gradient
norm is not finite is dropped on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import OptimizerConfig
from megatron_lite.distributed import Distributed
from megatron_lite.kernels.adamw import Control, Hyperparameters, Range, Ranges, Shard, adamw
from megatron_lite.kernels.choice import REFERENCES, Kernels
from megatron_lite.kernels.gradient_norm import squared_norm
from megatron_lite.optimizer.loss_scale import LossScale
from megatron_lite.zero.part import Part
from megatron_lite.zero.stage import Stage


@dataclass(frozen=True)
class Update:
    """What one optimizer step did; tensors on the device, ()."""

    loss: Tensor  # summed over all ranks
    grad_norm: Tensor  # of the unscaled global gradient, before clipping
    skipped: Tensor  # bool: the gradient was not finite, nothing was changed


class AdamW:
    """Updates the weight shards of all stages in place."""

    def __init__(
        self, config: OptimizerConfig, stages: list[Stage], training_dtype: str, distributed: Distributed,
        kernels: Kernels = REFERENCES,
    ) -> None:  # fmt: skip
        self._config, self._distributed, self._kernels = config, distributed, kernels
        self._trained = [(stage, part, self._ranges(part)) for stage in stages if (part := stage.trainable) is not None]
        self.loss_scale = LossScale(config, training_dtype, distributed.device)
        self._updates = torch.zeros((), dtype=torch.float32, device=distributed.device)  # Adam's t: good updates

    def step(self, learning_rate: float, loss: Tensor, updated: Callable[[Stage], None]) -> Update:
        """One update from the stages' gradient shards. `loss`: this rank's, summed; it shares the norm's collective.

        `updated` is called after each stage, in stage order: its new weights may be gathered while others are updated.
        """
        config, triton = self._config, self._kernels.triton
        total = squared_norm([part.grad_shard for _, part, _ in self._trained], triton)
        norm_squared, loss = self._distributed.sum_in_rank_order(torch.stack([total, loss.double()]))
        scale = self.loss_scale.scale
        grad_norm = (norm_squared.sqrt() / scale).float()
        # Nor may its square overflow: the second moment would, and stay so.
        skipped = ~torch.isfinite(grad_norm.square())
        self._updates.add_(~skipped)
        clip = config.clip_grad
        coefficient = (clip / (grad_norm + 1e-6)).clamp(max=1.0) if clip > 0 else torch.ones_like(grad_norm)
        numbers = Hyperparameters(
            learning_rate, config.weight_decay, config.adam_beta1, config.adam_beta2, config.adam_eps
        )
        control = Control(scale / coefficient, self._updates, skipped.float(), numbers)
        for stage, part, ranges in self._trained:
            stage.begin_update()
            weights = part.weights
            shard = Shard(
                weights.master, weights.rounded, weights.remainder, part.grad_shard, part.exp_avg, part.exp_avg_sq
            )
            adamw(shard, ranges, control, triton)
            updated(stage)
        self.loss_scale.update(skipped)
        return Update(loss, grad_norm, skipped)

    def state(self) -> dict[str, Any]:
        """For a checkpoint, beside the shards (reads the device)."""
        return {"updates": int(self._updates), "loss_scale": self.loss_scale.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._updates.fill_(state["updates"])
        self.loss_scale.load_state(state["loss_scale"])

    def _ranges(self, part: Part) -> Ranges:
        rows = part.layout.update_ranges(self._distributed.rank)
        scaled = [Range(row.start, row.end, row.lr_scale, float(row.weight_decay)) for row in rows]
        return Ranges(scaled, self._distributed.device)
