"""Checks of 8-bit scales, rounding and products that hold to the bit in every layout, without one
to compare with.

In each rank, every product of rounded factors is computed again: each factor is rounded by a search
among the numbers of its format, and the result lies within the rounding of a sum in fp32. A *use*
tells the largest magnitudes of a factor as its rank has it, and the scale that it was rounded with.
Uses of all ranks say what each scale must be:

    tensorwise   the largest magnitude of the whole factor, over tensor-parallel ranks, by the largest of the format
    rowwise      the same by row
    delayed      the largest magnitudes of all ranks and micro-batches in the last `--amax_history_length` iterations;
                 1 in the first. The scale of a frozen weight is that of "tensorwise"

The random rounding of --int8 is to the nearest here, as its noise depends on the layout, as dropout
does.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_lite.config import Config
from megatron_lite.kernels import eight_bit
from megatron_lite.kernels.eight_bit import GRADIENT, INPUT, WEIGHT, EightBit, Rounded
from megatron_lite.kernels.linear import complete

KINDS = ("input", "weight", "gradient")
DIMENSIONS = ("ti", "oi", "to")  # of these
# each addition in fp32 rounds by half of this; those of a sum in blocks and its scales by less
OF_SUM = 2.0**-23
OF_UNITS = 2.0**-12  # those of a GPU's units, which add fp8 products with fewer bits


class Use(NamedTuple):
    """A factor (m, k) of a product as one rank has it."""

    layer: str
    kind: int  # in KINDS
    over: str  # the dimension that the product sums over: t, i or o
    split: str  # the dimension of the weight that tensor-parallel ranks split
    frozen: bool  # the weight
    trains: bool  # else it is an evaluation's
    largest: np.ndarray  # magnitudes, (m,) by row, else (1,), fp32
    scale: np.ndarray  # of the same shape
    fault: str  # what is wrong in this rank already


# weight; two of values, kind, over
Factors = tuple[Any, tuple[Tensor, int, str], tuple[Tensor, int, str]]


def _of_forward(x: Any, weight: Any, bias: Any) -> Factors:
    return weight, (complete(x).flatten(0, -2), INPUT, "i"), (weight.detach(), WEIGHT, "i")


def _of_input_gradient(dy: Any, weight: Any) -> Factors:
    return weight, (complete(dy), GRADIENT, "o"), (weight.detach().t(), WEIGHT, "o")


def _of_weight_gradient(weight: Any, dy: Tensor, x: Tensor) -> Factors:
    return weight, (dy.t(), GRADIENT, "t"), (x.t(), INPUT, "t")


class Recorder:
    """Uses of this process since the last `taken`; changes the functions of 8-bit products when it
    is made.

    disturbance: noise in factors before they are rounded, by their largest magnitude; uses then
    tell nothing.
    """

    disturbance = 0.0

    def __init__(self) -> None:
        self._uses, self._dice = list[Use](), torch.Generator().manual_seed(0)
        self._factors: list[
            tuple[EightBit, bool, Tensor, int, str]
        ] = []  # of the product that runs now
        self._record("_forward", _of_forward)
        self._record("_input_gradient", _of_input_gradient)
        self._record("_add_weight_gradient", _of_weight_gradient)
        round_values, multiply = eight_bit.round_values, eight_bit.multiply

        def to_nearest(
            values: Tensor, scale: Tensor, dtype: torch.dtype, seed: Any = None, *more: Any
        ) -> Tensor:
            if self.disturbance and not values.is_meta:
                noise = torch.empty_like(values).uniform_(-1, 1, generator=self._dice)
                values = values + noise * values.abs().amax() * self.disturbance
            return round_values(values, scale, dtype, None, *more)

        def recorded(a: Rounded, b: Rounded, *more: Any, **named: Any) -> Tensor:
            result = multiply(a, b, *more, **named)
            self._end(a, b, result)
            return result

        vars(eight_bit).update(round_values=to_nearest, multiply=recorded)

    def _record(self, name: str, factors_of: Callable[..., Factors]) -> None:
        """Note the factors of a product of `EightBit` before it runs."""
        product = getattr(EightBit, name)

        @functools.wraps(product)
        def recorded(self_: EightBit, *arguments: Any) -> Any:
            weight, *factors = factors_of(*arguments)
            self._factors = [(self_, not weight.spec.trainable, *factor) for factor in factors]
            return product(self_, *arguments)

        setattr(EightBit, name, recorded)

    def taken(self) -> list[Use]:
        """Return the uses, and forget them."""
        uses, self._uses = self._uses, []
        return uses

    def _end(self, a: Rounded, b: Rounded, result: Tensor) -> None:
        """Check a product, and note how its factors were rounded."""
        factors, self._factors = self._factors, []
        if not factors or result.is_meta or self.disturbance:
            return  # of no layer, or of a plan, which computes nothing
        of_product = _fault_of_product(a, b, result)
        for rounded, (layer, frozen, values, kind, over) in zip((a, b), factors, strict=True):
            largest = values.abs().amax(1 if layer.recipe.by_row else (0, 1))
            magnitudes, scale = (
                each.detach().float().flatten().cpu().numpy().copy()
                for each in (largest, rounded.scale)
            )
            fault = of_product or _fault_of_rounding(rounded, layer, values, kind)
            trains = layer._seed is not None
            self._uses.append(
                Use(layer.name, kind, over, layer._split, frozen, trains, magnitudes, scale, fault)
            )


def nearest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of a format that are nearest to fp32 values, fp32: of two the one whose
    last bit is 0."""
    if dtype == torch.int8:
        return values.round().clamp(-127, 127)
    numbers = torch.finfo(dtype)
    # of two, not above the value
    power = (values.view(torch.int32) & 0x7F800000).view(torch.float32)
    step = power.clamp_(min=numbers.smallest_normal).mul_(numbers.eps)
    return (values / step).round_().mul_(step).clamp_(-numbers.max, numbers.max)


