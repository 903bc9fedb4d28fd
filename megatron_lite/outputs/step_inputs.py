"""Prepare a step's micro-batches for the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megatron_lite.data.host_batch import HostBatch, micro_batch
from megatron_lite.model.layer import MicroBatch, Routing
from megatron_lite.outputs.run import Run
from megatron_lite.seeds import dropout_seed

# consecutive updates without a counted label before a run warns; evaluations: 1
PATIENCE = {"training": 100}


def counted_labels(run: Run, micro_batches: Sequence[HostBatch]) -> list[int]:
    """Return the labels of each micro-step that count in the loss, over all ranks. Collective.

    Without masks every rank knows the numbers, and no communication is needed.
    """
    if any(batch.masked is not None for batch in micro_batches):
        # the other ranks train on the same samples
        copies = run.distributed.world_size // run.distributed.data.world_size
        return [
            total // copies
            for total in run.distributed.agree_sum([batch.counted for batch in micro_batches])
        ]
    return [batch.real_samples * run.config.batch.sequence_length for batch in micro_batches]


def watch_labels(run: Run, phase: str, counted: int) -> None:
    """Warn once that no label counts in the loss of an evaluation, or of many consecutive
    updates."""
    patience = PATIENCE.get(phase, 1)
    run.without_labels[phase] = 0 if counted else run.without_labels.get(phase, 0) + 1
    if run.without_labels[phase] == patience:
        what = (
            f"of {patience} updates in a row"
            if phase == "training"
            else f"of the {phase}, which has no loss,"
        )
        run.logger.warning("no label %s counts: look at the data and --loss_mask", what)


def step_inputs(
    run: Run, micro_batches: Sequence[HostBatch], iteration: int, counted: Sequence[int]
) -> list[MicroBatch]:
    """Copy this rank's micro-batches to the device, with their gradient scale and dropout seed.

    counted: see `counted_labels`.
    """
    seed, rank = run.config.distributed.seed, run.distributed.data.rank
    scale = run.optimizer.loss_scale.scale / max(sum(counted), 1)
    weights = loss_weights(counted, run.config.training.loss_reduction)
    inputs = [
        micro_batch(
            batch, run.distributed.device, scale, dropout_seed(seed, iteration, index, rank), weight
        )
        for index, (batch, weight) in enumerate(zip(micro_batches, weights, strict=True))
    ]
    model = run.config.model
    if model.num_experts == 1:
        return inputs
    shape = model.expert_blocks, model.num_experts
    tokens = sum(batch.real_samples for batch in micro_batches) * run.config.batch.sequence_length
    scale = run.optimizer.loss_scale.scale / max(tokens, 1)
    return [
        replace(
            each,
            routing=Routing(
                len(batch.tokens) - batch.padding,
                scale,
                partial(run.replay, batch.first_sample) if run.replay else None,
                scale.new_zeros(shape) if model.balances_micro_batches else None,
            ),
        )
        for each, batch in zip(inputs, micro_batches, strict=True)
    ]


def loss_weights(counted: Sequence[int], reduction: str) -> list[float]:
    """Return the weight of each micro-step's summed loss; the weighted sum per counted label is the
    batch's loss.

    Args:
        counted: labels that count in the loss per micro-step, over all ranks.
        reduction: "token": every label has the same weight. "micro_mean": every micro-step's mean
            has the same weight, however few labels it counts (as in Levanter), or 0 without any.
    """
    if reduction == "token":
        return [1.0] * len(counted)
    assert reduction == "micro_mean", reduction
    means = sum(number > 0 for number in counted)
    return [sum(counted) / (means * number) if number else 0.0 for number in counted]
