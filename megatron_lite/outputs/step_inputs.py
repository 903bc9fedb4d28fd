"""The micro-batches of a step, as the model takes them."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_lite.data.loader import HostBatch, micro_batch
from megatron_lite.model.layer import MicroBatch
from megatron_lite.schedules.batch_size import loss_weights
from megatron_lite.seeds import dropout_seed
from megatron_lite.setup_run import Run


def counted_labels(run: Run, phase: str, micro_batches: Sequence[HostBatch], iteration: int) -> list[int]:
    """Return the labels of each micro-step that count in the loss, over all ranks, which call this together.

    Without masks the batch schedule tells, and nothing is exchanged.
    """
    if any(batch.masked is not None for batch in micro_batches):
        copies = run.distributed.tensor.world_size  # ranks that train on the same samples
        return [total // copies for total in run.distributed.agree_sum([batch.counted for batch in micro_batches])]
    split, length = run.data.split(phase, iteration), run.config.batch.sequence_length
    return [split.real_samples(micro_step) * length for micro_step in range(split.micro_steps)]


def step_inputs(
    run: Run, micro_batches: Sequence[HostBatch], iteration: int, counted: Sequence[int]
) -> list[MicroBatch]:
    """Copy this rank's micro-batches to the device, with their gradient scale and dropout seed.

    counted: see `counted_labels`.
    """
    seed, rank = run.config.distributed.seed, run.distributed.data.rank
    scale = run.optimizer.loss_scale.scale / max(sum(counted), 1)
    weights = loss_weights(counted, run.config.training.loss_reduction)
    return [
        micro_batch(batch, run.distributed.device, scale, dropout_seed(seed, iteration, index, rank), weight)
        for index, (batch, weight) in enumerate(zip(micro_batches, weights, strict=True))
    ]
