"""Products with factors rounded to 8 bits: fp8 (--fp8) or integers (--int8).

A factor v is rounded with a scale s, of the whole tensor or of each row, to q(v) = round(v / s) in
8 bits. Products are computed from these numbers, summed in fp32 or int32, and multiplied by the
scales of both factors:

    y = q(x) q(W)^T        dx = q(dy) q(W)        W.main_grad += q(dy)^T q(x)

fp8 (Micikevicius et al. 2022): x and W in e4m3, dy in e5m2, s = largest magnitude / largest number
of the format. "rowwise" has a scale for each row of a factor along the dimension that its product
sums over, so each product rounds its own factors. "delayed" takes the magnitudes of earlier
iterations: see `optimizer/delayed_scaling.py`; a frozen weight, which is not rounded in each of
them, has the scale of "tensorwise".

int8 (as AQT and Levanter): scales by row, s = largest magnitude / 127.5; dy is rounded up or down
at random, without bias; the weight gradient is computed from unrounded factors.

Weights are rounded once per gather. Tensor-parallel ranks that split a dimension agree on the
magnitudes along it, so T changes no scale. Without 8-bit units, the same numbers are multiplied in
16 or 32 bits, which is no faster.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.distributed.rank_group import Group
from megatron_lite.kernels.converted_products import multiply_in_fp32
from megatron_lite.kernels.linear import Arriving, Products, accumulate_product, complete
from megatron_lite.kernels.tensor_collectives import SCALE
from megatron_lite.kernels.triton_support import cdiv, generator_for, jit, tl
from megatron_lite.parameter import Parameter, ParameterSpec
from megatron_lite.seeds import derive_seed

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: torch.finfo(E4M3).max, E5M2: torch.finfo(E5M2).max, torch.int8: 127.5}
SMALLEST_SCALE = 2.0**-100  # for zeros
UNIT_MULTIPLE = 16  # sizes that the units support are multiples of this
INPUT = 0
WEIGHT = 1
GRADIENT = 2
DIMENSIONS = ("ti", "oi", "to")  # of the three products' results


Units = tuple[torch.dtype, ...]  # output dtypes of a device's 8-bit units; empty: it has none


class Recipe(NamedTuple):
    """How to round factors."""

    values: torch.dtype  # of inputs and weights
    gradients: torch.dtype
    by_row: bool = False  # one scale per row instead of per tensor


TENSORWISE = Recipe(E4M3, E5M2)
RECIPES = {
    "tensorwise": TENSORWISE,
    "rowwise": Recipe(E4M3, E5M2, by_row=True),
    "delayed": TENSORWISE,
    "int8": Recipe(torch.int8, torch.int8, by_row=True),
}


class Rounded(NamedTuple):
    """A rounded factor; its value is about `numbers * scale`."""

    numbers: Tensor  # (m, k), 8 bits
    scale: Tensor  # (m, 1) or (1, 1), fp32


# -- the formulas
# ----------------------------------------------------------------------------------------------------


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the fp32 scale for each amax."""
    # Divide by a tensor: a GPU multiplies by the inverse of a Python number.
    largest = largest.float()
    return (largest / largest.new_full((), LARGEST[dtype])).clamp_(min=SMALLEST_SCALE)


