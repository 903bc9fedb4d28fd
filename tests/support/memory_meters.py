"""Bytes that autograd keeps, and the peak of everything that torch allocates, measured on CPU to
the byte."""

from __future__ import annotations

import bisect
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lite.config import Config, DistributedConfig
from megatron_lite.distributed.grid import Groups, divide
from megatron_lite.distributed.traffic import Traffic
from megatron_lite.model.layer import Layer, MicroBatch
from megatron_lite.zero.multi_stage import MultiStage
from megatron_lite.zero.stage import Observer
from tests.support.harness import layers_of


class Alone(Groups):
    """The only rank, without a process group."""

    def __init__(self) -> None:
        super().__init__(0, 1, torch.device("cpu"), None, Traffic())
        divide(self, dist.new_group, DistributedConfig())

    def all_gather(self, buffer: Tensor, kind: str = "") -> Any:
        raise AssertionError("nothing to gather")

    reduce_scatter = all_gather

    def reduction_scratch_bytes(self, shard_numel: int, dtype: torch.dtype) -> int:
        return 0

    def wait_for(self, event: Any) -> None:
        raise AssertionError("nothing to wait for")


def a_model(config: Config, layers: list[Layer] | None = None) -> MultiStage:
    """A model of one rank with memory on CPU."""
    layers = layers or layers_of(config)
    model = MultiStage(
        layers, config.multi_stage, config.batch, config.distributed.training_dtype, Alone()
    )
    model.initialize(1)
    return model


def micro_batches(config: Config) -> list[MicroBatch]:
    """The micro-batches of one step, of random tokens; with --reset_position_ids=1 each has
    positions of its own."""
    batch = config.batch
    assert batch.micro_batch_size and batch.sequential_micro_batches
    generator = torch.Generator().manual_seed(1)
    shape = (batch.micro_batch_size, batch.sequence_length)
    positions = torch.arange(batch.sequence_length).repeat(batch.micro_batch_size, 1)
    return [
        MicroBatch(
            *torch.randint(config.model.vocab_size, (2, *shape), generator=generator),
            torch.tensor(1.0),
            7,
            positions=positions if config.data.reset_position_ids else None,
        )
        for _ in range(batch.sequential_micro_batches)
    ]


def measured_peak(model: MultiStage, batches: list[MicroBatch]) -> int:
    """Return the peak of the second of two steps: the first one also makes rotary tables."""

    def clear() -> None:
        for batch in batches:
            batch.shared.clear()  # a real step has batches of its own
        for buffer in model.memory.weights:
            buffer.casts.clear()  # as the gathers after an update do

    return second_peak(lambda: model.forward_backward(batches), clear)


def second_peak(step: Callable[[], object], clear: Callable[[], object] = lambda: None) -> int:
    """Return the most bytes that the second call takes. clear: called before it; what that frees does
    not count."""
    step()
    clear()
    with AllocatorMeter() as meter:
        step()
    return meter.peak


def some(cases: Sequence[Any], *columns: Sequence[Any], each: int) -> list[Any]:
    """Return every case with all values of the columns before it; one row of `each` by default, the
    others slow."""
    return [
        pytest.param(*values, case, marks=[] if (place + number) % each == 0 else pytest.mark.slow)
        for place, case in enumerate(cases)
        for number, values in enumerate(itertools.product(*columns))
    ]


class _LayerEnds(Observer):
    def __init__(self, at_end: Callable[[str], None]) -> None:
        self._at_end = at_end

    def layer_output(self, name: str, output: Tensor, micro_batch: int) -> None:
        self._at_end(name)


