"""Execution of a schedule: the training step of the ZeRO paper, one line per event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lite.zero.schedule import Step
from megatron_lite.zero.stage import Stage
from megatron_lite.zero.throttle import Throttle


def forward_backward(
    stages: Mapping[int, Stage], schedule: Sequence[Step], micro_batches: Sequence[Any], throttle: Throttle | None
) -> Tensor:
    """Run one iteration's micro-batches and return this rank's summed loss, ().

    stages: by number in the model. Afterwards every `grad_shard` holds this rank's slice of the gradient, summed over
    micro-batches and ranks.
    """
    hidden: dict[int, Tensor] = {}  # (b, s, h) between stages; after the last one the loss, ()
    grad: dict[int, Tensor | None] = {}  # d loss / d hidden, (b, s, h)
    for step in schedule:
        stage, micro = stages[step.stage], step.micro_batch
        for index in step.gather:
            stages[index].gather()  # all_gather: shards -> full weights, for now or as a prefetch
        for index in step.needs:
            stages[index].require_weights()
        for index in step.accumulate:
            stages[index].accumulate()
        if step.kind == "forward":
            hidden[micro] = stage.forward(hidden.get(micro), micro_batches[micro], micro)
        else:
            grad[micro] = stage.backward(grad.get(micro), micro)
        for index, again in step.reduce:
            stages[index].reduce(again)  # reduce_scatter: full gradients -> shard
        if throttle is not None:
            throttle.step()
    for stage in stages.values():
        stage.finish_reduction()
    return torch.stack(_in_order(hidden)).sum()


def outputs(stages: Mapping[int, Stage], schedule: Sequence[Step], micro_batches: Sequence[Any]) -> list[Tensor]:
    """Run forward passes only, touching no gradients; return the last stage's output for each micro-batch."""
    hidden: dict[int, Tensor] = {}
    for step in schedule:
        for index in step.gather:
            stages[index].gather()
        for index in step.needs:
            stages[index].require_weights()
        micro = step.micro_batch
        hidden[micro] = stages[step.stage].evaluate(hidden.get(micro), micro_batches[micro])
    return _in_order(hidden)


def _in_order(last: Mapping[int, Tensor]) -> list[Tensor]:
    """Return the last stage's outputs (losses, or logits of a model without a loss) by micro-batch."""
    return [last[micro] for micro in range(len(last))]
