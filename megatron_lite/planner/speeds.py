"""Speeds of a device and its links: from its data sheet, or measured by `scripts.benchmarks.machine`."""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, cast

from megatron_lite.checkpoint.decoding import PositiveCount, Rule, decode
from megatron_lite.config.values import shown
from megatron_lite.errors import DamagedError, UsageError
from megatron_lite.kernels.tensor_collectives import GATHER, REDUCE, SUM
from megatron_lite.planner.work import Attention, Item, Pass, Product

FORMAT, VERSION = "megatron_lite_machine_speeds", 1
MAX_BYTES = 2**20
PRODUCT_KINDS = ("forward", "input gradient", "weight gradient")
AXES = ("tokens", "inputs", "outputs")
DIRECTIONS = ("forward", "backward")
ATTENTION_KINDS = ("fused", "math")
# Shares of a data sheet's peaks reached in practice: passes over memory 80 to 90 %, collectives over good links 80 %.
MEMORY_SHARE, LINK_SHARE = 0.8, 0.8
# Time in which the host issues a block's two passes; a GPU that computes faster waits for it.
HOST_BLOCK_S = 1e-3
GPU_LATENCY_S = 20e-6  # per collective
TENSOR_KINDS = (GATHER, REDUCE, SUM)  # tensor-parallel traffic

Positive = Annotated[int | float, Rule("a positive number", lambda value: 1e-30 < value < 1e30)]
Share = Annotated[int | float, Rule("a share", lambda value: 0 <= value <= 1)]
Seconds = Annotated[int | float, Rule("a time", lambda value: 0 <= value < 1e30)]
Name = Annotated[str, Rule("a name", lambda value: 0 < len(value) <= 200 and value.isprintable())]


@dataclass(frozen=True)
class DataSheet:
    """Peaks of a device and a link; a step reaches an assumed share of them."""

    name: str
    product_flops_per_s: Mapping[str, float]  # by training dtype, dense
    memory_bytes_per_s: float
    link_bytes_per_s: float  # sent by a rank
    link_name: str = "link"
    tensor_bytes_per_s: float = 0.0  # sent by a rank to its tensor-parallel group; 0: link_bytes_per_s
    latency_s: float = GPU_LATENCY_S
    overlap: float = 1.0  # largest share of a collective that can overlap with computation
    block_s: float = HOST_BLOCK_S
    step_s: float = 0.0
    waits_for_host: bool = True
    product_share: float = 0.65  # share of the peak that products reach
    attention_share: float = 0.4

    @property
    def source(self) -> str:
        """Where the numbers come from."""
        return f"data sheet of {self.name}"

    def item_s(self, item: Item, dtype: str) -> float:
        """Return the larger of the arithmetic and memory times."""
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
                f"tensor-parallel ranks are neighbours with {self.tensor_bytes_per_s / 1e9:,.4g} GB/s; their "
                "collectives overlap with the matrix products that do not depend on them"
            )
        return lines


class Grid(NamedTuple):
    """FLOP/s of products on a grid of sizes, interpolated log-linearly and clamped at the border."""

    tokens: list[Positive]
    inputs: list[Positive]
    outputs: list[Positive]
    flops_per_s: dict[str, list[list[list[Positive]]]]  # by kind; indexed by the position on each axis

    def rate(self, item: Product) -> float:
        """Return the FLOP/s of a product."""
        axes = ((self.tokens, item.tokens), (self.inputs, item.inputs), (self.outputs, item.outputs))
        table, total = self.flops_per_s[item.kind], 0.0
        for (i, a), (j, b), (k, c) in itertools.product(*(_between(axis, size) for axis, size in axes)):
            total += a * b * c * math.log(table[i][j][k])
        return math.exp(total)


def _between(axis: Sequence[float], size: float) -> list[tuple[int, float]]:
    """Return the axis positions around a size, and their interpolation weights."""
    size = min(max(size, axis[0]), axis[-1])
    high = max(1, bisect.bisect_left(axis, size))
    if len(axis) == 1:
        return [(0, 1.0)]
    low = high - 1
    share = math.log(size / axis[low]) / math.log(axis[high] / axis[low])
    return [(low, 1.0 - share), (high, share)]


class DtypeSpeeds(NamedTuple):
    """Speeds in one training dtype."""

    products: Grid
    attention_flops_per_s: dict[str, list[tuple[Positive, Positive]]]  # by "fused forward" ...: (length, FLOP/s)
    seconds_per_element: dict[str, Positive]  # of passes over memory, by kind; "copy" for kinds without a number


class CollectiveSpeed(NamedTuple):
    """The cost of one kind of collective: a latency, and a bandwidth for the bytes that a rank sends."""

    latency_s: Seconds
    bytes_per_s: Positive


