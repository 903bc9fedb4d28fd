"""Our rows of the benchmark: the engine with its own layers or the peers' plain modules.

A plain module becomes a layer by replacing its parameters with declared ones of the same names. A
hook moves each new gradient from autograd into the stage's gradient buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from megatron_lite.config import Config
from megatron_lite.data.counts import Counts
from megatron_lite.data.host_batch import HostBatch
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.kernels.choice import Kernels, choose_kernels
from megatron_lite.kernels.linear import accumulate
from megatron_lite.kernels.matmul_library import library_for, use_library
from megatron_lite.model.gpt import model_layers
from megatron_lite.model.layer import Layer, MicroBatch
from megatron_lite.optimizer.optimizer import Optimizer
from megatron_lite.optimizer.partition import partitioned
from megatron_lite.outputs.run import Run
from megatron_lite.parameter import Parameter, declare
from megatron_lite.planner.plan import planned_durations
from megatron_lite.train import train_step
from megatron_lite.zero.multi_stage import MultiStage
from scripts.benchmarks.training.measure import Contestant
from scripts.benchmarks.training.model import PlainGPT, parameter_specs


def built(
    config: Config, distributed: Any, layers: Sequence[Layer] | None = None
) -> tuple[MultiStage, Optimizer, Kernels]:
    """Return the engine of a configuration with initial weights. layers: replace the model's
    own."""
    kernels = choose_kernels(config, distributed.device)
    layers = layers or model_layers(config, kernels, distributed.tensor)
    durations = planned_durations(config, distributed.world_size, distributed.device.type)
    model = partitioned(config, layers, distributed, durations=durations)
    optimizer = Optimizer(config, model.all_stages, distributed, kernels)
    model.initialize(config.distributed.seed)
    return model, optimizer, kernels


class Engine(Contestant):
    """The engine, driven by the training loop's `train_step`."""

    def __init__(
        self, config: Config, distributed: Distributed, layers: Sequence[Layer] | None = None
    ) -> None:
        matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
        # not --fp32_matmul=onednn
        if distributed.device.type == "cpu" and matmul and matmul.fp32_precision != "bf16":
            use_library(library_for(config.performance.cpu_matmul))  # as the launcher does
        self.model, optimizer, kernels = built(config, distributed, layers)
        self._distributed, self._attention = distributed, kernels.attention
        batch = config.batch
        assert batch.batch_size
        self._tokens = batch.batch_size * batch.sequence_length
        parts = dict(
            config=config,
            distributed=distributed,
            model=self.model,
            optimizer=optimizer,
            debugger=None,
        )
        data = SimpleNamespace(counts=Counts(config))
        self._run = cast(Run, SimpleNamespace(**parts, data=data, background=None, watch=None))
        self._iteration = 0
        self._counted_bytes = 0  # sent by all ranks in the last step, as counted by the engine

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Train one step; return the mean loss over the tokens of all ranks, equal on every
        rank."""
        traffic = self._run.distributed.traffic
        traffic.take()
        self._iteration += 1
        batches = [
            HostBatch(part, len(part) * self._distributed.data.world_size) for part in micro_batches
        ]
        loss = train_step(self._run, batches, self._iteration).loss / self._tokens
        sent = sum(kind.wire_bytes for name, kind in traffic.take().items() if name != "sum")
        self._counted_bytes = self._distributed.world_size * sent
        return loss

    def finish(self) -> None:
        """Wait for the gathers of the next step, which start during the update."""
        for stage in self.model.stages:
            stage.weights.wait()

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (global name, full weight), valid until the next item. Every rank must iterate to
        the end."""
        return self.model.full_weights()

    def books(self) -> dict[str, Any]:
        """Return state memory by kind, as printed at startup, the attention backend and the last
        step's traffic."""
        kinds = {row.kind: row.bytes for row in self.model.memory.table()}
        return {
            "state_bytes_by_kind": kinds,
            "attention": self._attention,
            "wire_counted_bytes": self._counted_bytes,
        }


class PlainEngine(Engine):
    """The engine with the plain torch.nn model, so that only the engine differs from the peers."""

    def __init__(self, config: Config, distributed: Distributed, model: PlainGPT) -> None:
        super().__init__(config, distributed, plain_layers(config, model))
        for module in (
            module
            for stage in self.model.stages
            for layer in stage.layers
            for module in layer.modules()
        ):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, plain_parameter(cast(Parameter, parameter)))

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Undo the scale in the loss of the plain head: one over the tokens of the global batch."""
        return super().step(micro_batches) * self._tokens


def plain_parameter(placed: Parameter) -> nn.Parameter:
    """Return an ordinary parameter that shares an engine parameter's memory.

    Autograd saves the weights of plain modules from forward to backward. ZeRO-3 gathers them again
    in between, and `.data` hides that write from autograd.
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
    embedding = PlainLayer(model.embedding, lambda module, hidden, batch: module(batch.tokens))
    embedding.backward_needs_weights = False
    tied = model.head.output is None
    head = PlainLayer(  # its loss is already scaled
        model.head,
        lambda module, hidden, batch: module(
            hidden,
            batch.labels,
            model.embedding.word.weight if tied else None,
            batch.gradient_scale,
        ),
    )
    if tied:
        head.borrows_from = (embedding,)
    blocks = (
        PlainLayer(block, lambda module, hidden, batch: module(hidden)) for block in model.blocks
    )
    return [embedding, *blocks, head]


class PlainLayer(Layer):
    """A plain module as a layer. call: (module, hidden, micro-batch) -> output."""

    def __init__(
        self, module: nn.Module, call: Callable[[Any, Tensor | None, MicroBatch], Tensor]
    ) -> None:
        super().__init__()
        self.module, self._call = module, call

    def forward(self, hidden: Tensor | None, micro_batch: MicroBatch) -> Tensor:
        return self._call(self.module, hidden, micro_batch)
