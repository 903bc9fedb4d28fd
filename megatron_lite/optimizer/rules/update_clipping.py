"""Factors that keep updates small: of every parameter by its root mean square, or of all by their norm.

Both look at u, the update before the learning rate, weight decay included, in sums of its squares over the ranges of
each rank's shards (see `kernels/adamw_clipped.py`). These are summed over ranks in one collective, so every rank has
the same factors. The rules are Levanter's: config.py (update_rms_clipping) and clip_update_norm.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lite.distributed import Distributed
from megatron_lite.optimizer.rolling import RollingStatistics
from megatron_lite.optimizer.rules.rule import Trained


class RmsClipping:
    """u of a parameter = u / max(1, RMS(u) / limit), its root mean square taken over all its elements on all ranks."""

    def __init__(self, limit: float, trained: Sequence[Trained], distributed: Distributed) -> None:
        self._limit, self._distributed = limit, distributed
        sizes: list[int] = []  # of all parameters
        places: list[int] = []  # of those in this rank's ranges, among all
        for _, part in trained:
            places += [len(sizes) + row.slot for row in part.layout.update_ranges(distributed.rank, apart=True)]
            sizes += [slot.numel for slot in part.layout.slots]
        self._sizes = torch.tensor(sizes, dtype=torch.float64, device=distributed.device)
        self._places = torch.tensor(places, device=distributed.device)

    def factors(self, sums: Sequence[Tensor], skipped: Tensor) -> list[Tensor]:
        """A factor for each range, fp32, in the form of `sums`: (ranges,) fp64 of each shard, a parameter each."""
        own = torch.zeros_like(self._sizes).index_copy_(0, self._places, torch.cat(list(sums)))
        rms = (self._distributed.sum_in_rank_order(own) / self._sizes).sqrt_()
        factors = (self._limit / rms).clamp_(max=1.0).float()
        return list(factors[self._places].split([len(some) for some in sums]))

    def state(self) -> dict[str, Any]:
        """Nothing has to be remembered."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`."""


class NormClipping:
    """All u are scaled so that their norm is at most mean + sigma * std of the latest norms.

    The history gets norms as they were before clipping, lest clipping feed on itself, and none of dropped updates.
    """

    def __init__(self, sigma: float, window: int, distributed: Distributed) -> None:
        self._distributed = distributed
        self._usual = RollingStatistics(window, sigma, distributed.device)

    def factors(self, sums: Sequence[Tensor], skipped: Tensor) -> list[Tensor]:
        """A factor for each range, fp32, in the form of `sums`: (ranges,) fp64 of each shard."""
        norm = self._distributed.sum_in_rank_order(torch.cat(list(sums)).sum(0, keepdim=True)).sqrt_()
        limit = self._usual.threshold()
        factor = torch.where(norm > limit, limit / norm.clamp(min=1e-6), 1.0).float()
        self._usual.add(norm, ((skipped == 0) & norm.isfinite()).squeeze())
        return [factor.expand(len(some)).contiguous() for some in sums]

    def state(self) -> dict[str, Any]:
        """For a checkpoint (reads the device)."""
        return {"norms": self._usual.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `state`; an empty one begins anew."""
        self._usual.load_state(state.get("norms", []))
