"""AdamW (Loshchilov & Hutter 2019) on shards: one pass over each, see `kernels/adamw.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_lite.config import OptimizerConfig
from megatron_lite.distributed import Distributed
from megatron_lite.kernels.adamw import Control, Hyperparameters, adamw
from megatron_lite.kernels.choice import Kernels
from megatron_lite.optimizer.rules.rule import Step, Trained, ranges_of, shard_of


class AdamW:
    """A `Rule`."""

    def __init__(
        self, config: OptimizerConfig, trained: Sequence[Trained], distributed: Distributed, kernels: Kernels
    ) -> None:
        self._config, self._triton = config, kernels.triton
        self._ranges = {stage.index: ranges_of(part, distributed.rank, distributed.device) for stage, part in trained}

    def begin(self, trained: Sequence[Trained], step: Step) -> None:
        """See `Rule`."""
        config = self._config
        numbers = Hyperparameters(
            step.learning_rate, step.weight_decay, config.adam_beta1, config.adam_beta2, config.adam_eps
        )
        self._control = Control(step.divisor, step.updates, step.skipped, numbers)

    def apply(self, trained: Trained, step: Step) -> None:
        """See `Rule`."""
        adamw(shard_of(trained.part), self._ranges[trained.stage.index], self._control, self._triton)

    def state(self) -> dict[str, Any]:
        """See `Rule`."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """See `Rule`."""
