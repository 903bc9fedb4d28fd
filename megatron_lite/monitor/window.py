"""Sums between two log lines, kept on the device and stored in checkpoints, so that a resumed log is the same log."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LogWindow:
    """Loss of the good updates since the last line, and counts of the dropped ones since the start of training."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)  # sum over good updates, over all tokens
        self._good = torch.zeros((), dtype=torch.int64, device=device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._nan = torch.zeros((), dtype=torch.int64, device=device)
        self._streak = torch.zeros((), dtype=torch.int64, device=device)  # dropped updates in a row
        self._data_wait_s = 0.0
        self.iterations = 0  # in this window and this start

    def add(self, loss: Tensor, grad_norm: Tensor, skipped: Tensor, data_wait_s: float) -> None:
        """Count one update; no value is read on the host."""
        self._loss.add_(torch.where(skipped, torch.zeros_like(loss), loss))
        self._good.add_(~skipped)
        self._skipped.add_(skipped)
        self._nan.add_(torch.isnan(grad_norm))
        self._streak.add_(1).mul_(skipped)
        self._data_wait_s += data_wait_s
        self.iterations += 1

    @property
    def streak(self) -> int:
        """How many updates in a row have been dropped, up to now (reads the device)."""
        return int(self._streak)

    def close(self, tokens_per_iteration: int) -> dict[str, Any]:
        """The record of this window (reads the device); starts the next one."""
        good = int(self._good)
        record: dict[str, Any] = {
            "loss": float(self._loss) / (good * tokens_per_iteration) if good else None,
            "skipped_iters": int(self._skipped),
            "nan_iters": int(self._nan),
        }
        if self.iterations:
            record["data_wait_ms"] = 1e3 * self._data_wait_s / self.iterations
        self._loss.zero_()
        self._good.zero_()
        self._data_wait_s, self.iterations = 0.0, 0
        return record

    def state(self) -> dict[str, Any]:
        """For a checkpoint (reads the device)."""
        counts = {name: int(getattr(self, f"_{name}")) for name in ("good", "skipped", "nan", "streak")}
        return {"loss": float(self._loss).hex(), **counts}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""
        self._loss.fill_(float.fromhex(state["loss"]))
        for name in ("good", "skipped", "nan", "streak"):
            getattr(self, f"_{name}").fill_(state[name])
