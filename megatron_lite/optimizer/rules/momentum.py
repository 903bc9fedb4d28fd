"""SGD with momentum, and Lion (Chen et al. 2023), on shards: one moment, elementwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from megatron_lite.config import OptimizerConfig
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.choice import Kernels
from megatron_lite.kernels.momentum import lion, sgd
from megatron_lite.optimizer.rules.rule import Rule, StepNumbers, Trained, ranges_of
from megatron_lite.zero.flat_shard import Moment, OptimizerState


class Momentum(Rule):
    """SGD or Lion in one pass over each shard; Lion's betas are --adam_beta1 and --adam_beta2."""

    declared = OptimizerState((Moment("exp_avg"),))

    def __init__(
        self, config: OptimizerConfig, trained: Sequence[Trained], distributed: Distributed, kernels: Kernels
    ) -> None:
        rules: dict[str, Callable[..., None]] = {
            "lion": partial(lion, beta1=config.adam_beta1, beta2=config.adam_beta2),
            "sgd": partial(sgd, momentum=config.sgd_momentum),
        }
        self._update = rules[config.optimizer]
        self._ranges = {
            stage.index: ranges_of(part, distributed.data.rank, distributed.device) for stage, part in trained
        }

    def apply(self, trained: Trained, numbers: StepNumbers) -> None:
        """See `Rule`."""
        part, rows = trained.part, self._ranges[trained.stage.index].rows
        self._update(part.weights, part.grad_shard, part.moments["exp_avg"], rows, numbers)
