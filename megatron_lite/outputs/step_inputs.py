"""The micro-batches of a step, as the model takes them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lite.data.loader import HostBatch, micro_batch
from megatron_lite.model.layer import MicroBatch
from megatron_lite.seeds import dropout_seed
from megatron_lite.setup_run import Run


def step_tokens(run: Run, iteration: int) -> int:
    """Return the tokens of an iteration over all ranks, without padding."""
    return run.data.split("training", iteration).samples * run.config.batch.sequence_length


def step_inputs(run: Run, micro_batches: Sequence[HostBatch], iteration: int) -> list[MicroBatch]:
    """Copy this rank's micro-batches to the device, with their gradient scale and dropout seed."""
    seed, rank = run.config.distributed.seed, run.distributed.rank
    scale = run.optimizer.loss_scale.scale / step_tokens(run, iteration)
    weights = run.data.split("training", iteration).loss_weights(run.config.training.loss_reduction)
    return [
        micro_batch(batch, run.distributed.device, scale, dropout_seed(seed, iteration, index, rank), weight)
        for index, (batch, weight) in enumerate(zip(micro_batches, weights, strict=True))
    ]
