"""Stand-ins for the model and the process group: real layouts, plain tensors, ranks that are
threads."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_lite.checkpoint.manifest import KINDS, MOMENTS
from megatron_lite.config.dimensions import RankGrid
from megatron_lite.kernels.weight_shard import WeightShard
from megatron_lite.parameter import Initializer, ParameterSpec
from megatron_lite.tiles import Block, Split
from megatron_lite.zero.layout import FlatLayout, lay_out
from tests.support.thread_ranks import Meetings, ThreadRank, on_threads

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
    """Ranks that are threads of this process, and may fail."""

    def __init__(self, world_size: int, tensor_ranks: int = 1) -> None:
        self.sizes = (world_size // tensor_ranks, tensor_ranks)

    def run(self, function: Callable[[ThreadRank], Any]) -> list[Any]:
        """Call the function once per rank; return results (or exceptions) in rank order."""

        def result_or_error(rank: ThreadRank) -> Any:
            try:
                return function(rank)
            except Exception as error:
                return error

        return on_threads(*self.sizes, result_or_error)


def one_rank() -> Any:
    """The only rank of a run, in the thread of the test."""
    return ThreadRank(0, Meetings(RankGrid(1, None)))


@dataclass
class FakePart:
    """The parts of `FlatShard` that checkpoints use. `copies`: `read` copies weights, as for split
    master weights."""

    layout: FlatLayout
    frozen: bool
    has_state: bool
    tensors: dict[str, Tensor]
    copies: bool = False
    is_state: bool = False
    has_experts: bool = False
    rank: int = 0

    @property
    def weights(self) -> WeightShard:
        if not self.copies:
            return WeightShard(self.tensors["weights"])
        shard = WeightShard.split_into(
            torch.zeros_like(self.tensors["weights"], dtype=torch.bfloat16)
        )
        shard.write(self.tensors["weights"])
        return shard

    def kinds(self) -> dict[str, torch.dtype]:
        return {kind: tensor.dtype for kind, tensor in self.tensors.items()}

    def numel(self, kind: str) -> int:
        return self.tensors[kind].numel()

    def has(self, kind: str, spec: ParameterSpec) -> bool:
        return True

    def read(self, kind: str) -> Tensor:
        return (
            self.tensors[kind].clone() if self.copies and kind == "weights" else self.tensors[kind]
        )

    def write(self, kind: str, values: Tensor) -> None:
        if values.data_ptr() != self.tensors[kind].data_ptr():
            assert self.copies and values.dtype == self.tensors[kind].dtype
            self.tensors[kind].copy_(values)


@dataclass
class FakeModel:
    stages: list[list[FakePart]]
    training: bool = True

    def parts(self) -> Iterator[tuple[int, FakePart]]:
        for index, stage in enumerate(self.stages):
            for part in stage:
                yield index, part

    all_parts = parts

    def saved_parts(self, of_all: bool = False) -> Iterator[tuple[int, FakePart]]:
        return self.parts()

    def specs(self) -> Iterator[ParameterSpec]:
        return (slot.spec for _, part in self.parts() for slot in part.layout.slots)

    @property
    def pipeline(self) -> Any:
        return SimpleNamespace(rank_of=[0] * len(self.stages))


@dataclass(frozen=True)
class Layout:
    """The layout of a model: ranks, of which some are tensor-parallel, parameters per stage, names
    and dtype of frozen parameters, moments per parameter, and whether weights are averaged."""

    world_size: int = 1
    num_per_stage: int = 3
    frozen: tuple[str, ...] = ()
    frozen_dtype: torch.dtype = torch.float32
    copies: bool = False
    training: bool = True
    moments: tuple[str, ...] = MOMENTS
    averaged: bool = False
    tensor_ranks: int = 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of values of a trainable parameter."""
        kept = (self.moments if self.training else ()) + ("average",) * self.averaged
        return ("weights", *kept)


def make_specs(
    parameters: Sequence[tuple[str, tuple[int, ...], bool]] = PARAMETERS,
) -> list[ParameterSpec]:
    return [
        ParameterSpec(name, shape, Initializer("constant", 0.0), decay)
        for name, shape, decay in parameters
    ]


