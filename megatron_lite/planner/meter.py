"""A meter of what the code of a layer allocates, multiplies and reads, which runs it on tensors that have no memory.

Tensors of the meta device have shapes and dtypes, but no values. Two modes of torch make the engine's own code run on
them as it would on the planned device. `PlannedDevice` answers those who ask for a tensor's device, so that they choose
what they would choose there. `Meter` sees every operation: it counts the storages that live, and does not compute.

What an operation of torch allocates inside is not seen. `Meter` knows one case in which that is large: a CPU copies
operands of another dtype, and a few others. For attention on a GPU see `kernels/attention/gpu.planned_attention`.
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
    """Lets tensors of the meta device say that they are on `device`, and makes new tensors of `device` there."""

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
            return None  # a kernel, which writes to what its caller has allocated
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
        """Run a backward pass inside of this mode, which torch leaves for the function that it calls."""
        gradient = torch.ones_like(output) if gradient is None else gradient
        run = torch.autograd.Variable._execution_engine.run_backward
        with self:
            run((output,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


class Meter(TorchDispatchMode):
    """Bytes of the storages that operations have made since it was entered: `live` now, `peak` since `restart`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._copies_operands = device.type == "cpu"
        self._storages: dict[int, weakref.ref[Any]] = {}
        self.live, self.times = 0, 1  # the latter: that what follows happens
        self.before_repeat: Callable[[], None] = lambda: None
        self.restart()

    def repeat(self, more: int, fewer: int) -> None:
        """Count what follows so many times more or fewer."""
        self.before_repeat()
        self.times = self.times * more // fewer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch imports its compiler, for seconds, at the first operation."""
        return False

    def has_made(self, storage: Any) -> bool:
        """Whether an operation has made a storage since the meter was entered."""
        return storage._cdata in self._storages

    def restart(self) -> None:
        """Begin another peak, and other lists."""
        self.peak, self.largest = self.live, [0, 0]  # the latter: bytes of the two largest new storages
        self.products: list[Product] = []
        self.times = 1

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        tensors = [*_tensors(args), *_tensors(options.values())]
        if not all(tensor.is_meta for tensor in tensors):
            return function(*args, **options)  # on numbers of the host
        if function._opname in ("mm", "addmm", "addmm_"):
            product = _product(*[*_tensors(args)][-2:])
            if 1 not in product[1:4]:  # with a vector it is a sum
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
        """Count a storage that is new, and not that of an operand of which the result is a view."""
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
    """Return the product a (m, k) b (k, n) as one of a linear layer, by the factor that is transposed."""
    (m, k), n = a.shape, b.shape[1]
    if a.stride(0) < a.stride(1):
        return Product("weight gradient", k, n, m)
    return Product("forward", m, k, n) if b.stride(0) < b.stride(1) else Product("input gradient", m, n, k)


@functools.cache
def _written(function: Any) -> list[tuple[int, str]] | None:
    """Return places and names of the arguments that an operation writes and returns; None if it makes new tensors."""
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
# Of these operations torch has the shapes in Python, which takes 0.1 ms, and seconds before to import its compiler.


@functools.cache
def _shaped(function: Any) -> Callable[..., Any] | None:
    """Return a function that makes a result of an operation's shape and dtype; None if torch does that well."""
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
    """Return the dtype in which operands are combined: numbers of no dimension have no say."""
    of_elements = [tensor.dtype for tensor in tensors if tensor.dim()] or [tensor.dtype for tensor in tensors]
    return functools.reduce(torch.promote_types, of_elements)


def _copied_bytes(function: Any, tensors: list[Tensor], options: Mapping[str, Any]) -> int:
    """Return the bytes of the operands that torch on a CPU copies before it computes: in another dtype, or in order."""
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
