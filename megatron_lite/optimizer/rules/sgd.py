"""SGD with momentum and decoupled weight decay on shards; see `kernels/momentum.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_lite.config import OptimizerConfig
from megatron_lite.distributed import Distributed
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.momentum import sgd
from megatron_lite.optimizer.rules.rule import Step, Trained, numbers_of, ranges_of, weights_of


class SGD:
    """A `Rule`."""

    def __init__(
        self, config: OptimizerConfig, trained: Sequence[Trained], distributed: Distributed, kernels: Kernels
    ) -> None:
        self._config = config
        self._ranges = {stage.index: ranges_of(part, distributed.rank, distributed.device) for stage, part in trained}

    def begin(self, trained: Sequence[Trained], step: Step) -> None:
        """See `Rule`."""

    def apply(self, trained: Trained, step: Step) -> None:
        """See `Rule`."""
        part, rows = trained.part, self._ranges[trained.stage.index].rows
        momentum, exp_avg = self._config.sgd_momentum, part.moments["exp_avg"]
        sgd(weights_of(part), part.grad_shard, exp_avg, rows, numbers_of(step), momentum)

    def state(self) -> dict[str, Any]:
        """See `Rule`."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """See `Rule`."""