def _fault_of_rounding(rounded: Rounded, layer: EightBit, values: Tensor, kind: int) -> str:
    dtype = layer.recipe.gradients if kind == GRADIENT else layer.recipe.values
    if rounded.numbers.dtype != dtype or rounded.numbers.shape != values.shape:
        return f"has {rounded.numbers.dtype} numbers of shape {tuple(rounded.numbers.shape)}"
    ratios = values.detach().float() / rounded.scale.float()
    wrong = (nearest(ratios, dtype) != rounded.numbers.float()) & ratios.isfinite()
    count = int(wrong.sum())
    return (
        f"has {count} of {wrong.numel()} numbers that are not its values by its scale"
        if count
        else ""
    )


def _fault_of_product(a: Rounded, b: Rounded, result: Tensor) -> str:
    left, right = (factor.numbers.double() * factor.scale.double() for factor in (a, b))
    exact, sizes = left @ right.t(), left.abs() @ right.abs().t()
    of_terms = (OF_SUM if result.device.type == "cpu" else OF_UNITS) * max(left.shape[1], 2)
    of_result = 0.0 if result.dtype == torch.float32 else torch.finfo(result.dtype).eps
    limits = of_terms * sizes + of_result * exact.abs() + torch.finfo(result.dtype).tiny
    within = ((result.double() - exact).abs() <= limits) | ~exact.isfinite() | ~result.isfinite()
    return "" if bool(within.all()) else "has a product that is not that of its numbers"


# -- what scales must be
# -----------------------------------------------------------------------------------------------

Place = tuple[str, int]  # layer, kind


class Scales:
    """The scales that a run must have, from its uses, iteration by iteration, also across
    restarts."""

    def __init__(self) -> None:
        self._histories = defaultdict[Place, list[np.float32]](list)
        self._delayed = dict[Place, np.float32]()

    def fault(self, config: Config, ranks: Sequence[Sequence[Use]], ends_iteration: bool) -> str:
        """Return what is wrong with the uses of an iteration or evaluation; empty: nothing.

        ranks: the uses of each rank, in order. ends_iteration: its magnitudes count from the next
        one on.
        """
        tensor = config.distributed.tensor_parallel
        for first in range(0, len(ranks), tensor):  # tensor-parallel ranks are neighbours
            numbered = [_numbered(uses) for uses in ranks[first : first + tensor]]
            for key, use in numbered[0].items():
                alike = [each.get(key) for each in numbered]
                if any(each is None for each in alike):
                    return f"tensor-parallel ranks do not multiply alike: {use.layer}"
                if fault := self._fault_of(config, [each for each in alike if each is not None]):
                    return fault
        if ends_iteration and config.performance.fp8 == "delayed":
            self._end_iteration(
                config.performance.amax_history_length, [use for uses in ranks for use in uses]
            )
        return ""

    def _fault_of(self, config: Config, uses: Sequence[Use]) -> str:
        """uses: of one factor on all tensor-parallel ranks."""
        for rank, (use, scale) in enumerate(zip(uses, self._wanted(config, uses), strict=True)):
            of = f"the {KINDS[use.kind]} of {use.layer}, summed over {use.over}, on tensor-parallel rank {rank}"
            if use.scale.shape != scale.shape:
                return f"{of} has {use.scale.size} scales, not {scale.size}"
            if len(wrong := np.flatnonzero((use.scale != scale) & np.isfinite(scale))):
                return f"{of} has the scale {use.scale[wrong[0]]:.9g}, not {scale[wrong[0]]:.9g}"
            if use.fault:
                return f"{of} {use.fault}"
        return ""

    def _wanted(self, config: Config, uses: Sequence[Use]) -> list[np.ndarray]:
        """Return the scales of a factor on each tensor-parallel rank."""
        use, performance = uses[0], config.performance
        if performance.fp8 == "delayed" and not (use.kind == WEIGHT and use.frozen):
            return [np.full(1, self._delayed.get((use.layer, use.kind), 1.0), np.float32)] * len(
                uses
            )
        by_row = performance.int8 or performance.fp8 == "rowwise"
        largest = [each.largest for each in uses]
        if use.split in (use.over if by_row else DIMENSIONS[use.kind]):
            largest = [np.maximum.reduce(largest)] * len(uses)
        return [
            np.maximum(each / _largest(config, use.kind), np.float32(2.0**-100)) for each in largest
        ]

    def _end_iteration(self, length: int, uses: Iterable[Use]) -> None:
        seen = defaultdict[Place, np.float32](np.float32)
        for use in uses:
            if use.trains:
                seen[use.layer, use.kind] = np.maximum(seen[use.layer, use.kind], use.largest.max())
        for place, largest in seen.items():
            history = self._histories[place]
            history.append(largest if np.isfinite(largest) else np.float32(0))
            if (most := max(history[-length:])) > 0:
                self._delayed[place] = np.float32(1) / (_LARGEST[place[1]] / most)


_LARGEST = (np.float32(448), np.float32(448), np.float32(57344))  # of e4m3 and e5m2


def _largest(config: Config, kind: int) -> np.float32:
    return np.float32(127.5) if config.performance.int8 else _LARGEST[kind]


def _numbered(uses: Sequence[Use]) -> dict[tuple[Any, ...], Use]:
    """Return the uses by what they are and how many equal ones came before."""
    counts = defaultdict[tuple[Any, ...], int](int)
    found = dict[tuple[Any, ...], Use]()
    for use in uses:
        key = (use.layer, use.kind, use.over, use.trains)
        place = (*key, counts[key])
        found[place] = use
        counts[key] += 1
    return found
