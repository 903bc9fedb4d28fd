"""Meter what a layer's code allocates, multiplies, reads and writes, by running it on tensors
without memory.

Tensors on the meta device have shapes and dtypes, but no values. Two torch modes make the engine's
own code run on them as it would on the planned device. `PlannedDevice` reports the planned device
as every tensor's, so that code makes the same choices. `Meter` sees every operation: it counts the
live storages and computes nothing.

Memory that torch allocates inside an operation is invisible. `Meter` covers the one large case: a
CPU copies operands of another dtype, and a few others. For attention on a GPU see
`kernels/attention/gpu.planned_attention`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.kernels.triton_support import tell
from megatron_lite.planner.speeds import EIGHT_BITS, Attention, Product

EIGHT_BIT_PRODUCTS = ("_scaled_mm", "_int_mm")
_COMPARISONS = (
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "logical_and",
    "logical_or",
    "logical_not",
    "isnan",
    "isfinite",
)


class PlannedDevice(TorchFunctionMode):
    """Makes meta tensors report `device` as theirs, and creates tensors meant for `device` on
    meta."""

    def __init__(self, device: torch.device, meter: Meter) -> None:
        super().__init__()
        self._device, self._meter = device, meter
        self._answers = {
            torch.Tensor.device.__get__: device,
            torch.Tensor.is_cuda.__get__: device.type == "cuda",  # type: ignore[attr-defined]
            torch.Tensor.is_cpu.__get__: device.type == "cpu",  # type: ignore[attr-defined]
        }

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function is tell:
            return self._meter.told(*args)
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
            run(
                (output,),
                (gradient,),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )


class Meter(TorchDispatchMode):
    """Counts bytes of storages created since it was entered: `live` now, `peak` since `restart`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._copies_operands = device.type == "cpu"
        self._storages: dict[int, weakref.ref[Any]] = {}
        self.live, self.times = 0, 1  # times: how often the following operations happen
        self.restart()

    def told(self, event: str, *args: Any) -> None:
        """Count an event from `tell`. A kernel allocates nothing, and reads or writes each of its
        tensors once."""
        if event == "repeat":
            _, more, fewer = args
            self.times = self.times * more // fewer
        elif event == "attention":
            query, window, backend = args
            (b, n, s, d), kind = query.shape, "math" if backend == "math" else "fused"
            for direction in ("forward", "backward")[
                : 1 + (query.requires_grad and torch.is_grad_enabled())
            ]:
                self.items.append(Attention(f"{kind} {direction}", b * n, s, d, window))
        else:
            self.passes[event] += self.times * sum(tensor.nbytes for tensor in tensors_in(args))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch spends seconds importing its compiler at the first
        operation."""
        return False

    def has_made(self, storage: Any) -> bool:
        """Return whether a storage was created since the meter was entered."""
        return storage._cdata in self._storages

    def restart(self) -> None:
        """Reset the peak and the work."""
        # largest: bytes of the two largest new storages
        self.peak = self.live
        self.largest = [0, 0]
        self.items: list[Product | Attention] = []
        self.passes: Counter[str] = Counter()  # bytes by operation or kernel
        self.times = 1

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        tensors = [*tensors_in(args), *tensors_in(options.values())]
        if not all(tensor.is_meta for tensor in tensors):
            return function(*args, **options)  # on host values
        copied = _copied_bytes(function, tensors, options) if self._copies_operands else 0
        if (written := _written(function)) is not None:
            results = [
                args[place] if place < len(args) else options[name] for place, name in written
            ]
            result = tuple(results) if len(results) > 1 else results[0] if results else None
        else:
            result = (_shaped(function) or function)(*args, **options)
            results = [*tensors_in((result,))]
            for tensor in results:
                self._watch(tensor.untyped_storage(), tensors)
        self.peak = max(self.peak, self.live + copied)
        if (product := product_of(function, args)) is not None:
            self.items.append(product._replace(times=self.times))
        elif (moved := moved_bytes(function, tensors, results)) and not is_attention():
            self.passes[function._opname] += self.times * moved
        return result

    def _watch(self, storage: Any, operands: list[Tensor]) -> None:
        """Count a storage if it is new and the result is not a view of an operand."""
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages or any(
            key == operand.untyped_storage()._cdata for operand in operands
        ):
            return

        def freed(_: Any) -> None:
            del self._storages[key]
            self.live -= size

        self._storages[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.largest = sorted((*self.largest, size))[1:]


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among nested values, in order."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def product_of(function: Any, args: Iterable[Any]) -> Product | None:
    """Classify the product a (..., k) b (k, n) as one of a linear layer's three, by the transposed
    factor.

    None for other operations, and for a product with a vector, which is a sum. b may be the same
    for a whole batch.
    """
    if function._opname not in ("mm", "addmm", "addmm_", "bmm", "baddbmm", *EIGHT_BIT_PRODUCTS):
        return None
    in_eight_bits = function._opname in EIGHT_BIT_PRODUCTS
    a, b = [*tensors_in(args)][slice(2) if in_eight_bits else slice(-2, None)]
    m = a.shape[:-1].numel()
    k = a.shape[-1]
    n = b.shape[-1]
    if in_eight_bits:
        return Product(EIGHT_BITS, m, k, n)
    if 1 in (m, k, n) or (b.dim() == 3 and b.stride(0)):
        return None
    if a.stride(-2) < a.stride(-1):
        return Product("weight gradient", k, n, m)
    return (
        Product("forward", m, k, n)
        if b.stride(-2) < b.stride(-1)
        else Product("input gradient", m, n, k)
    )


def moved_bytes(function: Any, operands: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors that an operation reads or writes, each once; 0 for views and
    allocations.

    If one contains indices, the largest is a table, of which few rows are touched.
    """
    storages = {tensor.untyped_storage()._cdata for tensor in operands}
    makes_views = all(tensor.untyped_storage()._cdata in storages for tensor in results)
    if (makes_views and not function._schema.is_mutable) or function._opname.startswith(
        ("empty", "new_empty")
    ):
        return 0
    sizes = {id(tensor): tensor.nbytes for tensor in (*operands, *results)}.values()
    return sum(sizes) - max(sizes) * any(tensor.dtype == torch.int64 for tensor in operands)