@jit
def _round_kernel(
    values_ptr,
    scale_ptr,
    numbers_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    BY_ROW: tl.constexpr,
    MOST: tl.constexpr,
    DROPPED: tl.constexpr,
    SMALLEST_NORMAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round one square tile of values (rows, columns), with any strides, per program; write the
    numbers row by row.

    DROPPED: mantissa bits that fp32 has and the format lacks; 0: integers. Rounding by hand is free
    next to the memory traffic, and Triton's interpreter cannot round to 8 bits.
    """
    tiles = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // tiles * BLOCK + tl.arange(0, BLOCK))[:, None].to(tl.int64)
    column = (tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK))[None, :].to(tl.int64)
    inside = (row < rows) & (column < columns)
    x = tl.load(values_ptr + row * row_stride + column * column_stride, mask=inside, other=0.0).to(
        tl.float32
    )
    if BY_ROW:
        x = tl.div_rn(x, tl.load(scale_ptr + row, mask=row < rows, other=1.0))
    else:
        x = tl.div_rn(x, tl.load(scale_ptr))
    is_nan = x != x
    rounded = tl.minimum(tl.maximum(x, -MOST), MOST)
    if DROPPED == 0:
        rounded = (rounded + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest, ties to even
    else:
        bits = rounded.to(tl.int32, bitcast=True)
        bits = (bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)) >> DROPPED << DROPPED
        shift = 12582912.0 * SMALLEST_NORMAL / (1 << (23 - DROPPED))
        rounded = tl.where(
            tl.abs(rounded) < SMALLEST_NORMAL,
            (rounded + shift) - shift,
            bits.to(tl.float32, bitcast=True),
        )
    rounded = tl.where(is_nan, x, rounded)
    tl.store(
        numbers_ptr + row * columns + column, rounded.to(numbers_ptr.dtype.element_ty), mask=inside
    )


TILE = 64  # 16 values per thread


def _format(dtype: torch.dtype) -> tuple[float, int, float]:
    """Return the kernel's MOST, DROPPED and SMALLEST_NORMAL."""
    if dtype == torch.int8:
        return 127.0, 0, 1.0
    numbers = torch.finfo(dtype)
    return numbers.max, 23 + round(math.log2(numbers.eps)), numbers.smallest_normal


def round_values(
    values: Tensor, scale: Tensor, dtype: torch.dtype, seed: int | None = None, triton: bool = False
) -> Tensor:
    """Return values (m, k) / scale (m, 1) or (1, 1), rounded to the nearest number in 8 bits.

    seed: round integers up or down at random. triton: use the kernel, unless seeded.
    """
    if triton and seed is None:
        numbers = torch.empty(values.shape, dtype=dtype, device=values.device)
        rows, columns = values.shape
        grid, sizes = (cdiv(rows, TILE) * cdiv(columns, TILE),), (rows, columns, *values.stride())
        _round_kernel[grid](
            values, scale, numbers, *sizes, scale.numel() > 1, *_format(dtype), TILE, num_warps=8
        )
        return numbers
    numbers = values / scale  # fp32
    if dtype != torch.int8:
        return numbers.clamp_(-LARGEST[dtype], LARGEST[dtype]).to(dtype)
    if seed is not None:
        noise = torch.empty_like(numbers)
        numbers.add_(noise.uniform_(-0.5, 0.5, generator=generator_for(values).manual_seed(seed)))
    return numbers.round_().clamp_(-127, 127).to(dtype)


def multiply(
    a: Rounded, b: Rounded, dtype: torch.dtype, units: Units = (), out: Tensor | None = None
) -> Tensor:
    """Return a (m, k) b (n, k)^T in `dtype`, (m, n), by the device's 8-bit units if they support
    the sizes.

    units: their output dtypes; none: multiply in 16 bits, or on a CPU in 32. out: in this dtype;
    receives the result if the units can write there, which saves a copy.
    """
    left, right = a.numbers, b.numbers.t()
    (rows, inner), columns, in_integers = left.shape, right.shape[1], left.dtype == torch.int8
    fits = inner % UNIT_MULTIPLE == columns % UNIT_MULTIPLE == 0 and (
        rows > UNIT_MULTIPLE or not in_integers
    )
    if units and fits:
        # the one layout that all units take
        left = left.contiguous()
        right = b.numbers.contiguous().t()
        if not in_integers:
            scales = a.scale, b.scale.t()
            if out is not None and dtype in units:
                return torch._scaled_mm(left, right, *scales, out_dtype=dtype, out=out)
            return torch._scaled_mm(
                left, right, *scales, out_dtype=dtype if dtype in units else units[0]
            ).to(dtype)
        return (torch._int_mm(left, right) * a.scale).mul_(b.scale.t()).to(dtype)
    if left.device.type == "cpu":
        total = multiply_in_fp32(left.new_empty(rows, columns, dtype=torch.float32), left, right)
    else:  # fp16 represents every number of the three formats
        total = torch.mm(left.half(), right.half(), out_dtype=torch.float32)
    return total.mul_(a.scale).mul_(b.scale.t()).to(dtype)


@functools.cache
def units_of(device: torch.device, recipe: Recipe) -> Units:
    """Return the dtypes in which the device's 8-bit units write correct products. Waits for the
    device."""
    if device.type != "cuda":
        return ()
    generator, factors = torch.Generator(device).manual_seed(0), []
    for rows, dtype in ((64, recipe.gradients), (32, recipe.values)):
        values = torch.randn(rows, 48, device=device, generator=generator)
        scale = scale_for(values.abs().amax(1 if recipe.by_row else (0, 1), keepdim=True), dtype)
        factors.append(Rounded(round_values(values, scale, dtype), scale))
    a, b = factors
    expected, written = multiply(a, b, torch.float32), []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        with contextlib.suppress(RuntimeError):  # not supported by this device or version
            difference = multiply(a, b, dtype, (dtype,)).float() - expected
            if difference.abs().max() < 0.02 * expected.abs().max():
                written.append(dtype)
    return tuple(written)


# -- the products of a layer
# -----------------------------------------------------------------------------------------


class EightBit:
    """The products of one linear layer with rounded factors.

    spec: the weight's. group: tensor-parallel ranks. units: see `multiply`. triton: see
    `round_values`.
    """

    delayed: tuple[Tensor, Tensor] | None = (
        None  # scales of x, W, dy, (3,), and this iteration's largest magnitudes
    )

    def __init__(
        self,
        recipe: Recipe,
        spec: ParameterSpec,
        group: Group,
        units: Units = (),
        triton: bool = False,
    ) -> None:
        self.recipe = recipe
        self.name = spec.name.removesuffix(".weight")
        self.units = units
        self.frozen = not spec.trainable  # whether the weight is
        self._group, self._triton = group, triton
        self._split = "oi"[spec.split.dim]  # the dimension that ranks split
        in_units = 0 if not units else 2 if recipe.values == torch.int8 else 3
        self.flops_per_token = 2.0 * in_units * spec.numel  # on the units, over all ranks
        self._seed: int | None = None
        self._scales: dict[
            int, Tensor
        ] = {}  # of one pass, if tensors have one scale: its factors so far

    def at(self, seed: int | None) -> Products:
        """Return the products for a micro-batch with this dropout seed; None: for evaluation."""
        of_pass = copy.copy(self)
        of_pass._seed, of_pass._scales = None if seed is None else derive_seed(seed, self.name), {}
        return Products(of_pass._forward, of_pass._input_gradient, of_pass._add_weight_gradient)

    def _forward(self, x: Arriving, weight: Parameter, bias: Tensor | None) -> Tensor:
        """Compute x (..., i), weight (o, i), bias (o,) -> (..., o)."""
        whole = complete(x)
        rounded = self._round(whole.flatten(0, -2), INPUT, "i")
        y = multiply(rounded, self._weight(weight)[0], whole.dtype, self.units)
        return (y if bias is None else y.add_(bias)).view(*whole.shape[:-1], -1)

    def _input_gradient(self, dy: Arriving, weight: Parameter) -> Tensor:
        """Compute dy (t, o), weight (o, i) -> (t, i)."""
        whole = complete(dy)
        return multiply(
            self._round(whole, GRADIENT, "o"), self._weight(weight)[1], whole.dtype, self.units
        )

    def _add_weight_gradient(self, weight: Parameter, dy: Tensor, x: Tensor) -> None:
        """Add dy (t, o)^T x (t, i) to the weight's gradient."""
        if self.recipe.values == torch.int8:
            return accumulate_product(weight, dy, x)
        factors = self._round(dy.t(), GRADIENT, "t"), self._round(x.t(), INPUT, "t")
        weight.accumulate(functools.partial(multiply, *factors, weight.main_grad.dtype, self.units))

    def _weight(self, weight: Parameter) -> tuple[Rounded, Rounded]:
        """Return the weight (o, i) and its transpose (i, o), rounded at their first use after a
        gather."""
        if (cast := weight.casts.get(self.name)) is None:
            values = weight.detach()
            rows, columns = self._round(values, WEIGHT, "i"), self._round(values.t(), WEIGHT, "o")
            cast = rows, columns._replace(numbers=columns.numbers.contiguous())
            # An evaluation does not cache what a training step must round itself to record its
            # magnitude.
            if self._seed is not None or self._delayed_scale(WEIGHT) is None:
                weight.casts[self.name] = cast
        return cast

    def _round(self, values: Tensor, kind: int, over: str) -> Rounded:
        """Round a factor (m, k) of a product that sums over the dimension `over`, the factor's
        last."""
        dtype = self.recipe.gradients if kind == GRADIENT else self.recipe.values
        scale = self._scale(values, kind, over, dtype)
        seed = self._seed if kind == GRADIENT and dtype == torch.int8 else None
        return Rounded(round_values(values, scale, dtype, seed, self._triton), scale)

    def _scale(self, values: Tensor, kind: int, over: str, dtype: torch.dtype) -> Tensor:
        by_row = self.recipe.by_row
        if kind in self._scales:
            return self._scales[kind]
        scale = self._delayed_scale(kind)
        if scale is not None and self._seed is None:
            return scale
        largest = torch.linalg.vector_norm(
            values, math.inf, dim=1 if by_row else (0, 1), keepdim=True
        ).float()
        if self.delayed is not None:
            seen = self.delayed[1][kind]
            torch.maximum(seen, largest.view(()), out=seen)
        if scale is None:
            if self._split in (over if by_row else DIMENSIONS[kind]):
                largest = self._group.largest(largest, SCALE)
            scale = scale_for(largest, dtype)
        if not by_row:
            self._scales[kind] = scale
        return scale

    def _delayed_scale(self, kind: int) -> Tensor | None:
        """Return the scale from earlier iterations, (1, 1); None: use the factor's own.

        A frozen weight uses its own: its 8-bit form depends on the weight alone, however often a
        layout rounds it.
        """
        if self.delayed is None or (kind == WEIGHT and self.frozen):
            return None
        return self.delayed[0][kind].view(1, 1)


def eight_bit_of(layers: Iterable[torch.nn.Module]) -> list[EightBit]:
    """Return these layers' products with rounded factors, in order."""
    found = (getattr(module, "eight_bit", None) for layer in layers for module in layer.modules())
    return [eight_bit for eight_bit in found if eight_bit is not None]
