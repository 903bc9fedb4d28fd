"""How fast a device and its links are: by its data sheet, or as measured by `scripts.benchmarks.machine`."""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_lite.config.values import shown
from megatron_lite.errors import UsageError
from megatron_lite.kernels.exchange import GATHER, REDUCE, SUM
from megatron_lite.planner.work import Attention, Item, Pass, Product

FORMAT, VERSION = "megatron_lite_machine_speeds", 1
MAX_BYTES = 2**20
PRODUCT_KINDS = ("forward", "input gradient", "weight gradient")
AXES = ("tokens", "inputs", "outputs")
DIRECTIONS = ("forward", "backward")
# Shares of a data sheet's peaks that programs reach: passes over memory 80 to 90 %, collectives over good links 80 %.
MEMORY_SHARE, LINK_SHARE = 0.8, 0.8
# The host issues the two passes of a block in this time; a GPU that computes faster waits for it.
HOST_BLOCK_S = 1e-3
GPU_LATENCY_S = 20e-6  # of a collective
TENSOR_KINDS = (GATHER, REDUCE, SUM)  # of traffic in a tensor-parallel group


class Speeds(Protocol):
    """The speeds of a machine that a prediction asks for."""

    @property
    def source(self) -> str: ...

    @property
    def overlap(self) -> float: ...

    @property
    def block_s(self) -> float: ...

    @property
    def step_s(self) -> float: ...

    @property
    def waits_for_host(self) -> bool: ...

    def item_s(self, item: Item, dtype: str) -> float: ...

    def collective_s(self, kind: str, collectives: int, wire_bytes: float) -> float: ...

    def assumptions(self, world_size: int) -> list[str]: ...


@dataclass(frozen=True)
class DataSheet:
    """Peaks of a device and a link; a step reaches a share of them that is assumed."""

    name: str
    product_flops_per_s: Mapping[str, float]  # by training dtype, dense
    memory_bytes_per_s: float
    link_bytes_per_s: float  # that a rank sends
    link_name: str = "link"
    tensor_bytes_per_s: float = 0.0  # that a rank sends to its tensor-parallel group; 0: as to others
    latency_s: float = GPU_LATENCY_S
    overlap: float = 1.0  # largest share of a collective that overlaps with computation
    block_s: float = HOST_BLOCK_S
    step_s: float = 0.0
    waits_for_host: bool = True
    product_share: float = 0.65  # of the peak that products reach
    attention_share: float = 0.4

    @property
    def source(self) -> str:
        """Where the numbers come from."""
        return f"data sheet of {self.name}"

    def item_s(self, item: Item, dtype: str) -> float:
        """Return the larger of the times that arithmetic and memory take."""
        peak, memory = self.product_flops_per_s[dtype], self.memory_bytes_per_s * MEMORY_SHARE
        if isinstance(item, Pass):
            return item.num_bytes / memory
        if isinstance(item, Attention):
            return item.flops / (peak * self.attention_share)
        tokens, inputs, outputs = item.tokens, item.inputs, item.outputs
        itemsize = 4 if dtype == "fp32" else 2
        moved = item.times * itemsize * (tokens * inputs + inputs * outputs + tokens * outputs)
        if item.kind == "weight gradient":  # fp32 totals
            moved += item.times * (8 - itemsize) * inputs * outputs
        return max(item.flops / (peak * self.product_share), moved / memory)

    def collective_s(self, kind: str, collectives: int, wire_bytes: float) -> float:
        """Return the time of collectives that send these bytes in all."""
        link = self.tensor_bytes_per_s if kind in TENSOR_KINDS else 0.0
        return collectives * self.latency_s + wire_bytes / ((link or self.link_bytes_per_s) * LINK_SHARE)

    def assumptions(self, world_size: int) -> list[str]:
        """Say what a prediction assumes, a line each."""
        peaks = ", ".join(f"{dtype} {peak / 1e12:,.4g} TFLOP/s" for dtype, peak in self.product_flops_per_s.items())
        lines = [
            f"{self.source}: {peaks}, memory {self.memory_bytes_per_s / 1e9:,.0f} GB/s; not measured",
            f"products reach {self.product_share:.0%} of the peak, attention {self.attention_share:.0%}, passes over "
            f"memory {MEMORY_SHARE:.0%}",
        ]
        if world_size > 1:
            hidden = "they overlap with computation where there is a second buffer" if self.overlap else "none overlap"
            lines.append(
                f"{self.link_name} {self.link_bytes_per_s / 1e9:,.4g} GB/s in a ring of ranks, of which collectives "
                f"reach {LINK_SHARE:.0%}; {self.latency_s * 1e6:,.0f} us each; {hidden}"
            )
        if self.tensor_bytes_per_s:
            lines.append(
                f"tensor-parallel ranks are neighbours with {self.tensor_bytes_per_s / 1e9:,.4g} GB/s; of their "
                "collectives those of the backward pass overlap that have a matrix product to overlap with"
            )
        return lines


