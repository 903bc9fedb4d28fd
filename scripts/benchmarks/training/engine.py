"""Our rows of the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from torch import Tensor

from megatron_lite.config import Config
from megatron_lite.data.counts import Counts
from megatron_lite.data.host_batch import HostBatch
from megatron_lite.data.loader import DataSource
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.startup import make_deterministic
from megatron_lite.kernels.choice import Kernels, choose_kernels
from megatron_lite.kernels.matmul_library import library_for, use_library
from megatron_lite.model.gpt import model_layers
from megatron_lite.optimizer.optimizer import Optimizer
from megatron_lite.optimizer.partition import partitioned
from megatron_lite.outputs.run import Run
from megatron_lite.planner.plan import planned_durations
from megatron_lite.train import train_step
from megatron_lite.zero.multi_stage import MultiStage
from scripts.benchmarks.training.measure import Contestant


def built(config: Config, distributed: Any) -> tuple[MultiStage, Optimizer, Kernels]:
    """Return the engine of a configuration with initial weights."""
    kernels = choose_kernels(config, distributed.device)
    layers = model_layers(config, kernels, distributed)
    durations = planned_durations(config, distributed.world_size, distributed.device.type)
    model = partitioned(config, layers, distributed, durations=durations)
    optimizer = Optimizer(config, model.all_stages, distributed, kernels)
    model.initialize(config.distributed.seed)
    return model, optimizer, kernels


class Engine(Contestant):
    """The engine, driven by the training loop's `train_step`."""

    def __init__(self, config: Config, distributed: Distributed) -> None:
        if config.distributed.deterministic:
            make_deterministic()
        if distributed.device.type == "cpu":
            use_library(library_for(config.performance.cpu_matmul))  # as the launcher does
        self.model, optimizer, kernels = built(config, distributed)
        self._distributed, self._attention = distributed, kernels.attention
        batch = config.batch
        assert batch.batch_size
        self._tokens = batch.batch_size * batch.sequence_length
        unused: Any = None
        self._run = Run(config, distributed, unused, unused, config)
        self._run.model = self.model
        self._run.optimizer = optimizer
        self._run.debugger = None
        self._run.data = cast(DataSource, SimpleNamespace(counts=Counts(config)))
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

    def books(self) -> dict[str, Any]:
        """Return state memory, as printed at startup, the attention backend and the last step's
        traffic."""
        kinds = {row.kind: row.bytes for row in self.model.memory.table()}
        return {
            "state_bytes": sum(kinds.values()) - kinds.get("communication scratch", 0),
            "attention": self._attention,
            "wire_counted_bytes": self._counted_bytes,
        }
