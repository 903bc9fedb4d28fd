"""A stage's trainable or frozen parameters as one flat range, and this rank's shard of it.

A stage's weight buffer contains the trainable ranges, then the frozen ones; its gradient buffer
only the trainable ones. With expert parallelism, ranges of experts are apart: fewer ranks share
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_lite.distributed.rank_group import Group
from megatron_lite.kernels.weight_shard import WeightShard
from megatron_lite.parameter import ParameterSpec
from megatron_lite.seeds import derive_seed
from megatron_lite.zero.layout import lay_out
from megatron_lite.zero.replicas import Replicas


class Moment(NamedTuple):
    """One tensor of optimizer state, with an element per trained weight."""

    name: str
    of_matrices: bool = True  # False: hidden matrices (`ParameterSpec.matrix_rows`) have none


@dataclass(frozen=True)
class OptimizerState:
    """The state that an optimizer's rule declares, and whether it updates hidden matrices as a
    whole."""

    moments: tuple[Moment, ...]
    whole_matrices: bool = False


ADAM_STATE = OptimizerState((Moment("exp_avg"), Moment("exp_avg_sq")))


@dataclass(frozen=True)
class Precision:
    """Dtypes of a stage's buffers and shards."""

    training: torch.dtype  # weight buffers and activations
    gradients: torch.dtype
    frozen_weights: torch.dtype  # shards of frozen parameters
    split_master: bool = False  # store trainable fp32 weights as bf16 weights and remainders
    rounds_half_up: bool = False  # round trainable fp32 weights as split ones are


class BufferRange(NamedTuple):
    """A shard's slice of a buffer, (numel,). is_owned: no other stage uses the buffer."""

    full: Tensor
    is_owned: bool


