"""Our rows of the benchmark: the engine with its own layers, or with the peers' plain modules.

A plain module becomes a layer when its parameters are replaced by declared ones of the same names. A hook moves each
gradient from autograd into the stage's gradient buffer as soon as it exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_lite.config import Config
from megatron_lite.data.host_batch import HostBatch
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.choice import choose_kernels
from megatron_lite.kernels.linear import accumulate
from megatron_lite.kernels.products import use_library
from megatron_lite.model.gpt import model_layers
from megatron_lite.model.layer import Layer, MicroBatch
from megatron_lite.optimizer.optimizer import Optimizer
from megatron_lite.parameter import Parameter, declare
from megatron_lite.planner.auto import library_of_products
from megatron_lite.setup_run import Run
from megatron_lite.train import train_step
from megatron_lite.zero.multi_stage import MultiStage
from scripts.benchmarks.training.model import Embedding, Head, PlainGPT, parameter_specs


class Engine:
    """The engine, built from its own parts and driven by the `train_step` of the training loop."""

    def __init__(self, config: Config, distributed: Distributed, layers: Sequence[Layer] | None = None) -> None:
        kernels = choose_kernels(config, distributed.device)
        matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
        if distributed.device.type == "cpu" and matmul and matmul.fp32_precision != "bf16":  # not --fp32_matmul=onednn
            use_library(distributed.broadcast_object(library_of_products(config, {}))[0])  # as the launcher does
        layers = layers or model_layers(config, kernels, distributed.tensor)
        dtype = config.distributed.training_dtype
        moments = config.optimizer.moments
        self.model = MultiStage(
            layers,
            config.multi_stage,
            config.batch,
            dtype,
            distributed.data,
            moments=moments,
            tensor=distributed.tensor,
        )
        optimizer = Optimizer(config, self.model.stages, distributed, kernels)
        self.model.initialize(config.distributed.seed)
        assert config.batch.batch_size
        self._tokens = config.batch.batch_size * config.batch.sequence_length
        self._world_size, self._data_ranks = distributed.world_size, distributed.data.world_size
        parts = dict(config=config, distributed=distributed, model=self.model, optimizer=optimizer, debugger=None)
        self._run = cast(Run, SimpleNamespace(**parts, background=None, watch=None))
        assert config.multi_stage.zero_stage != "auto"
        self.zero_stage, self._iteration = config.multi_stage.zero_stage or 1, 0
        self.tied = config.model.tie_word_embeddings
        self.counted_bytes = 0  # sent by all ranks in the last step, as counted by the engine

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Train one step; return the mean loss over the tokens of all ranks, the same on every rank."""
        traffic = self._run.distributed.traffic
        traffic.take()
        self._iteration += 1
        batches = [HostBatch(part, len(part) * self._data_ranks) for part in micro_batches]
        loss = train_step(self._run, batches, self._iteration).loss / self._tokens
        sent = sum(kind.wire_bytes for name, kind in traffic.take().items() if name != "sum")
        self.counted_bytes = self._world_size * sent
        return loss

    def finish(self) -> None:
        """Wait for the gathers of the next step, which start during the update."""
        for stage in self.model.stages:
            stage.weights.wait()

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (global name, full weight), valid until the next item. Every rank must iterate to the end."""
        return self.model.full_weights()

    def memory_bytes(self) -> dict[str, int]:
        """Return state memory by kind, as printed at the start of a run."""
        return self.model.memory.bytes_by_kind()

    def wire_bytes(self) -> int:
        """Return the bytes that all ranks send in a step according to the schedule.

        Each collective moves (N - 1) / N of a stage's weights or gradients out of each of N ranks. The gradient norm
        and the loss, a few bytes, are not counted, and neither are hidden states between tensor-parallel ranks.
        """
        model, total = self.model, 0
        for step in model.training_schedule:
            gathered = sum(model.stages[index].numel for index in step.gather)
            reduced = sum(model.stages[index].grad_numel for index, _ in step.reduce)
            total += gathered * model.precision.training.itemsize + reduced * model.precision.gradients.itemsize
        return total * (self._data_ranks - 1)

    def stage_sizes(self) -> list[int]:
        """Return the number of parameters of each stage, without padding."""
        return [sum(slot.numel for part in stage.parts for slot in part.layout.slots) for stage in self.model.stages]


class PlainEngine(Engine):
    """The engine with the plain torch.nn model, so that only the engine differs from the peers."""

    def __init__(self, config: Config, distributed: Distributed, model: PlainGPT) -> None:
        super().__init__(config, distributed, plain_layers(config, model))
        for module in (module for stage in self.model.stages for layer in stage.layers for module in layer.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, plain_parameter(cast(Parameter, parameter)))

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Undo the scale in the loss of the plain head: one over the tokens of the global batch."""
        return super().step(micro_batches) * self._tokens


def plain_parameter(placed: Parameter) -> nn.Parameter:
    """Return an ordinary parameter that shares the memory of an engine parameter.

    Autograd keeps the weights of plain modules from forward to backward. ZeRO-3 gathers them again in between, and
    `.data` hides that write from autograd.
    """

    def move_gradient(parameter: Tensor) -> None:
        """Move a new gradient from autograd into the gradient buffer."""
        assert parameter.grad is not None
        accumulate(placed, parameter.grad)
        parameter.grad = None

    parameter = nn.Parameter(placed.data)
    parameter.register_post_accumulate_grad_hook(move_gradient)
    return parameter


def plain_layers(config: Config, model: PlainGPT) -> list[Layer]:
    """Wrap the modules of a plain model as layers of the engine."""
    specs = parameter_specs(config)
    for prefix, module in list(model.named_modules()):
        for name, _ in list(module.named_parameters(recurse=False)):
            setattr(module, name, declare(specs.pop(f"{prefix}.{name}")))
    assert not specs, f"the plain model lacks {sorted(specs)}"
    embedding = PlainEmbedding(model.embedding)
    return [embedding, *map(PlainBlock, model.blocks), PlainHead(model.head, embedding)]


class PlainEmbedding(Layer):
    """A plain embedding as the first layer."""

    backward_needs_weights = False

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        return self.embedding(micro_batch.tokens)


class PlainBlock(Layer):
    """A plain block as a layer."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        return self.block(hidden)


class PlainHead(Layer):
    """The plain head as the last layer; its loss is already scaled."""

    def __init__(self, head: Head, embedding: PlainEmbedding) -> None:
        super().__init__()
        self.head, self.lender = head, (embedding,)  # a tuple hides it from torch's list of submodules
        if head.output is None:
            self.borrows_from = self.lender

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        scale = micro_batch.gradient_scale
        assert hidden is not None and scale is not None
        tied = self.lender[0].embedding.word.weight if self.borrows_from else None
        return self.head(hidden, micro_batch.labels, tied, scale)
