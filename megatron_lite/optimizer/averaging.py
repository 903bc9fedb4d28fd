"""Running averages of the weights, on the shards; evaluated and exported in addition to or instead
of the weights.

    ema:             a = beta * a + (1 - beta) * w                         a starts at the first weights
    ema_decay_sqrt:  a = a + (s_t / S_t) * (w - a)                         S_t = s_0 + ... + s_t
                     s_t = 1 - beta                                        before update t = `ema_switch_iter`
                     s_t = 1 - sqrt(min((t - switch) / decay_iters, 1))    from then on

w: the weights after update t = 0, 1, ... since averaging began, including dropped updates. The
formulas are Levanter's `EmaModelAveraging` and `EmaDecaySqrtModelAveraging`
(stanford-crfm/levanter, optim/model_averaging.py). The second is the plain mean of all weights up
to the switch, then favours the weights just after it, and freezes when the decay ends (for runs
whose learning rate also decays); its first update overwrites the initial value.

The newest weights' coefficient is a number on the host. Each average is updated in one pass, in
fp32 at any training dtype, without reading the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from megatron_lite.config import AveragingConfig, JsonObject
from megatron_lite.kernels.weight_shard import ALL, chunk_bounds
from megatron_lite.zero.flat_shard import FlatShard


class Averaging:
    """The averages of all parts that have one."""

    def __init__(self, config: AveragingConfig, parts: Sequence[FlatShard]) -> None:
        self._config = config
        self._parts = [part for part in parts if part.average is not None]
        self.updates = 0  # since averaging began
        self._total = 0.0  # S of the last update; unused by ema
        self._share = 0.0

    def start(self) -> None:
        """Restart from the current weights."""
        self.updates, self._total = 0, 0.0
        for part in self._parts:
            for average, weights in _pieces(part):
                average.copy_(weights)

    def begin(self) -> None:
        """Compute this update's coefficient; then call `follow` for each updated part."""
        if self._config.ema_type == "ema":
            self._share = 1.0 - self._config.ema_beta
        elif self._config.ema_type == "ema_decay_sqrt":
            newest = weight_in_sum(self._config, self.updates)
            self._total += newest
            self._share = newest / self._total if self._total else 0.0
        else:
            assert self._config.ema_type == "none", self._config.ema_type
        self.updates += 1

    def follow(self, part: FlatShard) -> None:
        """Move a part's average towards its updated weights."""
        for average, weights in _pieces(part):
            average.lerp_(weights, self._share)

    def state(self) -> JsonObject:
        """Return the counts for a checkpoint; the averages themselves are saved with the shards."""
        return {"type": self._config.ema_type, "updates": self.updates, "total": self._total}

    def load_state(self, state: JsonObject) -> None:
        """Restore `state`; restart if it is empty or from another type of average."""
        if state.get("type") == self._config.ema_type:
            self.updates, self._total = state["updates"], state["total"]
        else:
            self.start()


def weight_in_sum(config: AveragingConfig, update: int) -> float:
    """Return s_t of ema_decay_sqrt for t from 0, not normalized."""
    if update < config.ema_switch_iter:
        return 1.0 - config.ema_beta
    return 1.0 - math.sqrt(min((update - config.ema_switch_iter) / config.ema_decay_iters, 1.0))


def _pieces(part: FlatShard) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (average, weights) in fp32, (n,) each: the whole shard, or chunks of a shard with split
    master weights."""
    if part.average is None:
        return
    for bounds in [ALL] if part.weights.master is not None else chunk_bounds(part.average):
        yield part.average[bounds], part.weights.read(bounds)
