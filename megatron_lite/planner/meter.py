"""Meters what a layer's code allocates and multiplies by running it on tensors without memory.

Tensors on the meta device have shapes and dtypes, but no values. Two torch modes make the engine's own code run on them
as it would on the planned device. `PlannedDevice` reports the planned device as every tensor's, so that code makes the
same choices. `Meter` sees every operation: it counts the live storages and computes nothing.

Memory that torch allocates inside an operation is invisible. `Meter` covers the one large case: a CPU copies operands
of another dtype, and a few others. For attention on a GPU see `kernels/attention/gpu.planned_attention`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.kernels.triton_support import launched, repeat
from megatron_lite.planner.work import Product

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan", "isfinite")


class PlannedDevice(TorchFunctionMode):
    """Makes meta tensors report that they are on `device`, and creates tensors meant for `device` on meta."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        super().__init__()
        self._device, self._meter = device, meter
        self._answers = {
            torch.Tensor.device.__get__: device,
            torch.Tensor.is_cuda.__get__: device.type == "cuda",  # type: ignore[attr-defined]
            torch.Tensor.is_cpu.__get__: device.type == "cpu",  # type: ignore[attr-defined]
        }

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is launched:
            return None  # a kernel writes to memory that its caller has allocated
        if function is repeat:
            self._meter.repeat(*args[1:])
            return None
        if function in self._answers and args[0].is_meta:
            return self._answers[function]
        options = dict(kwargs or {})
        if function is torch.autograd.backward:
            (output,) = args[0]
            return self._run_backward(output, options["grad_tensors"])
        if "device" in options and options["device"] is not None:
            device = torch.device(options["device"])
            options["device"] = torch.device("meta") if device == self._device else device
        return function(*args, **options)

    def _run_backward(self, output: Tensor, gradient: Tensor | None) -> None:
        """Run a backward pass inside this mode, which torch leaves while it handles a function."""
        gradient = torch.ones_like(output) if gradient is None else gradient
        run = torch.autograd.Variable._execution_engine.run_backward
        with self:
            run((output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


class Meter(TorchDispatchMode):
    """Counts bytes of storages created since it was entered: `live` now, `peak` since `restart`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._copies_operands = device.type == "cpu"
        self._storages: dict[int, weakref.ref[Any]] = {}
        self.live, self.times = 0, 1  # times: how often the following operations happen
        self.before_repeat: Callable[[], None] = lambda: None
        self.restart()

    def repeat(self, more: int, fewer: int) -> None:
        """Count the following operations `more` / `fewer` times as often."""
        self.before_repeat()
        self.times = self.times * more // fewer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch spends seconds importing its compiler at the first operation."""
        return False

    def has_made(self, storage: Any) -> bool:
        """Whether a storage was created since the meter was entered."""
        return storage._cdata in self._storages

    def restart(self) -> None:
        """Reset the peak and the lists."""
        self.peak, self.largest = self.live, [0, 0]  # largest: bytes of the two largest new storages
        self.products: list[Product] = []
        self.times = 1

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        tensors = [*_tensors(args), *_tensors(options.values())]
        if not all(tensor.is_meta for tensor in tensors):
            return function(*args, **options)  # on host values
        if function._opname in ("mm", "addmm", "addmm_"):
            product = _product(*[*_tensors(args)][-2:])
            if 1 not in product[1:4]:  # a product with a vector counts as a sum
                self.products.append(product._replace(times=self.times))
        copied = _copied_bytes(function, tensors, options) if self._copies_operands else 0
        if (written := _written(function)) is not None:
            self.peak = max(self.peak, self.live + copied)
            results = tuple(args[place] if place < len(args) else options[name] for place, name in written)
            return results if len(results) > 1 else results[0] if results else None
        result = (_shaped(function) or function)(*args, **options)
        for tensor in _tensors((result,)):
            self._watch(tensor.untyped_storage(), tensors)
        self.peak = max(self.peak, self.live + copied)
        return result

    def _watch(self, storage: Any, operands: list[Tensor]) -> None:
        """Count a storage if it is new and the result is not a view of an operand."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages or any(key == operand.untyped_storage()._cdata for operand in operands):
            return

        def freed(_: Any) -> None:
            del self._storages[key]
            self.live -= size

        self._storages[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = sorted((*self.largest, size))[1:]


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _product(a: Tensor, b: Tensor) -> Product:
    """Classify the product a (m, k) b (k, n) as one of a linear layer's three, by the transposed factor."""
    (m, k), n = a.shape, b.shape[1]
    if a.stride(0) < a.stride(1):
        return Product("weight gradient", k, n, m)
    return Product("forward", m, k, n) if b.stride(0) < b.stride(1) else Product("input gradient", m, n, k)


@functools.cache
def _written(function: Any) -> list[tuple[int, str]] | None:
    """Return positions and names of arguments that an operation writes and returns; None if it makes new tensors."""
    schema = function._schema
    if torch.Tag.inplace_view in function.tags or not schema.is_mutable:
        return None
    if not all(value.alias_info is not None and value.alias_info.is_write for value in schema.returns):
        return None
    written = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return written[: len(schema.returns)]


# -- shapes of results -------------------------------------------------------------------------------------------------
# torch computes the shapes of these operations in Python: 0.1 ms each, after seconds to import its compiler.


@functools.cache
def _shaped(function: Any) -> Callable[..., Any] | None:
    """Return a function that allocates an operation's result; None if torch is fast enough at it."""
    if _is_elementwise(function):
        is_condition = function._opname in _COMPARISONS
        return lambda *args, **options: _elementwise(args, torch.bool if is_condition else None)
    if torch.Tag.reduction in function.tags and len(function._schema.returns) == 1:
        names = [argument.name for argument in function._schema.arguments]
        return lambda *args, **options: _reduced(**dict(zip(names, args, strict=False)), **options)
    if function._opname in ("mm", "addmm"):
        return lambda *args, **_: torch.empty(len(args[-2]), args[-1].shape[1], dtype=args[-1].dtype, device="meta")
    if function._opname == "mv":
        return lambda matrix, vector: torch.empty(len(matrix), dtype=matrix.dtype, device="meta")
    if function._opname == "arange":
        return lambda *args, dtype=torch.int64, **_: torch.empty(len(range(*args)), dtype=dtype, device="meta")
    return None


@functools.cache
def _is_elementwise(function: Any) -> bool:
    return torch.Tag.pointwise in function.tags and function._opname not in ("clone", "copy_")


def _elementwise(args: tuple[Any, ...], dtype: torch.dtype | None) -> Tensor:
    tensors = [*_tensors(args)]
    shape, dtype = torch.broadcast_shapes(*(tensor.shape for tensor in tensors)), dtype or _common_dtype(tensors)
    like = next((tensor for tensor in tensors if tensor.shape == shape), None)
    if like is None or like.is_contiguous():
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_like(like, dtype=dtype)


def _reduced(
    self: Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    dims = range(self.dim()) if dim in (None, []) else [dim] if isinstance(dim, int) else dim
    gone = {place % self.dim() for place in dims}
    shape = [1 if place in gone else size for place, size in enumerate(self.shape) if keepdim or place not in gone]
    return torch.empty(shape, dtype=dtype or self.dtype, device="meta")


def _common_dtype(tensors: list[Tensor]) -> torch.dtype:
    """Return the dtype in which operands are combined; zero-dimensional tensors do not count."""
    of_elements = [tensor.dtype for tensor in tensors if tensor.dim()] or [tensor.dtype for tensor in tensors]
    return functools.reduce(torch.promote_types, of_elements)


def _copied_bytes(function: Any, tensors: list[Tensor], options: Mapping[str, Any]) -> int:
    """Return the bytes of operands that torch copies on a CPU first, to convert them or make them contiguous."""
    if function._opname.startswith("native_layer_norm"):
        return sum(tensor.nbytes for tensor in tensors if not tensor.is_contiguous())
    if _is_elementwise(function):
        common = _common_dtype(tensors)
    elif options.get("dtype") is not None and torch.Tag.reduction in function.tags:
        common = options["dtype"]
    else:
        return 0
    return sum(
        tensor.numel() * common.itemsize
        for tensor in tensors
        if tensor.dtype not in (common, torch.bool) and tensor.dim()
    )