def is_attention() -> bool:
    """Return whether an operation is called by attention or its backward pass."""
    return str(calling_frame().f_globals["__name__"]).startswith("megatron_lite.kernels.attention.")


def calling_frame() -> FrameType:
    """Return the innermost frame outside torch, its modes and this package: code that calls an
    operation."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_globals["__name__"].startswith(("torch.", "megatron_lite.planner."))
        or frame.f_code.co_name == "__torch_dispatch__"
    ):
        frame = frame.f_back
    return frame


@functools.cache
def _written(function: Any) -> list[tuple[int, str]] | None:
    """Return positions and names of arguments that an operation writes and returns; None if it
    creates tensors."""
    schema = function._schema
    if torch.Tag.inplace_view in function.tags or not schema.is_mutable:
        return None
    if not all(
        value.alias_info is not None and value.alias_info.is_write for value in schema.returns
    ):
        return None
    written = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return written[: len(schema.returns)]


# -- shapes of results
# -------------------------------------------------------------------------------------------------
# torch computes the shapes of these operations in Python: 0.1 ms each, after seconds to import its
# compiler.


@functools.cache
def _shaped(function: Any) -> Callable[..., Any] | None:
    """Return a function that allocates an operation's result; None if torch does it fast enough."""
    if _is_elementwise(function):
        is_condition = function._opname in _COMPARISONS
        return lambda *args, **options: _elementwise(args, torch.bool if is_condition else None)
    if torch.Tag.reduction in function.tags and len(function._schema.returns) == 1:
        names = [argument.name for argument in function._schema.arguments]
        return lambda *args, **options: _reduced(**dict(zip(names, args, strict=False)), **options)
    if function._opname in ("mm", "addmm"):
        return lambda *args, **_: _product(args)
    if function._opname == "mv":
        return lambda matrix, vector: torch.empty(len(matrix), dtype=matrix.dtype, device="meta")
    if function._opname == "native_layer_norm":
        return _normalized
    if function._opname == "native_layer_norm_backward":
        return _normalized_backward
    if function._opname == "arange":
        return lambda *args, dtype=torch.int64, **_: torch.empty(
            len(range(*args)), dtype=dtype, device="meta"
        )
    return None


@functools.cache
def _is_elementwise(function: Any) -> bool:
    return torch.Tag.pointwise in function.tags and function._opname not in ("clone", "copy_")


def _elementwise(args: tuple[Any, ...], dtype: torch.dtype | None) -> Tensor:
    tensors = [*tensors_in(args)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    dtype = dtype or _common_dtype(tensors)
    like = next((tensor for tensor in tensors if tensor.shape == shape), None)
    if like is None or like.is_contiguous():
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_like(like, dtype=dtype)


def _normalized(x: Tensor, shape: Sequence[int], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device="meta")
    rows = (*x.shape[: x.dim() - len(shape)], *([1] * len(shape)))
    return y, y.new_empty(rows), y.new_empty(rows)


def _normalized_backward(
    dy: Tensor,
    x: Tensor,
    shape: Any,
    mean: Tensor,
    rstd: Tensor,
    weight: Any,
    bias: Any,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    sizes = zip((x.shape, shape, shape), wanted, strict=True)
    return tuple(
        torch.empty(size, dtype=x.dtype, device="meta") if is_wanted else None
        for size, is_wanted in sizes
    )


def _product(args: tuple[Any, ...]) -> Tensor:
    *_, a, b = tensors_in(args)
    # `out_dtype`
    dtype = next((argument for argument in args if isinstance(argument, torch.dtype)), b.dtype)
    return torch.empty(len(a), b.shape[1], dtype=dtype, device="meta")


def _reduced(
    self: Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    dims = range(self.dim()) if dim in (None, []) else [dim] if isinstance(dim, int) else dim
    gone = {place % self.dim() for place in dims}
    shape = [
        1 if place in gone else size
        for place, size in enumerate(self.shape)
        if keepdim or place not in gone
    ]
    return torch.empty(shape, dtype=dtype or self.dtype, device="meta")


def _common_dtype(tensors: list[Tensor]) -> torch.dtype:
    """Return the common dtype of operands; zero-dimensional tensors do not count."""
    of_elements = [tensor.dtype for tensor in tensors if tensor.dim()] or [
        tensor.dtype for tensor in tensors
    ]
    return functools.reduce(torch.promote_types, of_elements)


def _copied_bytes(function: Any, tensors: list[Tensor], options: Mapping[str, Any]) -> int:
    """Return the bytes of operands that torch first copies on a CPU, to convert them or make them
    contiguous."""
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