def on_tensor_rank(spec: ParameterSpec, ranks: int, rank: int) -> ParameterSpec:
    """Split one of PARAMETERS: a padded vocabulary, columns, blocks of rows of which several ranks
    have the same."""
    rows, blocks = -(-spec.shape[0] // ranks), ()
    if spec.name == "embedding.word.weight":
        blocks = (Block(spec.shape[0], ranks, rows),)
    elif spec.name == "blocks.0.mlp.up.weight":
        blocks = (Block.of(spec.shape[1], ranks),)
    elif spec.name == "blocks.1.mlp.up.weight":
        blocks = (Block.of(48, ranks), Block.of(12, min(ranks, 2)), Block.of(5, 1))
    first = replace(spec, split=Split(ranks, 0, int(spec.name == "blocks.0.mlp.up.weight"), blocks))
    if spec.name == "embedding.word.weight":
        first = replace(first, padding_rows=rows - first.local_shape[0])
    return first.on(rank)


def empty_model(specs: Sequence[ParameterSpec], layout: Layout, rank: int) -> FakeModel:
    """Return a rank's model with shards of zeros. Each stage has trainable parameters, then frozen
    ones."""
    stages = []
    if layout.tensor_ranks > 1:
        specs = [
            on_tensor_rank(spec, layout.tensor_ranks, rank % layout.tensor_ranks) for spec in specs
        ]
    for start in range(0, len(specs), layout.num_per_stage):
        some = specs[start : start + layout.num_per_stage]
        groups = [
            [spec for spec in some if (spec.name in layout.frozen) == frozen]
            for frozen in (False, True)
        ]
        stages.append(
            [
                _part(group, frozen, layout, rank // layout.tensor_ranks)
                for group, frozen in zip(groups, (False, True), strict=True)
                if group
            ]
        )
    return FakeModel(stages)


def _part(specs: Sequence[ParameterSpec], frozen: bool, layout: Layout, rank: int) -> FakePart:
    flat = lay_out(specs, layout.world_size // layout.tensor_ranks)
    has_state = layout.training and not frozen
    dtypes = {"weights": layout.frozen_dtype if frozen else torch.float32}
    dtypes |= {} if frozen else dict.fromkeys(layout.kinds[1:], torch.float32)
    tensors = {kind: torch.zeros(flat.shard_numel, dtype=dtype) for kind, dtype in dtypes.items()}
    copies = layout.copies and has_state
    return FakePart(flat, frozen, has_state, tensors, copies=copies, rank=rank)


def random_values(
    specs: Sequence[ParameterSpec], seed: int, kinds: Sequence[str] = Layout().kinds
) -> Values:
    """Return random values; they do not depend on the kinds that follow."""
    generator = torch.Generator().manual_seed(seed)
    return {
        kind: {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs}
        for kind in kinds
    }


def held(values: Values, layout: Layout) -> Values:
    """Return the part of fp32 values that a model of this layout holds: only weights, in their
    dtype, if frozen."""
    return {
        kind: {
            name: value.to(layout.frozen_dtype) if name in layout.frozen else value
            for name, value in values[kind].items()
            if kind == "weights" or (kind in layout.kinds and name not in layout.frozen)
        }
        for kind in values
    }


def tensor_ranks_of(layout: FlatLayout) -> int:
    """Size of the tensor-parallel group, whose ranks have the same offsets."""
    return max((slot.spec.split.ranks for slot in layout.slots), default=1)


def put(model: FakeModel, values: Values, rank: int) -> FakeModel:
    """Write a rank's pieces of the values, through full flat ranges (not through the code under
    test)."""
    for _, part in model.parts():
        for kind, tensor in part.tensors.items():
            flat = torch.zeros(part.layout.numel, dtype=tensor.dtype)
            for slot in part.layout.slots:
                flat[slot.offset : slot.end] = slot.spec.local(
                    values[kind][slot.spec.name]
                ).flatten()
            start = rank // tensor_ranks_of(part.layout) * part.layout.shard_numel
            tensor.copy_(flat[start : start + part.layout.shard_numel])
    return model


def take(models: Sequence[FakeModel]) -> tuple[Values, bool]:
    """Return the values of all ranks' shards, and whether all between the parameters is zero and
    all copies equal."""
    values: Values = {kind: {} for kind in KINDS}
    ranks, clean = tensor_ranks_of(next(models[0].parts())[1].layout), True
    found = [item for rank in range(ranks) for item in _of_tensor_rank(models[rank::ranks])]
    for kind, spec, local, rest in found:
        spec.place(local, values[kind].setdefault(spec.name, local.new_empty(spec.shape)))
        clean &= not bool(rest.any())
    for kind, spec, local, _ in found:
        clean &= _bits(spec.local(values[kind][spec.name])) == _bits(local)
    return values, clean


def _of_tensor_rank(
    models: Sequence[FakeModel],
) -> Iterator[tuple[str, ParameterSpec, Tensor, Tensor]]:
    """Yield, from the shards of all data-parallel ranks: kind, spec, its local values, all that is
    no parameter."""
    for parts in zip(*(model.parts() for model in models), strict=True):
        slots = parts[0][1].layout.slots
        for kind in parts[0][1].tensors:
            flat = torch.cat([part.tensors[kind] for _, part in parts])
            for slot in slots:
                local = flat[slot.offset : slot.end].clone()
                flat[slot.offset : slot.end] = 0
                yield (
                    kind,
                    slot.spec,
                    local.view(slot.spec.local_shape),
                    flat if slot is slots[-1] else flat[:0],
                )


def _bits(value: Tensor) -> list[int]:
    return value.contiguous().view(torch.uint8).flatten().tolist()


def same(left: Values, right: Values) -> bool:
    """Return whether two sets of values are bit-identical, including dtypes and missing entries."""

    def bits(values: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, list[int]]]:
        return {name: (value.dtype, _bits(value)) for name, value in values.items()}

    return all(bits(left.get(kind, {})) == bits(right.get(kind, {})) for kind in KINDS)


def run_state(updates: int = 0) -> dict[str, Any]:
    """Return the smallest state of a run that a checkpoint may hold."""
    scale = {"dynamic": False, "scale": 1.0, "good": 0, "patience": 0}
    return {
        "optimizer": {"updates": updates, "loss_scale": scale},
        "window": {"loss": (0.0).hex(), "tokens": 0},
    }
