"""One stage: consecutive layers whose parameters are gathered, used, reduced and updated together.

A stage holds shards (this rank's 1/N of the weights, gradients and Adam moments, always) and borrows two buffers (the
full weights and the full gradients, while it computes). ZeRO 1, 2 and 3 differ only in how many buffers there are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from megatron_lite.distributed.process_group import Group, Handle, Works
from megatron_lite.parameter import Parameter
from megatron_lite.zero.flat_shard import ADAM_MOMENTS, Part, Precision
from megatron_lite.zero.layout import ParameterSlot
from megatron_lite.zero.observer import Observer
from megatron_lite.zero.recompute import recomputed


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

    observer: Observer | None = None
    # Where the optimizer gathers matrices that it needs whole; None: it does not.
    update_buffer: Buffer | None = None
    # Set where an earlier stage, or this one, has something to train; see `MultiStage`.
    runs_backward = True
    wants_input_gradient = True

    def __init__(
        self,
        index: int,
        layers: Sequence[torch.nn.Module],
        group: Group,
        training: bool = True,
        moments: Sequence[str] = ADAM_MOMENTS,
        whole_matrices: bool = False,
    ) -> None:
        self.index, self.layers, self.group = index, layers, group
        specs = [parameter.spec for parameter in self._declared()]
        trained, frozen = [s for s in specs if s.trainable], [s for s in specs if not s.trainable]
        kinds = [(some, is_frozen) for some, is_frozen in ((trained, False), (frozen, True)) if some]
        self.parts = tuple(Part(some, is_frozen, training, group, moments, whole_matrices) for some, is_frozen in kinds)
        self.trainable = next((part for part in self.parts if part.has_state), None)
        # An embedding's gradient is made of tokens alone: its weights need not be gathered for it.
        self.backward_needs_weights = any(getattr(layer, "backward_needs_weights", True) for layer in layers)
        self._tape: dict[int, tuple[Tensor | None, Tensor]] = {}  # micro-batch -> (input, output) of the forward pass

    @property
    def numel(self) -> int:
        """Elements of its full weights, padding included."""
        return sum(part.layout.numel for part in self.parts)

    @property
    def grad_numel(self) -> int:
        """Elements of its full gradients, padding included."""
        return self.trainable.layout.numel if self.trainable else 0

    @property
    def update_numel(self) -> int:
        """Elements of what its optimizer gathers: its full gradients, if it needs whole matrices and there are any."""
        part = self.trainable
        return self.grad_numel if part and part.whole_matrices and part.layout.has_matrices else 0

    def allocate(
        self, weights: Buffer, owns_weights: bool, gradients: Buffer | None, owns_gradients: bool, precision: Precision
    ) -> None:
        """Take memory: shards of its own (views of a buffer that nobody else uses), parameters as views of buffers."""
        self.weights, self.gradients = weights, gradients
        ranges = weights.data[: self.numel].split([part.layout.numel for part in self.parts])
        for part, full_weights in zip(self.parts, ranges, strict=True):
            full_gradients = gradients.data[: part.layout.numel] if gradients and part.has_state else None
            part.allocate(full_weights, owns_weights, full_gradients, owns_gradients, precision)
        self._placed = self._materialize()
        trainable = self.trainable
        self._gradient_gaps = [trainable.full_gradients[a:b] for a, b in trainable.layout.gaps] if trainable else []
        self._trained = [parameter for _, parameter in self._placed if parameter.requires_grad]

    def allocate_average(self, buffer: Buffer) -> None:
        """Take memory for averages of the weights; `buffer` is where they are gathered."""
        self._buffers = self.weights, buffer
        ranges = buffer.data[: self.numel].split([part.layout.numel for part in self.parts])
        for part, full_average in zip(self.parts, ranges, strict=True):
            part.allocate_average(full_average)

    def show_average(self, shown: bool) -> None:
        """Whether the averages stand for the weights: `gather` completes them in their own buffer, and parameters are
        views of that. What the weight buffer holds, or is about to, stays.
        """
        self.weights = self._buffers[shown]
        for part in self.parts:
            part.shows_average = shown
        for (_, parameter), (part, slot) in zip(self._placed, self._places(), strict=True):
            parameter.data = part.placed[slot.offset : slot.end].view(slot.spec.shape)

    def initialize(self, seed: int) -> None:
        """Fill the weight shards with their initial values."""
        for part in self.parts:
            part.initialize(seed)

    # -- the verbs ----------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Start completing the full weights from all ranks' shards; nothing to do if the buffer holds them still."""
        if self.weights.holder == self.index:
            return
        self.weights.wait()
        self.weights.holder = self.index
        for part in self.parts:
            part.place_weights()
        if self.group.world_size > 1:
            self.weights.start(Works([self.group.all_gather(part.placed) for part in self.parts]))

    def forward(self, hidden: Tensor | None, micro_batch: Any, slot: int) -> Tensor:
        """Run the layers on a detached input and remember both ends for `backward`, if there will be one."""
        if not self.runs_backward:
            with torch.no_grad():
                return self._run(hidden, micro_batch, slot)
        if hidden is not None:
            hidden = hidden.detach().requires_grad_(self.wants_input_gradient)
        output = self._run(hidden, micro_batch, slot)
        self._tape[slot] = (hidden, output)
        return output.detach()

    def evaluate(self, hidden: Tensor | None, micro_batch: Any) -> Tensor:
        """Run the layers without remembering anything."""
        with torch.no_grad():
            return self._run(hidden, micro_batch, None)

    def backward(self, grad: Tensor | None, slot: int) -> Tensor | None:
        """From the gradient of the output to that of the input; parameter gradients add up in the gradient buffer."""
        if self.backward_needs_weights:
            self.require_weights()
        if self.gradients is not None:
            self.require_gradients()
        hidden, output = self._tape.pop(slot)
        torch.autograd.backward(output, grad)
        if self.observer is not None and (hidden is None or not hidden.requires_grad):
            self.observer.layer_gradient(str(self.layers[0].name), None, slot)
        return None if hidden is None else hidden.grad

    def accumulate(self) -> None:
        """Make the gradient buffer this stage's, once the reduction that still uses it has finished.

        It holds garbage then: the first contribution to each parameter overwrites it, only the padding is zeroed.
        """
        assert self.gradients is not None
        if self.gradients.holder == self.index:
            return
        self.gradients.wait()
        self.gradients.holder = self.index
        for parameter in self._trained:
            parameter.gradient_is_empty = True
        if self._gradient_gaps:
            torch._foreach_zero_(self._gradient_gaps)

    def reduce(self, again: bool) -> None:
        """Start summing the full gradients of all ranks into the shards; `again`: add to what is there already."""
        self.require_gradients()
        assert self.gradients is not None and self.trainable is not None
        for parameter in self._trained:
            if parameter.begin_gradient():  # nobody has used it
                parameter.main_grad.zero_()
        self.gradients.holder = None
        part = self.trainable
        if self.group.world_size == 1 and part.shares_gradients:
            assert not again, f"stage {self.index} has the only copy of its gradients, and reduces it twice"
            return
        reduction = self.group.reduce_scatter(part.full_gradients)
        self.gradients.start(ShardUpdate(reduction, part.own_gradients, part.grad_shard, again))

    def begin_update(self) -> None:
        """Wait until nobody sends this rank's shard, which may be a slice of the stage's own buffer.

        A shared buffer, which may be filled with the next step's weights of another stage, does not matter.
        """
        if self.weights.holder in (None, self.index):
            self.weights.wait()

    # -- the same for an optimizer that needs matrices whole --------------------------------------------------------

    @property
    def full_update(self) -> Tensor:
        """Of its trainable range, (grad_numel,) in bf16: what the optimizer gathers, and what it makes of that."""
        assert self.update_buffer is not None, f"stage {self.index} has no matrices"
        return self.update_buffer.data[: self.grad_numel]

    def gather_update(self) -> None:
        """Start completing `full_update`, of which this rank has written its shard's slice."""
        if self.group.world_size > 1:
            cast(Buffer, self.update_buffer).start(self.group.all_gather(self.full_update, "muon gather"))

    def reduce_update(self) -> None:
        """Start summing `full_update` over ranks into their shards' slices; each element is zero on all but one."""
        if self.group.world_size > 1:
            cast(Buffer, self.update_buffer).start(self.group.reduce_scatter(self.full_update, "muon reduce"))

    # -- guards: autograd cannot see a wrong buffer behind a parameter --------------------------------------------

    def require_weights(self) -> None:
        """Wait for this stage's weights, and insist that they are this stage's."""
        holder = self.weights.holder
        assert holder == self.index, f"stage {self.index} would compute with the weights of stage {holder}"
        self.weights.wait()

    def require_gradients(self) -> None:
        """Insist that the gradient buffer is this stage's."""
        assert self.gradients is not None, f"stage {self.index} has no gradients"
        holder = self.gradients.holder
        assert holder == self.index, f"stage {self.index} would add its gradients to those of stage {holder}"

    # -- parts ----------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """(global name, full parameter): meaningful while the weights are gathered."""
        yield from self._placed

    def _run(self, hidden: Tensor | None, micro_batch: Any, slot: int | None) -> Tensor:
        """`slot`: the micro-batch's index in a training step, where an observer may look on."""
        self.require_weights()
        for layer in self.layers:
            if self.observer is not None and slot is not None and hidden is not None and hidden.requires_grad:
                hidden.register_hook(functools.partial(_observe_gradient, self.observer, str(layer.name), slot))
            if getattr(layer, "recomputed", False):
                hidden = recomputed(layer, cast(Tensor, hidden), micro_batch)
            else:
                hidden = cast(Tensor, layer(hidden, micro_batch))
            if self.observer is not None and slot is not None:
                self.observer.layer_output(str(layer.name), hidden.detach(), slot)
        assert hidden is not None
        return hidden

    def _declared(self) -> Iterator[Parameter]:
        for layer in self.layers:
            yield from cast(Iterator[Parameter], layer.parameters())

    def _places(self) -> Iterator[tuple[Part, ParameterSlot]]:
        """Where each parameter lies, in the order of `parameters`."""
        for part in self.parts:
            for slot in part.layout.slots:
                yield part, slot

    def _materialize(self) -> list[tuple[str, Parameter]]:
        """Replace each declared parameter by one whose memory is its slot of the two buffers."""
        places = {slot.spec.name: (part, slot) for part, slot in self._places()}
        placed: dict[str, Parameter] = {}
        for module in (module for layer in self.layers for module in layer.modules()):
            for attribute, declared in list(module.named_parameters(recurse=False)):
                part, slot = places[cast(Parameter, declared).spec.name]
                bounds = slice(slot.offset, slot.end)
                parameter = Parameter(part.full_weights[bounds].view(slot.spec.shape), requires_grad=part.has_state)
                parameter.spec = slot.spec
                if part.has_state:
                    parameter.main_grad = part.full_gradients[bounds].view(slot.spec.shape)
                setattr(module, attribute, parameter)
                placed[slot.spec.name] = parameter
        return [(name, placed[name]) for name in places]


def _observe_gradient(observer: Observer, name: str, slot: int, gradient: Tensor) -> None:
    observer.layer_gradient(name, gradient, slot)
