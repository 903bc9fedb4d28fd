"""Stand-ins for the model and the process group: real layouts, plain tensors, ranks that are threads."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint.manifest import KINDS
from megatron_lite.parameter import Initializer, ParameterSpec
from megatron_lite.zero.layout import FlatLayout, lay_out

# name, shape, weight decay; sizes that fit no alignment
PARAMETERS = (
    ("embedding.word.weight", (37, 16), True),
    ("blocks.0.attention_norm.weight", (16,), False),
    ("blocks.0.attention_norm.bias", (16,), False),
    ("blocks.0.mlp.up.weight", (65, 16), True),
    ("blocks.0.mlp.up.bias", (65,), False),
    ("blocks.1.mlp.up.weight", (65, 16), True),
    ("head.norm.weight", (1,), False),
    ("head.output.weight", (37, 16), True),
)


class World:
    """A process group whose ranks are threads of this process; values travel as JSON."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.values: list[Any] = [None] * world_size

    def run(self, function: Callable[[FakeDistributed], Any]) -> list[Any]:
        """Call the function once per rank, at the same time; the results (or exceptions) in rank order."""
        results: list[Any] = [None] * self.world_size

        def rank_main(rank: int) -> None:
            try:
                results[rank] = function(FakeDistributed(self, rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class FakeDistributed:
    """The parts of `Distributed` that checkpoints use."""

    device = torch.device("cpu")

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.world_size = world, rank, world.world_size

    def gather_objects(self, value: Any) -> list[Any]:
        self.world.values[self.rank] = json.dumps(value)
        self.world.barrier.wait()
        values = [json.loads(item) for item in self.world.values]
        self.world.barrier.wait()
        return values

    def broadcast_object(self, value: Any) -> Any:
        return self.gather_objects(value)[0]


@dataclasses.dataclass
class FakeStage:
    index: int
    layout: FlatLayout
    tensors: dict[str, Tensor]

    def kinds(self) -> dict[str, torch.dtype]:
        return {kind: tensor.dtype for kind, tensor in self.tensors.items()}

    def read(self, kind: str) -> Tensor:
        return self.tensors[kind]


@dataclasses.dataclass
class FakeModel:
    stages: list[FakeStage]

    def parts(self) -> Iterator[tuple[int, FakeStage]]:
        for stage in self.stages:
            yield stage.index, stage


def make_specs(parameters: Sequence[tuple[str, tuple[int, ...], bool]] = PARAMETERS) -> list[ParameterSpec]:
    return [ParameterSpec(name, shape, Initializer("constant", 0.0), decay) for name, shape, decay in parameters]


def empty_model(specs: Sequence[ParameterSpec], num_per_stage: int, rank: int, world_size: int) -> FakeModel:
    """`num_per_stage` parameters in each stage; all shards are zero."""
    stages = []
    for index, start in enumerate(range(0, len(specs), num_per_stage)):
        layout = lay_out(specs[start : start + num_per_stage], world_size)
        stages.append(FakeStage(index, layout, {kind: torch.zeros(layout.shard_numel) for kind in KINDS}))
    return FakeModel(stages)


def random_values(specs: Sequence[ParameterSpec], seed: int) -> dict[str, dict[str, Tensor]]:
    """{kind: {parameter: values}}."""
    generator = torch.Generator().manual_seed(seed)
    return {kind: {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs} for kind in KINDS}


def put(model: FakeModel, values: dict[str, dict[str, Tensor]], rank: int) -> FakeModel:
    """Write a rank's pieces of the values, through full flat ranges (not through the code under test)."""
    for stage in model.stages:
        for kind in KINDS:
            flat = torch.zeros(stage.layout.numel)
            for slot in stage.layout.slots:
                flat[slot.offset : slot.offset + slot.numel] = values[kind][slot.spec.name].flatten()
            start = rank * stage.layout.shard_numel
            stage.tensors[kind].copy_(flat[start : start + stage.layout.shard_numel])
    return model


def take(models: Sequence[FakeModel]) -> tuple[dict[str, dict[str, Tensor]], bool]:
    """The values of all ranks' shards together, and whether everything between the parameters is zero."""
    values: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
    clean = True
    for position, stage in enumerate(models[0].stages):
        for kind in KINDS:
            flat = torch.cat([model.stages[position].tensors[kind] for model in models])
            for slot in stage.layout.slots:
                own = flat[slot.offset : slot.offset + slot.numel]
                values[kind][slot.spec.name] = own.clone().view(slot.spec.shape)
                own.zero_()
            clean &= not bool(flat.any())
    return values, clean


def same(left: dict[str, dict[str, Tensor]], right: dict[str, dict[str, Tensor]]) -> bool:
    """Bit for bit."""

    def bits(values: dict[str, Tensor]) -> dict[str, list[int]]:
        return {name: value.view(torch.int32).flatten().tolist() for name, value in values.items()}

    return all(bits(left[kind]) == bits(right[kind]) for kind in KINDS)