@dataclass(frozen=True)
class MeasuredSpeeds:
    """Speeds of a machine, measured by `scripts.benchmarks.machine` in one launch."""

    path: str
    device: Name
    device_type: Annotated[str, Rule("cpu or cuda", lambda value: value in ("cpu", "cuda"))]
    world_size: PositiveCount
    threads: PositiveCount
    dtypes: dict[str, DtypeSpeeds]
    collectives: dict[str, CollectiveSpeed]
    overlap: Share
    block_s: Seconds
    step_s: Seconds

    def __post_init__(self) -> None:
        """Look up every number once, so that incomplete tables are rejected here.

        Raises:
            ValueError, KeyError, IndexError: if something is missing, or sizes do not ascend.
        """
        if not self.dtypes:
            raise ValueError("no dtypes")
        for dtype, speeds in self.dtypes.items():
            axes = speeds.products[:3]
            curves = [speeds.attention_flops_per_s[f"{kind} {way}"] for kind in ATTENTION_KINDS for way in DIRECTIONS]
            for sizes in (*axes, *([length for length, _ in curve] for curve in curves)):
                if not sizes or sizes != sorted(set(sizes)):
                    raise ValueError(f"{dtype}: sizes do not ascend")
            for kind, *corner in itertools.product(PRODUCT_KINDS, *axes):
                speeds.products.rate(Product(kind, *corner))
            speeds.seconds_per_element["copy"]

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
            UsageError: if the device type or dtype differs, or collectives are missing.
        """
        where = f"--machine_speeds={shown(self.path)}"
        if device_type != self.device_type:
            other = "--gpu=cpu" if self.device_type == "cpu" else "--device=cuda"
            raise UsageError(f"{where}: measured on {self.device_type}, and the plan is for {device_type}; add {other}")
        if dtype not in self.dtypes:
            has = ", ".join(self.dtypes)
            raise UsageError(f"{where}: measured in {has}, not in {dtype}; measure again with --dtypes={dtype}")
        if world_size > 1 and not self.collectives:
            again = f"torchrun --nproc-per-node={world_size} -m scripts.benchmarks.machine"
            raise UsageError(
                f"{where}: one rank has measured no collectives, and the plan has {world_size}; use {again}"
            )

    def item_s(self, item: Item, dtype: str) -> float:
        """Return the time of one item."""
        speeds = self.dtypes[dtype]
        if isinstance(item, Pass):
            copied_bytes, known = 8 if dtype == "fp32" else 4, speeds.seconds_per_element
            return item.elements * known.get(item.kind, known["copy"] * item.bytes_per_element / copied_bytes)
        if isinstance(item, Attention):
            kind = "math" if item.backend == "math" else "fused"
            points = speeds.attention_flops_per_s[f"{kind} {DIRECTIONS[item.backward]}"]
            places = _between([length for length, _ in points], item.length)
            return item.flops / math.exp(sum(share * math.log(points[place][1]) for place, share in places))
        return item.flops / speeds.products.rate(item)

    def collective_s(self, kind: str, collectives: int, wire_bytes: float) -> float:
        """Return the time of collectives that send these bytes in all."""
        speed = self.collectives.get(kind) or next(iter(self.collectives.values()))
        return collectives * speed.latency_s + wire_bytes / speed.bytes_per_s

    def assumptions(self, world_size: int) -> list[str]:
        """Say what a prediction assumes, a line each."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        lines = [f"{self.source}, {ranks} of {threads}; as many share a machine in the run"]
        if world_size > 1:
            lines.append(f"{self.overlap:.0%} of a collective overlaps with computation, as measured")
        return lines


Speeds = DataSheet | MeasuredSpeeds

# -- the file ----------------------------------------------------------------------------------------------------------


def read_speeds(path: Path) -> MeasuredSpeeds:
    """Read a file of `scripts.benchmarks.machine`.

    Raises:
        UsageError: if the file cannot be read or is not valid.
    """
    where = f"--machine_speeds={shown(str(path))}"
    fix = "write it with python -m scripts.benchmarks.machine --output=FILE"
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES:,} bytes")
        values = json.loads(text)
        if not isinstance(values, dict) or (values.pop("format", ""), values.pop("version", 0)) != (FORMAT, VERSION):
            raise ValueError(f"its format is not {FORMAT} of version {VERSION}")
        return cast(MeasuredSpeeds, decode(MeasuredSpeeds, {**values, "path": str(path)}))
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror or type(error).__name__}; {fix}") from None
    except (DamagedError, ValueError, KeyError, IndexError, RecursionError) as error:
        said = str(error).replace("\n", " ")[:120]
        problem = f"no {said}" if isinstance(error, KeyError) else said
        raise UsageError(f"{where}: not a file of machine speeds ({problem}); {fix}") from None
