"""A stage: consecutive layers whose parameters are gathered, used, reduced and updated together.

A stage always owns its shards (this rank's 1/N of weights, gradients and optimizer state). While it
computes, it borrows a buffer for its full weights and one for its full gradients. ZeRO 1, 2 and 3
differ only in the number of buffers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from megatron_lite.distributed.cpu_collectives import Works
from megatron_lite.distributed.rank_group import Group
from megatron_lite.distributed.traffic import Handle
from megatron_lite.parameter import Parameter, ParameterSpec, backward
from megatron_lite.zero.flat_shard import BufferRange, FlatShard, OptimizerState, Precision
from megatron_lite.zero.layer import Layer
from megatron_lite.zero.layout import ParameterSlot
from megatron_lite.zero.recompute import recompute


class Observer:
    """Base class for tensor debugging; does nothing. Overrides must not change tensors."""

    def layer_output(self, name: str, output: Tensor, micro_batch: int) -> None:
        """Observe a layer's output: (b, s, h), or () for the last layer."""

    def layer_gradient(self, name: str, gradient: Tensor | None, micro_batch: int) -> None:
        """Observe the gradient of a layer's input: (b, s, h), or None."""


class Buffer:
    """Flat memory for one stage's full weights or gradients at a time."""

    def __init__(self, data: Tensor, is_owned: bool) -> None:
        self.data, self.is_owned = data, is_owned  # by a single stage
        self.holder: int | None = None  # the stage whose values are stored, or being gathered, here
        self.casts: dict[str, Any] = {}  # see `Parameter.casts`
        self._pending: Handle | None = None

    def start(self, collective: Handle) -> None:
        """Hand the memory to a collective; it must not be touched before `wait`."""
        assert self._pending is None, (
            f"buffer of stage {self.holder} already has a pending collective"
        )
        self._pending = collective

    def wait(self) -> None:
        """Wait for the pending collective, if any."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


class ShardUpdate:
    """A pending reduction whose result overwrites the gradient shard or is added to it."""

    def __init__(
        self, reduction: Handle, own_slice: Tensor, shard: Tensor, accumulate: bool
    ) -> None:
        self._reduction = reduction
        self._own_slice = own_slice
        self._shard = shard
        self._accumulate = accumulate

    def wait(self) -> None:
        self._reduction.wait()
        if self._accumulate:
            self._shard.add_(self._own_slice)
        elif self._shard.data_ptr() != self._own_slice.data_ptr():
            # otherwise the shard is a view of the buffer
            self._shard.copy_(self._own_slice)


class Stage:
    """Layers, shards and the verbs of a training step: gather, forward, backward, reduce."""

    shard_type = FlatShard
    observer: Observer | None = None
    update_buffer: Buffer | None = None  # for an optimizer of whole matrices
    # `MultiStage` clears these if no parameter of this stage or (for the input) an earlier one is
    # trained.
    runs_backward = True
    wants_input_gradient = True

    def __init__(
        self,
        index: int,
        layers: Sequence[Layer],
        groups: Any,
        training: bool,
        state: OptimizerState,
    ) -> None:
        """index: the stage's number in the model, not always its index in a list. Otherwise see
        `MultiStage`."""
        self.index, self.layers = index, layers
        self.world: Group = groups.layers
        specs = [
            cast(Parameter, declared).spec for layer in layers for declared in layer.parameters()
        ]
        kinds = itertools.groupby(sorted(specs, key=_kind), key=_kind)
        self.parts = tuple(
            self.shard_type([*some], is_frozen, training, groups, state)
            for (is_frozen, *_), some in kinds
        )
        self.trainable = tuple(part for part in self.parts if part.has_state)
        # An embedding's gradient needs only the tokens, so its backward pass gathers no weights.
        self.backward_needs_weights = any(layer.backward_needs_weights for layer in layers)
        self._tape: dict[
            int, tuple[Tensor | None, Tensor]
        ] = {}  # micro-batch -> (input, output) of the forward pass
        self._later: dict[
            int, list[Callable[[], None]]
        ] = {}  # micro-batch -> products of `backward_weights`

    @property
    def numel(self) -> int:
        """Elements of the full weights in the buffer, padding included."""
        return sum(part.buffer_numel for part in self.parts)

    @property
    def grad_numel(self) -> int:
        """Elements of the full gradients, padding included."""
        return sum(part.layout.numel for part in self.trainable)

    @property
    def update_numel(self) -> int:
        """Elements that the optimizer gathers: all shards, if it updates matrices of this stage as
        a whole."""
        return sum(self.world.world_size * part.layout.shard_numel for part in self.with_matrices)

    @property
    def with_matrices(self) -> list[FlatShard]:
        """The parts with matrices that the optimizer updates as a whole."""
        return [
            part
            for part in self.trainable
            if part.whole_matrices and part.layout.first_matrix < part.layout.numel
        ]

    def allocate(self, weights: Buffer, gradients: Buffer | None, precision: Precision) -> None:
        """Allocate the shards (views of a buffer that no other stage uses) and place the parameters
        in the buffers."""
        self.weights, self.gradients = weights, gradients
        sizes = [part.layout.numel for part in self.trainable]
        full_sums = iter(gradients.data[: sum(sizes)].split(sizes) if gradients else ())
        for part, full_weights in zip(self.parts, self._ranges(weights), strict=True):
            sums = None
            if gradients and part.has_state:
                sums = BufferRange(next(full_sums), gradients.is_owned)
            is_owned = weights.is_owned or part.is_state
            part.allocate(BufferRange(full_weights, is_owned), sums, precision)
        self._placed = self._materialize()
        self._gradient_gaps = [
            part.full_gradients[a:b] for part in self.trainable for a, b in part.layout.gaps
        ]
        self.trained = [parameter for _, parameter in self._placed if parameter.requires_grad]

    def compute_with(self, buffer: Buffer, averages: bool) -> None:
        """Make parameters views of this buffer; from now on `gather` fills it with weights or
        averages.

        The previous buffer keeps its contents.
        """
        self.weights = buffer
        for part, placed in zip(self.parts, self._ranges(buffer), strict=True):
            part.placed, part.shows_average = placed, averages
        for (_, parameter), (part, slot) in zip(self._placed, self._places(), strict=True):
            parameter.data = part.placed[slot.offset : slot.end].view(slot.spec.local_shape)
            parameter.casts = buffer.casts

    # -- the verbs
    # --------------------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Start gathering the full weights from all ranks' shards, unless the buffer already
        contains them."""
        if self.weights.holder == self.index:
            return
        self.weights.wait()
        self.weights.holder = self.index
        self.weights.casts.clear()
        for part in self.parts:
            part.place_weights()
        if shared := [
            part for part in self.parts if part.group.world_size > 1 and not part.is_whole
        ]:
            gathers = [part.group.all_gather(part.placed, part.gather_kind) for part in shared]
            self.weights.start(Works(gathers))

    def forward(self, hidden: Tensor | None, micro_batch: Any, slot: int) -> Tensor:
        """Run the layers on a detached input; save input and output for `backward`."""
        if not self.runs_backward:
            with torch.no_grad():
                return self._run(hidden, micro_batch, slot)
        if hidden is not None:
            hidden = hidden.detach().requires_grad_(self.wants_input_gradient)
        output = self._run(hidden, micro_batch, slot)
        self._tape[slot] = (hidden, output)
        return output.detach()

    def evaluate(self, hidden: Tensor | None, micro_batch: Any) -> Tensor:
        """Run the layers without saving anything for a backward pass."""
        with torch.no_grad():
            return self._run(hidden, micro_batch, None)

    def backward_input(self, grad: Tensor | None, slot: int) -> Tensor | None:
        """Like `backward`, but keep the products of weight gradients for `backward_weights`."""
        later = self._later[slot] = list[Callable[[], None]]()
        for parameter in self.trained:
            parameter.later = later
        result = self.backward(grad, slot)
        for parameter in self.trained:
            parameter.later = None
        return result

    def backward_weights(self, slot: int) -> None:
        """Add the products that `backward_input` kept; reads no weights."""
        if self.gradients is not None:
            self.require_gradients()
        with torch.no_grad():
            for add in self._later.pop(slot):
                add()

    def backward(self, grad: Tensor | None, slot: int) -> Tensor | None:
        """Return the input's gradient from the output's; parameter gradients accumulate in the
        gradient buffer."""
        if self.backward_needs_weights:
            self.require_weights()
        if self.gradients is not None:
            self.require_gradients()
        hidden, output = self._tape.pop(slot)
        backward(output, grad)
        if self.observer is not None and (hidden is None or not hidden.requires_grad):
            self.observer.layer_gradient(self.layers[0].name, None, slot)
        return None if hidden is None else hidden.grad

    def accumulate(self) -> None:
        """Take over the gradient buffer as soon as the reduction that still uses it has finished.

        The buffer contains garbage: the first contribution to each parameter overwrites it; only
        the padding is zeroed.
        """
        assert self.gradients is not None
        if self.gradients.holder == self.index:
            return
        self.gradients.wait()
        self.gradients.holder = self.index
        for parameter in self.trained:
            parameter.gradient_is_empty = True
        if self._gradient_gaps:
            torch._foreach_zero_(self._gradient_gaps)

    def reduce(self, again: bool) -> None:
        """Start summing all ranks' full gradients into the shards; `again`: add to the shards."""
        self.require_gradients()
        assert self.gradients is not None
        for parameter in self.trained:
            if parameter.gradient_is_empty:  # not used in this iteration
                parameter.gradient_is_empty = False
                parameter.main_grad.zero_()
        self.gradients.holder = None
        updates = []
        for part in self.trainable:
            if part.group.world_size == 1 and part.shares_gradients:
                assert not again, (
                    f"stage {self.index} has the only copy of its gradients, and reduces it twice"
                )
                continue
            reduction = part.group.reduce_scatter(part.full_gradients, part.reduce_kind)
            updates.append(ShardUpdate(reduction, part.own_gradients, part.sums, again))
        if updates:
            self.gradients.start(Works(updates))

    def finish_reduction(self) -> None:
        """Wait for the pending reduction, and complete the gradients of parameters with several
        copies."""
        if self.gradients is None:
            return
        self.gradients.wait()
        for part in self.trainable:
            if part.replicas is not None:
                part.replicas.sum_gradients(part.grad_shard)

    def begin_update(self) -> None:
        """Wait for the gather that reads this rank's shard, which may be a view of the stage's own
        buffer.

        A shared buffer that already receives another stage's weights for the next step needs no
        wait.
        """
        if self.weights.holder in (None, self.index):
            self.weights.wait()

    # -- gather and reduce for an optimizer that needs whole matrices
    # -----------------------------------------------

    def full_updates(self) -> Iterator[tuple[FlatShard, Tensor]]:
        """Yield each part of `with_matrices` with its momentum, later its orthogonalized form, in
        bf16.

        All shards in rank order, so those of a group with parts of a matrix are adjacent.
        """
        assert self.update_buffer is not None, f"stage {self.index} has no matrices"
        sizes = [self.world.world_size * part.layout.shard_numel for part in self.with_matrices]
        ranges = self.update_buffer.data[: self.update_numel].split(sizes)
        return zip(self.with_matrices, ranges, strict=True)

    def gather_update(self) -> None:
        """Start gathering `full_updates` from the slices that the ranks have written."""
        self._exchange_updates(self.world.all_gather, "muon gather")

    def reduce_update(self) -> None:
        """Start summing `full_updates` into each rank's slice; each element is nonzero on one rank
        only."""
        self._exchange_updates(self.world.reduce_scatter, "muon reduce")

    def _exchange_updates(self, start: Callable[[Tensor, str], Handle], kind: str) -> None:
        if self.world.world_size > 1:
            works = Works([start(full, kind) for _, full in self.full_updates()])
            cast(Buffer, self.update_buffer).start(works)

    # -- guards: autograd cannot see a wrong buffer behind a parameter
    # ----------------------------------------------

    def require_weights(self) -> None:
        """Assert that the buffer belongs to this stage, and wait for its weights."""
        holder = self.weights.holder
        assert holder == self.index, (
            f"stage {self.index} would compute with the weights of stage {holder}"
        )
        self.weights.wait()

    def require_gradients(self) -> None:
        """Assert that the gradient buffer belongs to this stage."""
        assert self.gradients is not None, f"stage {self.index} has no gradients"
        holder = self.gradients.holder
        assert holder == self.index, (
            f"stage {self.index} would add its gradients to those of stage {holder}"
        )

    # -- parameters
    # -------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield (global name, full parameter); values are valid while the weights are gathered."""
        yield from self._placed

    def specs(self) -> Iterator[ParameterSpec]:
        """Return the specs in the order of `parameters`, for any pipeline rank's stage."""
        return (spec for _, spec in self.specs_by_part())

    def specs_by_part(self) -> Iterator[tuple[FlatShard, ParameterSpec]]:
        """Yield each part with its specs, in the order of `parameters`."""
        return ((part, slot.spec) for part, slot in self._places())

    def _run(self, hidden: Tensor | None, micro_batch: Any, slot: int | None) -> Tensor:
        """Run the layers. slot: index of the micro-batch in the step, for the observer; None: do
        not observe."""
        self.require_weights()
        for layer in self.layers:
            if (
                self.observer is not None
                and slot is not None
                and hidden is not None
                and hidden.requires_grad
            ):
                hidden.register_hook(
                    functools.partial(self.observer.layer_gradient, layer.name, micro_batch=slot)
                )
            if layer.recomputed:
                assert hidden is not None, "the first layer of a model is not recomputed"
                hidden = recompute(layer, hidden, micro_batch)
            else:
                hidden = layer(hidden, micro_batch)
            if self.observer is not None and slot is not None:
                self.observer.layer_output(layer.name, hidden.detach(), slot)
        assert hidden is not None
        return hidden

    def _ranges(self, weights: Buffer) -> list[Tensor]:
        """Split a weight buffer into the parts' flat ranges."""
        ranges = weights.data[: self.numel].split([part.buffer_numel for part in self.parts])
        return [part.full_range(own) for part, own in zip(self.parts, ranges, strict=True)]

    def _places(self) -> Iterator[tuple[FlatShard, ParameterSlot]]:
        """Yield each parameter's part and slot, in the order of `parameters`."""
        for part in self.parts:
            for slot in part.layout.slots:
                yield part, slot

    def _materialize(self) -> list[tuple[str, Parameter]]:
        """Replace each declared parameter by a view of its slot in the two buffers."""
        places = {slot.spec.name: (part, slot) for part, slot in self._places()}
        placed: dict[str, Parameter] = {}
        for module in (module for layer in self.layers for module in layer.modules()):
            for attribute, declared in list(module.named_parameters(recurse=False)):
                part, slot = places[cast(Parameter, declared).spec.name]
                bounds = slice(slot.offset, slot.end)
                parameter = Parameter(
                    part.full_weights[bounds].view(slot.spec.local_shape),
                    requires_grad=part.has_state,
                )
                parameter.spec, parameter.casts = slot.spec, self.weights.casts
                if part.has_state:
                    parameter.main_grad = part.full_gradients[bounds].view(slot.spec.local_shape)
                setattr(module, attribute, parameter)
                placed[slot.spec.name] = parameter
        return [(name, placed[name]) for name in places]


def _kind(spec: ParameterSpec) -> tuple[bool, bool, bool]:
    return not spec.trainable, spec.is_state, spec.split.expert_ranks > 1