@dataclass(frozen=True)
class Grid:
    """FLOP/s of products at the corners of a grid of sizes; between them log-linear, outside as at the border."""

    axes: tuple[tuple[float, ...], ...]  # tokens, inputs, outputs
    rates: Mapping[str, Mapping[tuple[int, ...], float]]  # kind -> place on the axes -> FLOP/s

    def flops_per_s(self, item: Product) -> float:
        """Return the rate of a product."""
        corners = [_between(axis, size) for axis, size in zip(self.axes, item[1:4], strict=True)]
        rates = self.rates[item.kind]
        total = 0.0
        for choice in itertools.product(*corners):
            weight = math.prod(share for _, share in choice)
            if weight:
                total += weight * math.log(rates[tuple(place for place, _ in choice)])
        return math.exp(total)


def _between(axis: Sequence[float], size: float) -> list[tuple[int, float]]:
    """Return the two places of an axis around a size, and their shares."""
    size = min(max(size, axis[0]), axis[-1])
    high = max(1, bisect.bisect_left(axis, size))
    if len(axis) == 1:
        return [(0, 1.0)]
    low = high - 1
    share = math.log(size / axis[low]) / math.log(axis[high] / axis[low])
    return [(low, 1.0 - share), (high, share)]


@dataclass(frozen=True)
class MeasuredSpeeds:
    """Speeds of a machine, as `scripts.benchmarks.machine` has measured them on the ranks of one start."""

    path: str
    device: str
    device_type: str
    world_size: int
    threads: int
    products: Mapping[str, Grid]  # by training dtype
    passes: Mapping[str, Mapping[str, float]]  # by dtype: seconds per element by kind
    attention: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]  # by dtype: (length, FLOP/s) by kind
    collectives: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # kind -> latency, bytes/s sent
    overlap: float = 0.0
    block_s: float = 0.0
    step_s: float = 0.0

    @property
    def source(self) -> str:
        """Where the numbers come from."""
        return f"measured on {self.device} ({self.path})"

    @property
    def waits_for_host(self) -> bool:
        """On a GPU the host runs ahead; on a CPU its time adds to the computation's."""
        return self.device_type == "cuda"

    def check(self, device_type: str, dtype: str, world_size: int) -> None:
        """Check that the measurements match the plan.

        Raises:
            UsageError: if they are of another type of device or of other dtypes, or lack collectives.
        """
        where = f"--machine_speeds={shown(self.path)}"
        if device_type != self.device_type:
            other = "--gpu=cpu" if self.device_type == "cpu" else "--device=cuda"
            raise UsageError(f"{where}: measured on {self.device_type}, and the plan is for {device_type}; add {other}")
        if dtype not in self.products:
            has = ", ".join(self.products)
            raise UsageError(f"{where}: measured in {has}, not in {dtype}; measure again with --dtypes={dtype}")
        if world_size > 1 and not self.collectives:
            again = f"torchrun --nproc-per-node={world_size} -m scripts.benchmarks.machine"
            raise UsageError(
                f"{where}: one rank has measured no collectives, and the plan has {world_size}; use {again}"
            )

    def item_s(self, item: Item, dtype: str) -> float:
        """Return the time of one item."""
        if isinstance(item, Pass):
            known = self.passes[dtype]
            return item.elements * known.get(item.kind, known["copy"] * item.bytes_per_element / self._copied(dtype))
        if isinstance(item, Attention):
            name = f"{'math' if item.backend == 'math' else 'fused'} {DIRECTIONS[item.backward]}"
            points = self.attention[dtype][name]
            places = _between([length for length, _ in points], item.length)
            rate = math.exp(sum(share * math.log(points[place][1]) for place, share in places))
            return item.flops / rate
        return item.flops / self.products[dtype].flops_per_s(item)

    def collective_s(self, kind: str, collectives: int, wire_bytes: float) -> float:
        """Return the time of collectives that send these bytes in all."""
        latency_s, bytes_per_s = self.collectives.get(kind) or next(iter(self.collectives.values()))
        return collectives * latency_s + wire_bytes / bytes_per_s

    def assumptions(self, world_size: int) -> list[str]:
        """Say what a prediction assumes, a line each."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        lines = [f"{self.source}, {ranks} of {threads}; as many share a machine in the run"]
        if world_size > 1:
            lines.append(f"{self.overlap:.0%} of a collective overlaps with computation, as measured")
        return lines

    @staticmethod
    def _copied(dtype: str) -> int:
        return 8 if dtype == "fp32" else 4


# -- the file ----------------------------------------------------------------------------------------------------------


def read_speeds(path: Path) -> MeasuredSpeeds:
    """Read the file of `scripts.benchmarks.machine`.

    Raises:
        UsageError: in one line, if it cannot be read or is not such a file.
    """
    where = f"--machine_speeds={shown(str(path))}"
    fix = "write it with python -m scripts.benchmarks.machine --output=FILE"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes")
        return _parsed(str(path), json.loads(text, parse_constant=_refuse_constant))
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror or type(error).__name__}; {fix}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        said = str(error).replace("\n", " ")[:120]
        problem = f"no {said}" if isinstance(error, KeyError) else said
        raise UsageError(f"{where}: no file of machine speeds ({problem}); {fix}") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no speed")


def _parsed(path: str, values: Any) -> MeasuredSpeeds:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    if values.get("version") != VERSION:
        raise ValueError(f"version {str(values.get('version'))[:20]}, and this program reads {VERSION}")
    dtypes = values["dtypes"]
    if not dtypes:
        raise ValueError("no dtypes")
    return MeasuredSpeeds(
        path=path,
        device=_name(values["device"]),
        device_type={"cpu": "cpu", "cuda": "cuda"}[values["device_type"]],
        world_size=int(_positive(values["world_size"])),
        threads=int(_positive(values["threads"])),
        products={_name(dtype): _grid(entry["products"]) for dtype, entry in dtypes.items()},
        passes={dtype: _passes(entry["seconds_per_element"]) for dtype, entry in dtypes.items()},
        attention={dtype: _curves(entry["attention_flops_per_s"]) for dtype, entry in dtypes.items()},
        collectives={
            _name(kind): (_number(entry["latency_s"]), _positive(entry["bytes_per_s"]))
            for kind, entry in values["collectives"].items()
        },
        overlap=min(_number(values["overlap"]), 1.0),
        block_s=_number(values["block_s"]),
        step_s=_number(values["step_s"]),
    )


def _grid(entry: Any) -> Grid:
    axes = tuple(tuple(map(_positive, entry[axis])) for axis in AXES)
    for name, axis in zip(AXES, axes, strict=True):
        if not axis or list(axis) != sorted(set(axis)):
            raise ValueError(f"the sizes of {name} do not rise")
    rates = {}
    for kind in PRODUCT_KINDS:
        table = entry["flops_per_s"][kind]
        rates[kind] = {
            place: _positive(table[place[0]][place[1]][place[2]])
            for place in itertools.product(*(range(len(axis)) for axis in axes))
        }
    return Grid(axes, rates)


def _passes(entry: Any) -> dict[str, float]:
    passes = {_name(kind): _positive(seconds) for kind, seconds in entry.items()}
    if "copy" not in passes:
        raise KeyError("copy")
    return passes


def _curves(entry: Any) -> dict[str, list[tuple[float, float]]]:
    curves = {}
    for kind in ("fused", "math"):
        for direction in DIRECTIONS:
            points = [(_positive(length), _positive(rate)) for length, rate in entry[f"{kind} {direction}"]]
            if not points or points != sorted(set(points)):
                raise ValueError(f"the lengths of {kind} {direction} do not rise")
            curves[f"{kind} {direction}"] = points
    return curves


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e30:
        raise ValueError(f"{shown(str(value)[:40])} is no speed")
    return float(value)


def _positive(value: Any) -> float:
    if not _number(value) > 1e-30:
        raise ValueError(f"{shown(str(value)[:40])} is no speed")
    return float(value)


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
        raise ValueError(f"{shown(str(value)[:40])} is no name")
    return value
