"""Stand-ins for the model and the process group: real layouts, plain tensors, ranks that are threads."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint.manifest import KINDS, MOMENTS
from megatron_lite.distributed.rank_group import alone
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
Values = dict[str, dict[str, Tensor]]  # {kind: {parameter: values}}


class World:
    """A process group whose ranks are threads of this process; values travel as JSON."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=20)
        self.values: list[Any] = [None] * world_size

    def run(self, function: Callable[[FakeDistributed], Any]) -> list[Any]:
        """Call the function once per rank, concurrently; return results (or exceptions) in rank order."""
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
    local_world_size = 1
    sharing_cores = 1

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.world_size = world, rank, world.world_size
        self.data, self.tensor = self, alone(self.device)

    def gather_objects(self, value: Any) -> list[Any]:
        self.world.values[self.rank] = json.dumps(value)
        self.world.barrier.wait()
        values = [json.loads(item) for item in self.world.values]
        self.world.barrier.wait()
        return values

    def broadcast_object(self, value: Any) -> Any:
        return self.gather_objects(value)[0]

    def agree_max(self, value: int) -> int:
        return max(self.gather_objects(value))

    def sum_in_rank_order(self, value: Tensor) -> Tensor:
        return torch.stack([torch.tensor(other) for other in self.gather_objects(value.tolist())]).sum(0).to(value)

    def wait_for_device(self) -> None:
        """Return at once, as on CPU."""


@dataclasses.dataclass
class FakePart:
    """The parts of `FlatShard` that checkpoints use. `copies`: `read` copies weights, as for split master weights."""

    layout: FlatLayout
    frozen: bool
    has_state: bool
    tensors: dict[str, Tensor]
    copies: bool = False

    def kinds(self) -> dict[str, torch.dtype]:
        return {kind: tensor.dtype for kind, tensor in self.tensors.items()}

    def numel(self, kind: str) -> int:
        return self.tensors[kind].numel()

    def has(self, kind: str, spec: ParameterSpec) -> bool:
        return True

    def read(self, kind: str) -> Tensor:
        return self.tensors[kind].clone() if self.copies and kind == "weights" else self.tensors[kind]

    def write(self, kind: str, values: Tensor) -> None:
        if values.data_ptr() != self.tensors[kind].data_ptr():
            assert self.copies and values.dtype == self.tensors[kind].dtype
            self.tensors[kind].copy_(values)


@dataclasses.dataclass
class FakeModel:
    stages: list[list[FakePart]]
    training: bool = True

    def parts(self) -> Iterator[tuple[int, FakePart]]:
        for index, stage in enumerate(self.stages):
            for part in stage:
                yield index, part


@dataclasses.dataclass(frozen=True)
class Layout:
    """The layout of a model: ranks, parameters per stage, names and dtype of frozen parameters, moments per parameter,
    and whether weights are averaged."""

    world_size: int = 1
    num_per_stage: int = 3
    frozen: tuple[str, ...] = ()
    frozen_dtype: torch.dtype = torch.float32
    copies: bool = False
    training: bool = True
    moments: tuple[str, ...] = MOMENTS
    averaged: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of values of a trainable parameter."""
        kept = (self.moments if self.training else ()) + ("average",) * self.averaged
        return ("weights", *kept)


def make_specs(parameters: Sequence[tuple[str, tuple[int, ...], bool]] = PARAMETERS) -> list[ParameterSpec]:
    return [ParameterSpec(name, shape, Initializer("constant", 0.0), decay) for name, shape, decay in parameters]


def empty_model(specs: Sequence[ParameterSpec], layout: Layout, rank: int) -> FakeModel:
    """Return a rank's model with shards of zeros. Each stage has trainable parameters, then frozen ones."""
    stages = []
    for start in range(0, len(specs), layout.num_per_stage):
        some = specs[start : start + layout.num_per_stage]
        groups = [[spec for spec in some if (spec.name in layout.frozen) == frozen] for frozen in (False, True)]
        stages.append(
            [_part(group, frozen, layout) for group, frozen in zip(groups, (False, True), strict=True) if group]
        )
    return FakeModel(stages)


def _part(specs: Sequence[ParameterSpec], frozen: bool, layout: Layout) -> FakePart:
    flat, has_state = lay_out(specs, layout.world_size), layout.training and not frozen
    dtypes = {"weights": layout.frozen_dtype if frozen else torch.float32}
    dtypes |= {} if frozen else dict.fromkeys(layout.kinds[1:], torch.float32)
    tensors = {kind: torch.zeros(flat.shard_numel, dtype=dtype) for kind, dtype in dtypes.items()}
    return FakePart(flat, frozen, has_state, tensors, copies=layout.copies and has_state)


def random_values(specs: Sequence[ParameterSpec], seed: int, kinds: Sequence[str] = Layout().kinds) -> Values:
    """Return random values; they do not depend on the kinds that follow."""
    generator = torch.Generator().manual_seed(seed)
    return {kind: {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs} for kind in kinds}


def held(values: Values, layout: Layout) -> Values:
    """Return the part of fp32 values that a model of this layout holds: only weights, in their dtype, if frozen."""
    return {
        kind: {
            name: value.to(layout.frozen_dtype) if name in layout.frozen else value
            for name, value in values[kind].items()
            if kind == "weights" or (kind in layout.kinds and name not in layout.frozen)
        }
        for kind in values
    }


def put(model: FakeModel, values: Values, rank: int) -> FakeModel:
    """Write a rank's pieces of the values, through full flat ranges (not through the code under test)."""
    for _, part in model.parts():
        for kind, tensor in part.tensors.items():
            flat = torch.zeros(part.layout.numel, dtype=tensor.dtype)
            for slot in part.layout.slots:
                flat[slot.offset : slot.offset + slot.numel] = values[kind][slot.spec.name].flatten()
            start = rank * part.layout.shard_numel
            tensor.copy_(flat[start : start + part.layout.shard_numel])
    return model


def take(models: Sequence[FakeModel]) -> tuple[Values, bool]:
    """Return the values of all ranks' shards, and whether everything between the parameters is zero."""
    values: Values = {kind: {} for kind in KINDS}
    clean = True
    for parts in zip(*(model.parts() for model in models), strict=True):
        for kind in parts[0][1].tensors:
            flat = torch.cat([part.tensors[kind] for _, part in parts])
            for slot in parts[0][1].layout.slots:
                own = flat[slot.offset : slot.offset + slot.numel]
                values[kind][slot.spec.name] = own.clone().view(slot.spec.shape)
                own.zero_()
            clean &= not bool(flat.any())
    return values, clean


def same(left: Values, right: Values) -> bool:
    """Return whether two sets of values are bit-identical, including dtypes and missing entries."""

    def bits(values: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, list[int]]]:
        return {name: (value.dtype, value.view(torch.uint8).flatten().tolist()) for name, value in values.items()}

    return all(bits(left.get(kind, {})) == bits(right.get(kind, {})) for kind in KINDS)


def run_state(updates: int = 0) -> dict[str, Any]:
    """Return the smallest state of a run that a checkpoint may hold."""
    scale = {"dynamic": False, "scale": 1.0, "good": 0, "patience": 0}
    return {"optimizer": {"updates": updates, "loss_scale": scale}, "window": {"loss": (0.0).hex(), "tokens": 0}}
