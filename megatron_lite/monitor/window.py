"""Sums between two log lines, kept on the device and stored in checkpoints, so that a resumed log is the same log."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LogWindow:
    """Loss of the good updates since the last line, and the time spent waiting for data."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), dtype=torch.float64, device=device)  # sum over good updates, over all tokens
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)  # of the same updates
        self._data_wait_s = 0.0
        self.iterations = 0  # in this window and this start

    def add(self, loss: Tensor, tokens: int, skipped: Tensor, data_wait_s: float) -> None:
        """Count one update with its loss, summed over so many tokens; no value is read on the host."""
        self._loss.add_(torch.where(skipped, torch.zeros_like(loss), loss))
        self._tokens.add_(tokens * ~skipped)
        self._data_wait_s += data_wait_s
        self.iterations += 1

    def close(self) -> dict[str, Any]:
        """The record of this window (reads the device); starts the next one."""
        tokens = int(self._tokens)
        record: dict[str, Any] = {"loss": float(self._loss) / tokens if tokens else None}
        if self.iterations:
            record["data_wait_ms"] = 1e3 * self._data_wait_s / self.iterations
        self._loss.zero_()
        self._tokens.zero_()
        self._data_wait_s, self.iterations = 0.0, 0
        return record

    def state(self) -> dict[str, Any]:
        """For a checkpoint (reads the device)."""
        return {"loss": float(self._loss).hex(), "tokens": int(self._tokens)}

    def load_state(self, state: dict[str, Any], tokens_per_iteration: int = 0) -> None:
        """The inverse of `state`. Older checkpoints count updates instead of tokens, each of `tokens_per_iteration`."""
        self._loss.fill_(float.fromhex(state["loss"]))
        self._tokens.fill_(state["tokens"] if "tokens" in state else state["good"] * tokens_per_iteration)
