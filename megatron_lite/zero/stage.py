"""One stage: consecutive layers whose parameters are gathered, used, reduced and updated together.

A stage holds shards (this rank's 1/N of the weights, gradients and Adam moments, always) and borrows two buffers (the
full weights and the full gradients, while it computes). ZeRO 1, 2 and 3 differ only in how many buffers there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from megatron_lite.distributed import Distributed, Handle
from megatron_lite.parameter import Parameter
from megatron_lite.seeds import derive_seed
from megatron_lite.zero.layout import StageLayout, lay_out


class Buffer:
    """Flat memory for one stage's full weights or gradients at a time."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.zeros(numel, dtype=dtype, device=device)
        self.holder: int | None = None  # the stage whose values it holds, or is about to
        self._pending: Handle | None = None

    def start(self, collective: Handle) -> None:
        """Hand the memory to a collective; nobody may touch it before `wait`."""
        assert self._pending is None, f"buffer of stage {self.holder} already has a collective under way"
        self._pending = collective

    def wait(self) -> None:
        """Until the collective that reads or writes this memory, if any, has finished."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


class ShardUpdate:
    """A reduction under way, and what becomes of its result: the gradient shard is set, or added to."""

    def __init__(self, reduction: Handle, own_slice: Tensor, shard: Tensor, accumulate: bool) -> None:
        self._reduction, self._own_slice, self._shard, self._accumulate = reduction, own_slice, shard, accumulate

    def wait(self) -> None:
        self._reduction.wait()
        if self._accumulate:
            self._shard.add_(self._own_slice)
        elif self._shard.data_ptr() != self._own_slice.data_ptr():  # else the shard is a view of the buffer
            self._shard.copy_(self._own_slice)


class Stage:
    """Layers, shards and the verbs of a training step: gather, forward, backward, reduce."""

    def __init__(self, index: int, layers: Sequence[torch.nn.Module], distributed: Distributed) -> None:
        self.index, self.layers, self.distributed = index, layers, distributed
        self.layout: StageLayout = lay_out([p.spec for p in self._declared()], distributed.world_size)
        # An embedding's gradient is made of tokens alone: its weights need not be gathered for it.
        self.backward_needs_weights = any(getattr(layer, "backward_needs_weights", True) for layer in layers)
        self._tape: dict[int, tuple[Tensor | None, Tensor]] = {}  # micro-batch -> (input, output) of the forward pass

    def allocate(self, weights: Buffer, owns_weights: bool, gradients: Buffer, owns_gradients: bool) -> None:
        """Take memory: shards of its own (views of a buffer that nobody else uses), parameters as views of buffers."""
        rank, device, numel = self.distributed.rank, self.distributed.device, self.layout.shard_numel
        self.weights, self.gradients = weights, gradients
        self._own_weights = self._full(weights).view(self.distributed.world_size, numel)[rank]
        self._own_gradients = self._full(gradients).view(self.distributed.world_size, numel)[rank]
        # Where buffer and shard would hold the same bytes they are one memory.
        self.shares_weights = owns_weights and weights.data.dtype == torch.float32
        self.weight_shard = self._own_weights if self.shares_weights else _zeros(numel, torch.float32, device)
        self.grad_shard = self._own_gradients if owns_gradients else _zeros(numel, gradients.data.dtype, device)
        self.exp_avg, self.exp_avg_sq = _zeros(numel, torch.float32, device), _zeros(numel, torch.float32, device)
        self._materialize()

    def shards(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this stage: flat fp32 (shard_numel,)."""
        return {"weights": self.weight_shard, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def initialize(self, seed: int) -> None:
        """Fill the weight shard. Values depend on seed, parameter name and device type only, not on the layout.

        Each rank draws every parameter that its shard touches in full, one at a time, and keeps its slice.
        """
        generator = torch.Generator(device=self.distributed.device)
        low = self.distributed.rank * self.layout.shard_numel
        self.weight_shard.zero_()
        for slot, start, end in self.layout.pieces(self.distributed.rank):
            value = torch.empty(slot.spec.shape, dtype=torch.float32, device=self.distributed.device)
            slot.spec.initializer.fill(value, generator.manual_seed(derive_seed(seed, slot.spec.name)))
            self.weight_shard[slot.offset + start - low : slot.offset + end - low] = value.view(-1)[start:end]

    # -- the verbs ----------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Start completing the full weights from all ranks' shards; nothing to do if the buffer holds them still."""
        if self.weights.holder == self.index:
            return
        self.weights.wait()
        self.weights.holder = self.index
        if not self.shares_weights:
            self._own_weights.copy_(self.weight_shard)  # rounds to the training dtype
        if self.distributed.world_size > 1:
            self.weights.start(self.distributed.all_gather(self._full(self.weights)))

    def forward(self, hidden: Tensor | None, micro_batch: Any, slot: int) -> Tensor:
        """Run the layers on a detached input and remember both ends for `backward`."""
        if hidden is not None:
            hidden = hidden.detach().requires_grad_()
        output = self._run(hidden, micro_batch)
        self._tape[slot] = (hidden, output)
        return output.detach()

    def evaluate(self, hidden: Tensor | None, micro_batch: Any) -> Tensor:
        """Run the layers without remembering anything."""
        with torch.no_grad():
            return self._run(hidden, micro_batch)

    def backward(self, grad: Tensor | None, slot: int) -> Tensor | None:
        """From the gradient of the output to that of the input; parameter gradients add up in the gradient buffer."""
        if self.backward_needs_weights:
            self.require_weights()
        self.require_gradients()
        hidden, output = self._tape.pop(slot)
        torch.autograd.backward(output, grad)
        return None if hidden is None else hidden.grad

    def accumulate(self) -> None:
        """Make the gradient buffer this stage's, zeroed, once the reduction that still uses it has finished."""
        if self.gradients.holder == self.index:
            return
        self.gradients.wait()
        self._full(self.gradients).zero_()
        self.gradients.holder = self.index

    def reduce(self, again: bool) -> None:
        """Start summing the full gradients of all ranks into the shards; `again`: add to what is there already."""
        self.require_gradients()
        self.gradients.holder = None
        if self.distributed.world_size == 1 and self.grad_shard is self._own_gradients:
            return
        reduction = self.distributed.reduce_scatter(self._full(self.gradients))
        self.gradients.start(ShardUpdate(reduction, self._own_gradients, self.grad_shard, again))

    # -- guards: autograd cannot see a wrong buffer behind a parameter --------------------------------------------

    def require_weights(self) -> None:
        """Wait for this stage's weights, and insist that they are this stage's."""
        holder = self.weights.holder
        assert holder == self.index, f"stage {self.index} would compute with the weights of stage {holder}"
        self.weights.wait()

    def require_gradients(self) -> None:
        """Insist that the gradient buffer is this stage's."""
        holder = self.gradients.holder
        assert holder == self.index, f"stage {self.index} would add its gradients to those of stage {holder}"

    # -- parts ----------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """(global name, full parameter): meaningful while the weights are gathered."""
        for slot, parameter in zip(self.layout.slots, self._placed, strict=True):
            yield slot.spec.name, parameter

    def _run(self, hidden: Tensor | None, micro_batch: Any) -> Tensor:
        self.require_weights()
        for layer in self.layers:
            hidden = layer(hidden, micro_batch)
        assert hidden is not None
        return hidden

    def _full(self, buffer: Buffer) -> Tensor:
        return buffer.data[: self.layout.numel]

    def _declared(self) -> Iterator[Parameter]:
        for layer in self.layers:
            yield from cast(Iterator[Parameter], layer.parameters())

    def _materialize(self) -> None:
        """Replace each declared parameter by one whose memory is its slot of the two buffers."""
        slots = {slot.spec.name: slot for slot in self.layout.slots}
        placed: dict[str, Parameter] = {}
        for module in (module for layer in self.layers for module in layer.modules()):
            for attribute, declared in list(module.named_parameters(recurse=False)):
                slot = slots[cast(Parameter, declared).spec.name]
                bounds = slice(slot.offset, slot.end)
                parameter = Parameter(self.weights.data[bounds].view(slot.spec.shape))
                parameter.spec = slot.spec
                parameter.main_grad = self.gradients.data[bounds].view(slot.spec.shape)
                setattr(module, attribute, parameter)
                placed[slot.spec.name] = parameter
        self._placed = [placed[slot.spec.name] for slot in self.layout.slots]


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)
