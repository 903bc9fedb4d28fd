"""Execution of a schedule: the training step of the ZeRO paper, one line per event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_lite.zero.messages import Messages
from megatron_lite.zero.schedule import Step
from megatron_lite.zero.stage import Stage
from megatron_lite.zero.throttle import Throttle


def forward_backward(
    stages: Mapping[int, Stage],
    schedule: Sequence[Step],
    micro_batches: Sequence[Any],
    messages: Messages,
    throttle: Throttle | None,
) -> list[Tensor]:
    """Run one iteration's micro-batches; return the loss of each, (), on the pipeline rank of the last stage.

    stages: by number in the model. Afterwards every `grad_shard` holds this rank's slice of the gradient, summed over
    micro-batches and ranks.
    """
    hidden: dict[int, Any] = {}  # (b, s, h) between stages; after the last one the loss, ()
    grad: dict[int, Any] = {}  # d loss / d hidden, (b, s, h)
    for step in schedule:
        stage, micro = stages[step.stage], step.micro_batch
        for message in step.receive:
            messages.receive(message, micro_batches[message.micro_batch])
        for index in step.gather:
            stages[index].gather()  # all_gather: shards -> full weights, for now or as a prefetch
        for index in step.needs:
            stages[index].require_weights()
        for index in step.accumulate:
            stages[index].accumulate()
        results = hidden if step.kind == "forward" else grad
        if step.take:
            results[micro] = messages.take(step.take)
        if step.kind == "forward":
            hidden[micro] = stage.forward(hidden.get(micro), micro_batches[micro], micro)
        elif step.kind == "backward":
            grad[micro] = stage.backward(grad.get(micro), micro)
        elif step.kind == "input":
            grad[micro] = stage.backward_input(grad.get(micro), micro)
        else:
            stage.backward_weights(micro)
        if step.send:
            messages.send(step.send, results.pop(micro))
        for index, again in step.reduce:
            stages[index].reduce(again)  # reduce_scatter: full gradients -> shard
        if throttle is not None:
            throttle.step()
    for stage in stages.values():
        stage.finish_reduction()
    while messages.sent:
        messages.sent.popleft()[0].wait()
    return _in_order(hidden)


def outputs(
    stages: Mapping[int, Stage], schedule: Sequence[Step], micro_batches: Sequence[Any], messages: Messages
) -> list[Tensor]:
    """Run forward passes only, touching no gradients; return the last stage's output for each micro-batch."""
    hidden: dict[int, Tensor] = {}
    for step in schedule:
        for message in step.receive:
            messages.receive(message, micro_batches[message.micro_batch])
        for index in step.gather:
            stages[index].gather()
        for index in step.needs:
            stages[index].require_weights()
        micro = step.micro_batch
        if step.take:
            hidden[micro] = messages.take(step.take)
        hidden[micro] = stages[step.stage].evaluate(hidden.get(micro), micro_batches[micro])
        if step.send:
            messages.send(step.send, hidden.pop(micro))
    while messages.sent:
        messages.sent.popleft()[0].wait()
    return _in_order(hidden)


def _in_order(last: Mapping[int, Tensor]) -> list[Tensor]:
    """Return the last stage's outputs (losses, or logits of a model without a loss) by micro-batch."""
    return [last[micro] for micro in sorted(last)]
