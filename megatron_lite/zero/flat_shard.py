"""The trainable or the frozen parameters of one stage: a flat range, and this rank's shard of it.

A stage's weight buffer holds its trainable range and behind it the frozen one; its gradient buffer the former alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.distributed.process_group import Group
from megatron_lite.kernels.split_weights import WeightShard
from megatron_lite.parameter import ParameterSpec
from megatron_lite.seeds import derive_seed
from megatron_lite.zero.layout import lay_out

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Precision:
    """Dtypes of what a stage holds."""

    training: torch.dtype  # weight buffers and activations
    gradients: torch.dtype
    frozen_weights: torch.dtype  # of the shards of frozen parameters
    split_master: bool = False  # keep the trainable fp32 weights as bf16 weights and remainders


class Part:
    """See the module. `has_state`: whether there are a gradient shard and moments."""

    weights: WeightShard
    average: Tensor | None = None  # of the weights over the updates, (shard_numel,) fp32; None: nobody keeps it
    shows_average = False  # `placed` is where the average is gathered, not the weights
    grad_shard: Tensor
    moments: dict[str, Tensor]  # (numel,) in fp32, by name: what the optimizer remembers of each element

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        frozen: bool,
        training: bool,
        group: Group,
        moments: Sequence[str],
        whole_matrices: bool = False,
    ) -> None:
        self.layout = lay_out(specs, group.world_size)
        self.frozen, self.has_state = frozen, training and not frozen
        self._moments, self.whole_matrices = tuple(moments) if self.has_state else (), whole_matrices
        self._group = group

    def allocate(
        self,
        full_weights: Tensor,
        owns_weights: bool,
        full_gradients: Tensor | None,
        owns_gradients: bool,
        precision: Precision,
    ) -> None:
        """Take memory. Where a shard would hold the same bytes as its slice of a buffer that nobody else uses, it is
        that slice: nothing is kept twice.

        full_weights, full_gradients: this range's place in the buffers, (numel,).
        """
        self.full_weights = full_weights
        self._own_weights = self._own(full_weights)
        dtype = precision.frozen_weights if self.frozen else torch.float32
        self.shares_weights = owns_weights and full_weights.dtype == dtype
        if precision.split_master and self.has_state:
            assert owns_weights, "split master weights need a weight buffer for each stage"
            self.weights = WeightShard.split_into(self._own_weights)
        elif self.shares_weights:
            self.weights = WeightShard(self._own_weights)
        else:
            self.weights = WeightShard(self._zeros(dtype), self._own_weights if owns_weights else None)
        self.moments = {name: self._zeros(torch.float32, self.numel(name)) for name in self._moments}
        if self.has_state:
            assert full_gradients is not None
            self.full_gradients = full_gradients
            self.own_gradients = self._own(full_gradients)
            self.shares_gradients = owns_gradients
            self.grad_shard = self.own_gradients if owns_gradients else self._zeros(precision.gradients)

    def initialize(self, seed: int) -> None:
        """Fill the weight shard. Values depend on seed, parameter name and device type only, not on the layout.

        Each rank draws every parameter that its shard touches in full, one at a time, and keeps its slice.
        """
        generator = torch.Generator(device=self._group.device)
        low = self._group.rank * self.layout.shard_numel
        shard = self.read("weights").zero_()
        for slot, start, end in self.layout.pieces(self._group.rank):
            value = torch.empty(slot.spec.shape, dtype=torch.float32, device=self._group.device)
            slot.spec.initializer.fill(value, generator.manual_seed(derive_seed(seed, slot.spec.name)))
            shard[slot.offset + start - low : slot.offset + end - low] = value.view(-1)[start:end]
        self.write("weights", shard)

    def allocate_average(self, full_average: Tensor) -> None:
        """Take memory for an average of the trainable weights.

        full_average: a place to gather it in, and the frozen weights beside it, (numel,); the weight buffer cannot be
        that place, it may be the masters' own memory.
        """
        self._full_average = full_average
        if not self.frozen:
            self.average = self._zeros(torch.float32)

    @property
    def placed(self) -> Tensor:
        """Where the full weights are gathered, or what stands for them at the moment: (numel,)."""
        return self._full_average if self.shows_average else self.full_weights

    def place_weights(self) -> None:
        """Round the shard to the training dtype, into this rank's slice of `placed`, unless that is done."""
        if self.shows_average:
            self._own(self.placed).copy_(self.weights.read() if self.average is None else self.average)
        else:
            self.weights.round_into(self._own_weights)

    # -- what a checkpoint holds -----------------------------------------------------------------------------------

    def kinds(self) -> dict[str, torch.dtype]:
        """The tensors to save, (numel,) each, and their dtypes."""
        averages = () if self.average is None else ("average",)
        return {"weights": self.weights.dtype, **dict.fromkeys((*self._moments, *averages), torch.float32)}

    def numel(self, kind: str) -> int:
        """Elements of one of them on each rank: those of the shard, but of second moments that matrices do not have."""
        if kind == "exp_avg_sq" and self.whole_matrices:
            return min(self.layout.first_matrix, self.layout.shard_numel)
        return self.layout.shard_numel

    def has(self, kind: str, spec: ParameterSpec) -> bool:
        """Whether a parameter of this part has elements in it."""
        return not (kind == "exp_avg_sq" and self.whole_matrices and spec.matrix_rows)

    def read(self, kind: str) -> Tensor:
        """One of them: the live shard or, of split weights, an fp32 copy made on the spot."""
        if kind == "average":
            assert self.average is not None
            return self.average
        return self.weights.read() if kind == "weights" else self.moments[kind]

    def write(self, kind: str, values: Tensor) -> None:
        """Store what `read` has returned and somebody has changed; free where that was the live shard."""
        if kind == "weights":
            self.weights.write(values)

    def _own(self, full: Tensor) -> Tensor:
        return full.view(self._group.world_size, -1)[self._group.rank]

    def _zeros(self, dtype: torch.dtype, numel: int | None = None) -> Tensor:
        shape = self.layout.shard_numel if numel is None else numel
        return torch.zeros(shape, dtype=dtype, device=self._group.device)