def measure_kept(model: MultiStage, micro_batch: MicroBatch) -> dict[str, int]:
    """Bytes of the storages that autograd keeps for the backward pass, each at the layer that keeps
    it first.

    Weights, tokens, and tables that all blocks share are no activations.
    """
    shared = [stage.weights.data for stage in model.stages] + [
        micro_batch.tokens,
        micro_batch.labels,
    ]
    alive = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in shared}
    ignored, totals = sum(storage.nbytes() for storage in alive.values()), [0]
    by_layer: dict[str, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # alive, so that no other one gets its address
        alive.setdefault(storage.data_ptr(), storage)
        return tensor

    def at_end(name: str) -> None:
        total = sum(storage.nbytes() for storage in alive.values()) - ignored
        by_layer[name] = total - totals[-1]
        totals.append(total)

    model.observe(_LayerEnds(at_end))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.forward_backward([micro_batch])
    return by_layer


class StorageWatcher(TorchDispatchMode):
    """Watches the storages that torch's operations make from the moment it is entered; override
    `made` and `freed`.

    Products of halves are computed in fp32, which takes a CPU without their instructions a
    twentieth of the time. The copies are not seen: what an operation allocates inside never is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def made(self, number: int, size: int) -> None:
        """Take note of a new storage of `size` bytes."""

    def freed(self, number: int, size: int) -> None:
        """Take note of the end of a storage."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = _product_in_fp32(function, args, kwargs or {})
        known = {
            leaf.untyped_storage()
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage(), known)
        return result

    def _add(self, storage: Any, known: set[Any]) -> None:
        if storage in self._seen or storage in known:
            return
        self._seen.add(storage)
        number, self._count = self._count, self._count + 1
        self.made(number, storage.nbytes())
        weakref.finalize(storage, self.freed, number, storage.nbytes())


class PeakMeter(StorageWatcher):
    """The most bytes of all storages that torch's operations have made since it was entered, and
    that live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def made(self, number: int, size: int) -> None:
        """Add the storage to the bytes that live."""
        self.live += size
        self.peak = max(self.peak, self.live)

    def freed(self, number: int, size: int) -> None:
        """Take the storage off the bytes that live."""
        self.live -= size


# Libraries take workspaces inside of these: at most 2.4 MiB for each thread, whatever the size of
# the product.
PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_")
)


class AllocatorMeter:
    """The bytes that torch's allocator on a CPU hands out, also inside of an operation, less
    workspaces of products."""

    def __init__(self) -> None:
        self.live = self.peak = 0  # after the `with`: at its end, and most at any time
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )

    def __enter__(self) -> AllocatorMeter:
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(*error)
        events = self._profiler.profiler.kineto_results.events()
        changes = sorted(
            (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
        )
        products = [
            (event.start_ns(), event.start_ns() + event.duration_ns())
            for event in events
            if event.name() in PRODUCTS
        ]
        for size in _without_workspaces(changes, sorted(products)):
            self.live += size
            self.peak = max(self.peak, self.live)


def _without_workspaces(
    changes: list[tuple[int, int]], products: list[tuple[int, int]]
) -> Iterator[int]:
    """Yield the sizes in order of time, but not those that a product allocates and frees before its
    end."""
    starts = [start for start, _ in products]
    inside: list[int | None] = []  # the product of each change
    for time_ns, _ in changes:
        number = bisect.bisect_right(starts, time_ns) - 1
        inside.append(number if number >= 0 and time_ns <= products[number][1] else None)
    freed = Counter(
        (number, -size) for number, (_, size) in zip(inside, changes, strict=True) if size < 0
    )
    for number, (_, size) in zip(inside, changes, strict=True):
        if number is None or (size > 0 and not freed[number, size]):
            yield size
        elif size > 0:
            freed[number, size] -= 1


def _product_in_fp32(function: Any, args: Any, kwargs: Any) -> Any:
    """Call an operation; if it is a product of halves, on fp32 copies."""
    name = function._schema.name.removeprefix("aten::")
    halves = (torch.bfloat16, torch.float16)
    if name.rstrip("_") not in ("mm", "addmm", "bmm", "baddbmm") or args[-1].dtype not in halves:
        return function(*args, **kwargs)
    out = args[0] if name.endswith("_") else kwargs.get("out")
    wide = [arg.float() if isinstance(arg, Tensor) else arg for arg in args]
    options = {key: value for key, value in kwargs.items() if key != "out"}
    result = getattr(torch.ops.aten, name.rstrip("_")).default(*wide, **options)
    return result.to(args[-1].dtype) if out is None else out.copy_(result)
