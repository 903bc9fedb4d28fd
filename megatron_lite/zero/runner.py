"""Execution of a schedule: the training step of the ZeRO paper, one line per event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megatron_lite.zero.messages import Messages
from megatron_lite.zero.schedule import Step
from megatron_lite.zero.stage import Stage
from megatron_lite.zero.throttle import Throttle


def execute(
    stages: Mapping[int, Stage],
    schedule: Sequence[Step],
    micro_batches: Sequence[Any],
    messages: Messages,
    throttle: Throttle | None = None,
    trains: bool = True,
) -> list[Tensor]:
    """Run one iteration's micro-batches; return the last stage's outputs, on its pipeline rank.

    The outputs are losses, (), or logits if the model has no loss. stages: by number in the model.
    trains: afterwards every `grad_shard` contains this rank's slice of the gradient, summed over
    micro-batches and ranks; otherwise the schedule has forward passes only and touches no gradient.
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
            results[micro] = messages.take(step.take, micro_batches[micro])
        if not trains:
            hidden[micro] = stage.evaluate(hidden.get(micro), micro_batches[micro])
        elif step.kind == "forward":
            hidden[micro] = stage.forward(hidden.get(micro), micro_batches[micro], micro)
        elif step.kind == "backward":
            grad[micro] = stage.backward(grad.get(micro), micro)
        elif step.kind == "input":
            grad[micro] = stage.backward_input(grad.get(micro), micro)
        else:
            stage.backward_weights(micro)
        if step.send:
            messages.send(step.send, results.pop(micro), micro_batches[micro].carried)
        for index, again in step.reduce:
            stages[index].reduce(again)  # reduce_scatter: full gradients -> shard
        if throttle is not None:
            throttle.step()
    for stage in stages.values() if trains else ():
        stage.finish_reduction()
    while messages.sent:
        messages.sent.popleft()[0].wait()
    return [hidden[micro] for micro in sorted(hidden)]
