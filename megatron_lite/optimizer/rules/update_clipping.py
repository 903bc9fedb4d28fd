"""Clip updates: each parameter's by its root mean square, or all of them by their global norm.

Both use sums of squares of u, the update before the learning rate, including weight decay, over the
ranges of each rank's shards (see `kernels/adamw.py`). One collective joins the ranges of all
stages, another one sums over the ranks with the same layers, so every rank has the same factors,
and P changes no bit. Replicated elements count once. The rules follow Levanter: config.py
(update_rms_clipping) and clip_update_norm.py.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from megatron_lite.config import JsonObject
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.adamw import Ranges
from megatron_lite.optimizer.rolling import RollingStatistics
from megatron_lite.optimizer.rules.rule import Trained


class UpdateClipping:
    """Base class: statistics for the log and checkpoints."""

    def __init__(
        self, trained: Sequence[Trained], ranges: Collection[Ranges], distributed: Distributed
    ) -> None:
        """Collect the ranges. trained: all stages. ranges: of each stage's shard on this data and
        tensor-parallel rank."""
        self._distributed = distributed
        shards = zip(trained, ranges, strict=True)
        rows = [(row, part.has_memory) for (_, part), some in shards for row in some.rows]
        counted = [place for place, (row, _) in enumerate(rows) if row.counts]
        own = [place for place, (_, is_own) in enumerate(rows) if is_own]
        self._num_rows = len(rows)
        self._counted = torch.tensor(counted, dtype=torch.int64, device=distributed.device)
        self._mine = torch.tensor(own, dtype=torch.int64, device=distributed.device)
        # of the last u, before clipping
        self._norm = torch.zeros((), dtype=torch.float64, device=distributed.device)
        # updates, since training began
        self._clipped = torch.zeros((), dtype=torch.int64, device=distributed.device)

    def factors(self, sums: Sequence[Tensor], skipped: Tensor) -> list[Tensor]:
        """Return a factor for each range of each shard on this rank, (ranges,) fp32.

        sums: of squares of u, for each shard on this rank, (ranges,) fp64. skipped: 1 or 0, ().
        """
        raise NotImplementedError

    def record(self) -> JsonObject:
        """Return entries for a log line (reads the device)."""
        return {"update_norm": float(self._norm), "clipped_iters": int(self._clipped)}

    def state(self) -> JsonObject:
        """Return the state for a checkpoint (reads the device)."""
        return {"clipped": int(self._clipped), "norm": float(self._norm)}

    def load_state(self, state: JsonObject) -> None:
        """Restore `state`; an empty one restarts."""
        self._clipped.fill_(state.get("clipped", 0))
        self._norm.fill_(state.get("norm", 0.0))

    def _all(self, sums: Sequence[Tensor]) -> Tensor:
        """Return the sums of the model's ranges that count on this data and tensor-parallel rank,
        in order."""
        every = torch.zeros(self._num_rows, dtype=torch.float64, device=self._mine.device)
        if sums:
            every[self._mine] = torch.cat(list(sums))
        return self._distributed.pipeline.sum_in_rank_order(every)[self._counted]

    def _note(self, norm: Tensor, clipped: Tensor, skipped: Tensor) -> None:
        self._norm = torch.where((skipped == 0) & norm.isfinite(), norm, self._norm)
        self._clipped.add_(clipped)


class RmsClipping(UpdateClipping):
    """Divides u by max(1, RMS(u) / limit) per parameter, with the RMS over its elements on all
    ranks.

    Needs one range per parameter.
    """

    def __init__(
        self,
        limit: float,
        trained: Sequence[Trained],
        ranges: Collection[Ranges],
        distributed: Distributed,
    ) -> None:
        super().__init__(trained, ranges, distributed)
        self._limit = limit
        sizes: list[int] = []  # elements of each parameter
        places: list[int] = []  # parameter index of each range
        for (_, part), some in zip(trained, ranges, strict=True):
            places += [len(sizes) + row.slot for row in some.rows]
            sizes += [slot.spec.numel for slot in part.layout.slots]
        self._sizes = torch.tensor(sizes, dtype=torch.float64, device=distributed.device)
        self._places = torch.tensor(places, device=distributed.device)
        self._counted_places = self._places[self._counted]

    def factors(self, sums: Sequence[Tensor], skipped: Tensor) -> list[Tensor]:
        """See `UpdateClipping`."""
        own = torch.zeros_like(self._sizes).index_copy_(0, self._counted_places, self._all(sums))
        total = self._distributed.layers.sum_in_rank_order(own)
        factors = self._limit / (total / self._sizes).sqrt_()
        self._note(total.sum().sqrt_(), (factors < 1.0).any(), skipped)
        own_places = self._places[self._mine]
        return list(factors.clamp_(max=1.0).float()[own_places].split([len(some) for some in sums]))


class NormClipping(UpdateClipping):
    """Scales all u so that their global norm is at most mean + sigma * std of recent norms.

    The history contains norms before clipping, so that clipping does not reinforce itself, and
    skips dropped updates.
    """

    def __init__(
        self,
        usual: RollingStatistics,
        trained: Sequence[Trained],
        ranges: Collection[Ranges],
        distributed: Distributed,
    ) -> None:
        super().__init__(trained, ranges, distributed)
        self._usual = usual

    def factors(self, sums: Sequence[Tensor], skipped: Tensor) -> list[Tensor]:
        """See `UpdateClipping`."""
        norm = self._distributed.layers.sum_in_rank_order(
            self._all(sums).sum(0, keepdim=True)
        ).sqrt_()
        limit = self._usual.threshold()
        factor = torch.where(norm > limit, limit / norm.clamp(min=1e-6), 1.0).float()
        self._usual.add(norm, ((skipped == 0) & norm.isfinite()).squeeze())
        self._note(norm.squeeze(), (norm > limit).squeeze(), skipped)
        return [factor.expand(len(some)).contiguous() for some in sums]

    def state(self) -> JsonObject:
        """See `UpdateClipping`."""
        return {**super().state(), "norms": self._usual.state()}

    def load_state(self, state: JsonObject) -> None:
        """See `UpdateClipping`."""
        super().load_state(state)
        self._usual.load_state(state.get("norms", []))
