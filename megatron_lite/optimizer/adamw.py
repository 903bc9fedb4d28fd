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
from megatron_lite.kernels.choice import REFERENCES, Kernels
from megatron_lite.optimizer.loss_scale import LossScale
from megatron_lite.zero.master import WeightShard
from megatron_lite.zero.part import Part
from megatron_lite.zero.stage import Stage

# Elements updated at a time where gradients are cast or weights rebuilt in fp32: bounds the temporary.
CHUNK_NUMEL = 2**22
# Elements whose squares are summed in fp32.
NORM_CHUNK_NUMEL = 2**16


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
        self._config, self._stages, self._distributed = config, stages, distributed
        self._kernels = kernels
        self.loss_scale = LossScale(config, training_dtype, distributed.device)
        self._updates = torch.zeros((), dtype=torch.float32, device=distributed.device)  # Adam's t: good updates

    def step(self, learning_rate: float, loss: Tensor, updated: Callable[[Stage], None]) -> Update:
        """One update from the stages' gradient shards. `loss`: this rank's, summed; it shares the norm's collective.

        `updated` is called after each stage, in stage order: its new weights may be gathered while others are updated.
        """
        trained = [(stage, stage.trainable) for stage in self._stages if stage.trainable is not None]
        total = torch.stack([*(_squared_norm(part.grad_shard) for _, part in trained)]).sum()
        norm_squared, loss = self._distributed.sum_in_rank_order(torch.stack([total, loss.double()]))
        scale = self.loss_scale.scale
        grad_norm = (norm_squared.sqrt() / scale).float()
        skipped = ~torch.isfinite(grad_norm)
        self._updates.add_(~skipped)
        clip = self._config.clip_grad
        coefficient = (clip / (grad_norm + 1e-6)).clamp(max=1.0) if clip > 0 else torch.ones_like(grad_norm)
        divisor = scale / coefficient
        for stage, part in trained:
            stage.begin_update()
            self._update(part, learning_rate, divisor, skipped.float())
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

    def _update(self, part: Part, learning_rate: float, divisor: Tensor, skipped: Tensor) -> None:
        in_place = part.grad_shard.dtype == torch.float32 and isinstance(part.weights, WeightShard)
        for group in part.layout.update_ranges(self._distributed.rank):
            step_numel = group.end - group.start if in_place else CHUNK_NUMEL
            weight_decay = self._config.weight_decay if group.weight_decay else 0.0
            for start in range(group.start, group.end, step_numel):
                bounds = slice(start, min(start + step_numel, group.end))
                weights = part.weights.read(bounds.start, bounds.stop)
                torch._fused_adamw_(
                    [weights], [part.grad_shard[bounds].float()], [part.exp_avg[bounds]], [part.exp_avg_sq[bounds]],
                    [], [self._updates], lr=learning_rate * group.lr_scale, beta1=self._config.adam_beta1,
                    beta2=self._config.adam_beta2, weight_decay=weight_decay, eps=self._config.adam_eps,
                    amsgrad=False, maximize=False, grad_scale=divisor, found_inf=skipped,
                )  # fmt: skip
                part.weights.write(weights, bounds.start)


def _squared_norm(shard: Tensor) -> Tensor:
    """Sum of squares, () in fp64, of pieces in fp32.

    One fp32 sum over a whole shard would lose small squares (on CPU 0.1 % of the norm at 16 million elements), and
    gradients under a loss scale would overflow it.
    """
    norms = torch._foreach_norm(shard.split(NORM_CHUNK_NUMEL), 2, torch.float32)
    return torch.stack(norms).double().square().sum()
