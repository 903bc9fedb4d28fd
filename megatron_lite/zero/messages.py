"""Send hidden states and their gradients between pipeline ranks."""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

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


class Messages:
    """The messages of a rank. first_layer: knows the shape of hidden states. dtype: for
    training."""

    def __init__(self, group: PipelineGroup, first_layer: Any, dtype: torch.dtype) -> None:
        self._group, self._dtype = group, dtype
        self._first_layer: FirstLayer = first_layer
        self._coming: dict[Message, tuple[Handle, Tensor]] = {}
        self.sent: deque[tuple[Handle, Tensor]] = deque()  # in flight

    def receive(self, message: Message, micro_batch: Any) -> None:
        """Start receiving a result from another rank."""
        shape, dtype = self._first_layer.boundary(micro_batch)
        tensor = torch.empty(shape, dtype=dtype or self._dtype, device=self._group.device)
        self._coming[message] = self._group.receive(tensor, message.peer), tensor

    def take(self, message: Message) -> Tensor:
        """Wait for a result from another rank."""
        transfer, tensor = self._coming.pop(message)
        transfer.wait()
        return tensor

    def send(self, message: Message, tensor: Tensor) -> None:
        """Start sending a result to another rank."""
        if len(self.sent) == MOST_SENT:
            self.sent.popleft()[0].wait()
        tensor = tensor.contiguous()
        self.sent.append((self._group.send(tensor, message.peer), tensor))