class FlatShard:
    """This rank's weights, gradients and optimizer state of one flat range."""

    group: Group  # the ranks among which full weights are gathered
    replicate: Group  # ranks that repeat this rank's work
    has_state: bool  # whether the shard has gradients and moments
    weights: WeightShard
    placed: Tensor  # the full range that layers compute with, (numel,): a view of the weight or the average buffer
    average: Tensor | None = (
        None  # running average of the weights, (shard_numel,) fp32; None: no averaging
    )
    # no memory: the shard belongs to another pipeline rank
    dtype = torch.float32
    keeps_average = False
    is_saved = True  # in checkpoints; False: the weights of a frozen model, which are elsewhere
    has_memory = False
    is_whole = False  # state: whether the full range is up to date, as all ranks update all of it
    shows_average = False  # whether `placed` contains the averages instead of the weights
    grad_shard: Tensor
    sums: Tensor  # target of the group's reductions: `grad_shard`, or a range around it
    moments: dict[str, Tensor]  # optimizer state by name, (numel(name),) fp32

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        frozen: bool,
        training: bool,
        groups: Any,
        state: OptimizerState,
    ) -> None:
        self.has_experts = specs[0].split.expert_ranks > 1
        self.replicate = groups.replicate
        self.group = groups.expert_shard if self.has_experts else groups.shard
        of_experts = "expert " * self.has_experts
        self.gather_kind, self.reduce_kind = f"{of_experts}gather", f"{of_experts}reduce"
        # the ranks that together have the whole parameters
        self.split_over: Group = groups.expert_parts if self.has_experts else groups.tensor
        # among the data-parallel ranks that own shards of this range
        self.rank: int = groups.data.rank // specs[0].split.expert_ranks
        self.layout = lay_out(specs, self.group.world_size, self.replicate.world_size)
        # None: no tensor parallelism, so these parameters have no copies.
        self.replicas = (
            Replicas(self.layout, self.rank, groups.tensor)
            if groups.tensor.world_size > 1
            else None
        )
        self.frozen, self.has_state = frozen, training and not frozen
        self._moments = {moment.name: moment for moment in state.moments if self.has_state}
        self.whole_matrices = state.whole_matrices
        self.is_state = specs[0].is_state

    @property
    def buffer_numel(self) -> int:
        """Elements of the full range in a weight buffer."""
        return 0 if self.is_state else self.layout.numel

    def full_range(self, in_buffer: Tensor) -> Tensor:
        """Return the full range, (numel,): that in a weight buffer, or the state's own in fp32."""
        if not self.is_state:
            return in_buffer
        if not self.has_memory:
            self.placed = self._zeros(torch.float32, self.layout.numel)
        return self.placed

    def allocate(
        self, weights: BufferRange, gradients: BufferRange | None, precision: Precision
    ) -> None:
        """Allocate the shard's memory: views of the buffers where no other stage uses them."""
        self.full_weights = self.placed = weights.full
        self._own_weights = self._own(weights.full)
        self.has_memory = True
        self.shares_weights = (
            weights.is_owned or self.is_state
        ) and weights.full.dtype == self.dtype
        if precision.split_master and self.has_state:
            assert weights.is_owned, "split master weights need a weight buffer per stage"
            self.weights = WeightShard.split_into(self._own_weights)
        elif self.shares_weights:
            self.weights = WeightShard(self._own_weights)
        else:
            self.weights = WeightShard(
                self._zeros(self.dtype), self._own_weights if weights.is_owned else None
            )
            self.weights.rounds_half_up = precision.rounds_half_up and not self.frozen
        self.moments = {
            name: self._zeros(torch.float32, self.numel(name)) for name in self._moments
        }
        self.average = self._zeros(torch.float32) if self.keeps_average else None
        if self.has_state:
            assert gradients is not None
            self.full_gradients, self.shares_gradients = gradients
            self.own_gradients = self._own(gradients.full)
            shares = gradients.is_owned
            self.sums = self.grad_shard = (
                self.own_gradients if shares else self._zeros(precision.gradients)
            )

    def initialize(self, seed: int) -> None:
        """Draw the initial weights, by seed, parameter name and device type, whatever the layout.

        Each rank draws every parameter of its shard in full, one at a time, and stores its slice.
        """
        generator = torch.Generator(device=self.group.device)
        shard = self.read("weights").zero_()
        for spec, tiles in itertools.groupby(self.layout.tiles(self.rank), key=itemgetter(0)):
            value = torch.empty(spec.shape, dtype=torch.float32, device=self.group.device)
            spec.initializer.fill(value, generator.manual_seed(derive_seed(seed, spec.name)))
            for _, tile in tiles:
                shard[tile.offset : tile.end].view(tile.rows, tile.width).copy_(
                    tile.view(value.view(-1))
                )
        self.write("weights", shard)

    def place_weights(self) -> None:
        """Round the shard to the training dtype into this rank's slice of `placed`, unless the
        slice is up to date."""
        if self.shows_average:
            self._own(self.placed).copy_(
                self.weights.read() if self.average is None else self.average
            )
        else:
            self.weights.round_into(self._own_weights)

    # -- contents of a checkpoint
    # ----------------------------------------------------------------------------------

    def kinds(self) -> dict[str, torch.dtype]:
        """Return the tensors to save by name, with their dtypes; each is (numel(name),)."""
        names = [*self._moments, *["average"] * self.keeps_average]
        return {"weights": self.dtype, **dict.fromkeys(names, torch.float32)}

    def numel(self, kind: str) -> int:
        """Return the elements saved per rank."""
        if kind in self._moments and not self._moments[kind].of_matrices:
            return min(self.layout.first_matrix, self.layout.shard_numel)
        return self.layout.shard_numel

    def has(self, kind: str, spec: ParameterSpec) -> bool:
        """Return whether tensors of this kind contain elements of a parameter."""
        return not spec.matrix_rows or kind not in self._moments or self._moments[kind].of_matrices

    def counted(self, start: int = 0, end: int | None = None) -> list[tuple[int, int]]:
        """Return the (start, end) ranges within `start` to `end` that this rank contributes to
        global sums."""
        end = self.layout.shard_numel if end is None else end
        counted = [(start, end)] if self.replicas is None else self.replicas.counted
        cut = [(max(low, start), min(high, end)) for low, high in counted]
        return [(low, high) for low, high in cut if low < high]

    def parameter_at(self, index: int) -> str:
        """Return the name of the parameter at element `index` of this rank's shard, or before it in
        padding."""
        place = self.layout.start(self.rank) + index
        return [slot.spec.name for slot in self.layout.slots if slot.offset <= place][-1]

    def read(self, kind: str) -> Tensor:
        """Return the weights, the average or a moment: the shard itself or, for split weights, an
        fp32 copy."""
        if kind == "average":
            assert self.average is not None
            return self.average
        return self.weights.read() if kind == "weights" else self.moments[kind]

    def write(self, kind: str, values: Tensor) -> None:
        """Store a tensor that `read` returned and the caller changed."""
        if kind == "weights":
            self.weights.write(values)

    def _own(self, full: Tensor) -> Tensor:
        return full.view(self.group.world_size, -1)[self.group.rank]

    def _zeros(self, dtype: torch.dtype, numel: int | None = None) -> Tensor:
        numel = self.layout.shard_numel if numel is None else numel
        return torch.zeros(numel, dtype=dtype, device=self.group.device)
