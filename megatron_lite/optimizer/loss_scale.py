"""Scale the loss on the device: the host reads no value to drop a step."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_lite.config import JsonObject, OptimizerConfig


class LossScale:
    """A factor on the loss: constant, or dynamic (fp16).

    The dynamic scale is halved after `hysteresis` overflows and doubled after `loss_scale_window`
    good updates. An overflow restarts the count of good updates; doubling restores the hysteresis.
    """

    def __init__(self, config: OptimizerConfig, training_dtype: str, device: torch.device) -> None:
        self._config = config
        self.dynamic = config.loss_scale is None and training_dtype == "fp16"
        constant = 1.0 if config.loss_scale is None else config.loss_scale
        initial = config.initial_loss_scale if self.dynamic else constant
        self.scale = torch.tensor(initial, dtype=torch.float32, device=device)
        # since the last change or overflow
        self._good = torch.zeros((), dtype=torch.int64, device=device)
        self._patience = torch.full((), config.hysteresis, dtype=torch.int64, device=device)

    def can_shrink(self) -> Tensor:
        """Return whether an overflow can lower a dynamic scale, () bool."""
        return self.scale > self._config.min_loss_scale

    def update(self, overflow: Tensor) -> None:
        """Adapt a dynamic scale after one update; `overflow` is a bool tensor, ()."""
        config = self._config
        self._patience.sub_(overflow.long())
        shrink = overflow & (self._patience <= 0)
        self._good.add_(1).mul_(~overflow)
        grow = self._good >= config.loss_scale_window
        smaller = (self.scale / 2).clamp_(min=config.min_loss_scale)
        self.scale.copy_(
            torch.where(shrink, smaller, torch.where(grow, self.scale * 2, self.scale))
        )
        self._good.mul_(~grow)
        self._patience.masked_fill_(grow, config.hysteresis)

    def state(self) -> JsonObject:
        """Return the scale and counts for a checkpoint (reads the device)."""
        counts = {"good": int(self._good), "patience": int(self._patience)}
        return {"dynamic": self.dynamic, "scale": float(self.scale), **counts}

    def load_state(self, state: JsonObject) -> None:
        """Restore `state` if both scales are dynamic."""
        if self.dynamic and state["dynamic"]:
            self.scale.fill_(state["scale"])
            self._good.fill_(state["good"])
            self._patience.fill_(state["patience"])
