"""AdamW (Loshchilov & Hutter 2019) on shards: one pass over each, two if updates are clipped."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lite.config import JsonObject, OptimizerConfig
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.adamw import (
    Control,
    Hyperparameters,
    Ranges,
    Shard,
    StepNumbers,
    adamw,
    adamw_moments,
    adamw_weights,
)
from megatron_lite.kernels.choice import Kernels
from megatron_lite.optimizer.rolling import RollingStatistics
from megatron_lite.optimizer.rules.rule import Rule, Trained, ranges_of
from megatron_lite.optimizer.rules.update_clipping import NormClipping, RmsClipping, UpdateClipping
from megatron_lite.zero.flat_shard import ADAM_STATE, FlatShard


class AdamW(Rule):
    """AdamW, with optional clipping of its updates."""

    declared = ADAM_STATE

    def __init__(
        self,
        config: OptimizerConfig,
        trained: Sequence[Trained],
        distributed: Distributed,
        kernels: Kernels,
    ) -> None:
        self._triton = kernels.triton
        self._hyperparameters = Hyperparameters(
            config.adam_beta1, config.adam_beta2, config.adam_eps, config.adam_nesterov
        )
        separate, sigma = config.update_rms_clip is not None, config.clip_update_norm_sigma
        clips = separate or sigma is not None
        self._shards: dict[FlatShard, Shard] = {}
        self._ranges: dict[FlatShard, Ranges] = {}
        for _, part in trained:
            self._ranges[part] = ranges_of(part, distributed, clips, separate)
            if part.has_memory:
                self._shards[part] = Shard(part.weights, part.grad_shard, *part.moments.values())
        self._clipping: UpdateClipping | None = None
        if config.update_rms_clip is not None:
            self._clipping = RmsClipping(
                config.update_rms_clip, trained, self._ranges.values(), distributed
            )
        elif sigma is not None:
            usual = RollingStatistics(config.clip_update_norm_window, sigma, distributed.device)
            self._clipping = NormClipping(usual, trained, self._ranges.values(), distributed)

    def begin(self, trained: Sequence[Trained], numbers: StepNumbers) -> None:
        """See `Rule`."""
        self._control = Control(numbers, self._hyperparameters)
        if self._clipping is None:
            return
        sums = [
            adamw_moments(self._shards[part], self._ranges[part], self._control, self._triton)
            for _, part in trained
        ]
        factors = self._clipping.factors(sums, numbers.skipped)
        self._factors = {part: factor for (_, part), factor in zip(trained, factors, strict=True)}

    def apply(self, trained: Trained, numbers: StepNumbers) -> None:
        """See `Rule`."""
        part = trained.part
        shard, ranges = self._shards[part], self._ranges[part]
        if self._clipping is None:
            adamw(shard, ranges, self._control, self._triton)
        else:
            adamw_weights(shard, ranges, self._factors[part], self._control, self._triton)

    def record(self) -> JsonObject:
        """See `Rule`."""
        return {} if self._clipping is None else self._clipping.record()

    def state(self) -> JsonObject:
        """See `Rule`."""
        return {} if self._clipping is None else {"clipping": self._clipping.state()}

    def load_state(self, state: JsonObject) -> None:
        """See `Rule`."""
        if self._clipping is not None:
            self._clipping.load_state(state.get("clipping", {}))
