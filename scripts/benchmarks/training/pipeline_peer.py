"""The pipeline peer: the plain model under the schedules of `torch.distributed.pipelining`.

As in PyTorch's tutorial and torchtitan: a rank's chunks are `PipelineStage`s, the last chunk
returns logits, the loss function takes them, and gradient norms are summed over the ranks before
clipping.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.nn import functional

from megatron_lite.config import Config
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.zero.pipeline import place
from scripts.benchmarks.training.model import PlainGPT, initialize
from scripts.benchmarks.training.peers import Peer

SCHEDULES: dict[str, Any] = {
    "one_f_one_b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "breadth_first": ScheduleLoopedBFS,
    "zero_bubble_v": ScheduleZBVZeroBubble,
}


class Chunk(nn.Module):
    """Consecutive blocks, with the embedding before the first and the norm and products of the head
    after the last."""

    def __init__(self, model: PlainGPT, blocks: range) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(model.blocks[block] for block in blocks)
        self.embedding = model.embedding if blocks.start == 0 else None
        self.head = model.head if blocks.stop == len(model.blocks) else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Tokens (b, s) or hidden (b, s, h) -> hidden or logits (b, s, v)."""
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        if self.head is None:
            return hidden
        assert self.head.output is not None
        return self.head.output(self.head.norm(hidden))


class PipelinePeer(Peer):
    """This rank's chunks, trained by a schedule of torch's."""

    def __init__(
        self,
        config: Config,
        distributed: Distributed,
        pipeline_schedule: str,
        pipeline_placement: str,
    ) -> None:
        model, pipeline = PlainGPT(config, "full", distributed.device), distributed.pipeline
        initialize(model, config, distributed.device)
        placed = place(
            pipeline.world_size, config.model.num_layers + 2, pipeline_schedule, pipeline_placement
        )
        ends = [min(max(chunk.stop - 1, 0), config.model.num_layers) for chunk in placed.chunks]
        borders, own = [0, *ends], placed.chunks_of(pipeline.rank)
        chunks = [Chunk(model, range(borders[index], borders[index + 1])) for index in own]
        super().__init__(config, distributed, nn.ModuleList(chunks))
        self._group = pipeline.group
        self._is_first = 0 in own
        self._is_last = len(ends) - 1 in own

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            summed = functional.cross_entropy(
                logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"
            )
            return summed * model.scale

        stages = [
            PipelineStage(chunk, index, len(ends), distributed.device, group=pipeline.group)
            for chunk, index in zip(chunks, own, strict=True)
        ]
        batches = config.batch.sequential_micro_batches
        made = SCHEDULES[pipeline_schedule](
            stages if len(own) > 1 else stages[0], batches, loss_fn=loss, scale_grads=False
        )
        self._schedule: Any = made

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Train one step; return the mean loss on every rank, ()."""
        self.optimizer.zero_grad(set_to_none=True)
        parts, losses = torch.cat([*micro_batches]).to(self._device), list[Tensor]()
        tokens, labels = parts[:, :-1].contiguous(), parts[:, 1:].contiguous()
        targets = {"target": labels, "losses": losses} if self._is_last else {}
        self._schedule.step(*((tokens,) if self._is_first else ()), **targets, return_outputs=False)
        self.clip(self._config.optimizer.clip_grad)
        self.optimizer.step()
        loss = (
            torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self._device)
        )
        dist.all_reduce(loss, group=self._group)
        return loss

    def clip(self, max_norm: float) -> None:
        """Clip the norm of the gradients of all ranks."""
        parameters = [*self._module.parameters()]
        total = torch.nn.utils.get_total_norm(
            [it.grad for it in parameters if it.grad is not None]
        ).square()
        dist.all_reduce(total, group=self._group)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total.sqrt())
