"""Send hidden states and their gradients between pipeline ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_lite.distributed.cpu_collectives import Works
from megatron_lite.distributed.pipeline_group import PipelineGroup
from megatron_lite.distributed.traffic import Handle
from megatron_lite.zero.simulation import Message

MOST_SENT = 2  # messages in flight; the next one frees the memory of the oldest


class FirstLayer(Protocol):
    """The part of the first layer that messages need."""

    def boundary(self, micro_batch: Any, /) -> tuple[tuple[int, ...], torch.dtype | None]:
        """Return shape and dtype (None: the training dtype) of a micro-batch's hidden states
        between layers."""
        ...


class Carrier(Protocol):
    """The part of a micro-batch that messages need."""

    @property
    def carried(self) -> Sequence[Tensor]:
        """Small tensors that its passes write, and that follow it from rank to rank and back."""
        ...


class Messages:
    """The messages of a rank. first_layer: knows the shape of hidden states. dtype: for
    training."""

    def __init__(self, group: PipelineGroup, first_layer: Any, dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        self._first_layer: FirstLayer = first_layer
        self._coming: dict[Message, tuple[Handle, list[Tensor]]] = {}
        self.sent: deque[tuple[Handle, list[Tensor]]] = deque()  # in flight

    def receive(self, message: Message, micro_batch: Carrier) -> None:
        """Start receiving a result from another rank."""
        shape, dtype = self._first_layer.boundary(micro_batch)
        tensor = torch.empty(shape, dtype=dtype or self._dtype, device=self._group.device)
        tensors = [tensor, *map(torch.empty_like, micro_batch.carried)]
        arriving = Works([self._group.receive(each, message.peer) for each in tensors])
        self._coming[message] = arriving, tensors

    def take(self, message: Message, micro_batch: Carrier) -> Tensor:
        """Wait for a result from another rank."""
        arriving, (tensor, *carried) = self._coming.pop(message)
        arriving.wait()
        for own, arrived in zip(micro_batch.carried, carried, strict=True):
            own.copy_(arrived)
        return tensor

    def send(self, message: Message, tensor: Tensor, carried: Sequence[Tensor] = ()) -> None:
        """Start sending a result to another rank."""
        if len(self.sent) == MOST_SENT:
            self.sent.popleft()[0].wait()
        tensors = [tensor.contiguous(), *(each.clone() for each in carried)]
        sending = Works([self._group.send(each, message.peer) for each in tensors])
        self.sent.append((sending, tensors))
