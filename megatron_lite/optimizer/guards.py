"""Which updates are dropped: those that are not finite, and, with --skip_bad_steps, those far above what is usual.

A dropped update changes no weight, no moment and not Adam's count. Everything is decided on the device, from numbers
that are summed over all ranks and so are the same on all of them; nothing is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_lite.config import OptimizerConfig
from megatron_lite.optimizer.dropped_steps import DroppedSteps
from megatron_lite.optimizer.rolling import RollingStatistics


@dataclass(frozen=True)
class Verdict:
    """On one update; tensors on the device, ()."""

    skipped: Tensor  # bool: nothing may change
    overflow: Tensor  # bool: the gradient is not finite, or too large to be squared; all that a loss scale learns of


class Guard:
    """Judges every update before it is made, and keeps what later verdicts and the log need.

    The rule of --skip_bad_steps is Levanter's (skip_step.py): a step is bad whose loss or gradient norm is above mean +
    sigma * std over the steps before it, bad ones included, once half of the window is known. Steps that are not finite
    are bad too, but are not remembered: there, one NaN makes every step bad until it leaves the window.
    """

    def __init__(self, config: OptimizerConfig, dynamic_loss_scale: bool, device: torch.device) -> None:
        self._config, self._dynamic = config, dynamic_loss_scale
        self._usual: RollingStatistics | None = None
        if config.skip_bad_steps:
            self._usual = RollingStatistics(config.skip_bad_steps_window, config.skip_bad_steps_sigma, device, width=2)
        self._no_limits = torch.full((2,), torch.inf, dtype=torch.float64, device=device)
        self.dropped = DroppedSteps(config, dynamic_loss_scale, device)

    def judge(self, iteration: int, loss: Tensor, grad_norm: Tensor) -> Verdict:
        """The verdict on a step, which is part of the history from now on.

        Args:
            iteration: counted from 1.
            loss: mean over the tokens of the global batch, () fp64.
            grad_norm: of the unscaled global gradient before clipping, () fp32.
        """
        numbers = torch.stack([loss, grad_norm.double()])
        # The norm's square may not overflow in fp32: the second moment would, and stay so.
        finite = torch.stack([loss, grad_norm.square().double()]).isfinite()
        limits, good = self._no_limits, finite
        if self._usual is not None:
            limits = self._usual.threshold()
            good = finite & (numbers <= limits)
            self._usual.add(numbers, finite.all())
        verdict = Verdict(~good.all(), ~finite[1])
        self.dropped.add(iteration, numbers, limits, verdict.skipped, self._fatal(numbers, finite, good))
        return verdict

    def _fatal(self, numbers: Tensor, finite: Tensor, good: Tensor) -> Tensor | None:
        """Whether the run has to stop; None: never. An overflow is nothing unusual for a dynamic loss scale."""
        config = self._config
        if config.on_bad_step == "abort":
            bad = ~good
        elif config.crash_on_nan and config.crash_on_inf:
            bad = ~finite
        elif config.crash_on_nan:
            bad = numbers.isnan()
        elif config.crash_on_inf:
            bad = ~finite & ~numbers.isnan()
        else:
            return None
        return bad[0] | (bad[1] & finite[1]) if self._dynamic else bad.any()

    def clipping_factor(self, grad_norm: Tensor) -> Tensor:
        """By which gradients are multiplied so that their norm stays within --clip_grad: (), at most 1.

        As torch.nn.utils.clip_grad_norm_, where the 1e-6 also shrinks a norm at the maximum, or as Levanter (and
        optax.clip_by_global_norm).
        """
        clip = self._config.clip_grad
        if clip == 0:
            return torch.ones_like(grad_norm)
        margin = 1e-6 if self._config.clip_grad_style == "torch" else 0.0
        return (clip / (grad_norm + margin)).clamp(max=1.0)

    def state(self) -> dict[str, Any]:
        """For a checkpoint (reads the device)."""
        return {"usual": self._usual.state() if self._usual else [], "dropped": self.dropped.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; an empty one begins anew. Of a history of another window the newest values count."""
        if self._usual is not None:
            self._usual.load_state(state.get("usual", []))
        if "dropped" in state:
            self.dropped.load_state(state["dropped"])
