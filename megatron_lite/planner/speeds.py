"""Kinds of work, and the speeds of a device and its links, from a data sheet or
`scripts.benchmarks.machine`."""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

from megatron_lite.checkpoint.decoding import PositiveCount, Rule, decode
from megatron_lite.config.values import shown
from megatron_lite.distributed.traffic import Total
from megatron_lite.errors import DamagedError, UsageError

FORMAT, VERSION = "megatron_lite_machine_speeds", 2
MAX_BYTES = 2**20
PRODUCT_KINDS = ("forward", "input gradient", "weight gradient")
EIGHT_BITS = (
    "8 bits"  # products of rounded factors, on 8-bit units; only data sheets have their speed
)
AXES = ("tokens", "inputs", "outputs")
ATTENTION_KINDS = ("fused forward", "fused backward", "math forward", "math backward")

Positive = Annotated[int | float, Rule("a positive number", lambda value: 1e-30 < value < 1e30)]
Share = Annotated[int | float, Rule("a share", lambda value: 0 <= value <= 1)]
Seconds = Annotated[int | float, Rule("a time", lambda value: 0 <= value < 1e30)]
Name = Annotated[str, Rule("a name", lambda value: 0 < len(value) <= 200 and value.isprintable())]


# -- work
# --------------------------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """One of a linear layer's three products, `times` times: x W^T, dy W or dy^T x."""

    kind: str  # "forward", "input gradient", "weight gradient" or EIGHT_BITS
    tokens: int
    inputs: int
    outputs: int
    times: float = 1

    @property
    def flops(self) -> float:
        """Total FLOPs."""
        return 2.0 * self.times * self.tokens * self.inputs * self.outputs


class Attention(NamedTuple):
    """Attention of one block and micro-batch, in one direction."""

    kind: str  # "fused forward", "fused backward", "math forward" or "math backward"
    heads: int  # in all samples
    length: int  # positions
    channels: int
    window: int  # at most `length`

    @property
    def flops(self) -> float:
        """FLOPs within causal mask and window; the backward pass has 5 products."""
        keys = self.window * (1 - self.window / (2 * self.length))
        return (
            (10.0 if self.kind.endswith("backward") else 4.0)
            * self.heads
            * self.length
            * self.channels
            * keys
        )


class Pass(NamedTuple):
    """Memory passes of one kind over tensors."""

    kind: str  # name of a torch operation, of a kernel, or of a part of the update
    num_bytes: float  # read and written


Item = Product | Attention | Pass


# -- speeds
# ------------------------------------------------------------------------------------------------------------


class Grid(NamedTuple):
    """FLOP/s of products on a grid of sizes, interpolated log-linearly and clamped at the
    border."""

    tokens: list[Positive]
    inputs: list[Positive]
    outputs: list[Positive]
    # by kind; indexed by the position on each axis
    flops_per_s: dict[str, list[list[list[Positive]]]]


def _interpolated(
    table: Sequence[Any], axes: Sequence[Sequence[float]], sizes: Sequence[float]
) -> float:
    """Return a table's value at the sizes, interpolated between the surrounding corners."""
    total = 0.0
    for corner in itertools.product(*map(_between, axes, sizes)):
        value: Any = functools.reduce(operator.getitem, (place for place, _ in corner), table)
        total += math.prod(share for _, share in corner) * math.log(value)
    return math.exp(total)


def _between(axis: Sequence[float], size: float) -> list[tuple[int, float]]:
    """Return the axis positions around a size, and their interpolation weights."""
    if len(axis) == 1:
        return [(0, 1.0)]
    size = min(max(size, axis[0]), axis[-1])
    high = max(1, bisect.bisect_left(axis, size))
    share = math.log(size / axis[high - 1]) / math.log(axis[high] / axis[high - 1])
    return [(high - 1, 1.0 - share), (high, share)]


class DtypeSpeeds(NamedTuple):
    """Speeds in one training dtype."""

    products: Grid
    # by "fused forward" ...: (length, FLOP/s)
    attention_flops_per_s: dict[str, list[tuple[Positive, Positive]]]
    # for passes over memory, by kind; "copy_" for kinds without a number
    seconds_per_byte: dict[str, Positive]


class CollectiveSpeed(NamedTuple):
    """The cost of one kind of collective: a latency, and a bandwidth for the bytes that a rank
    sends."""

    latency_s: Seconds
    bytes_per_s: Positive


@dataclass(frozen=True)
class Speeds:
    """The speeds of a device and its links, for a launch of `world_size` ranks."""

    path: str  # the file; "": a data sheet
    device: Name
    device_type: Annotated[str, Rule("cpu or cuda", lambda value: value in ("cpu", "cuda"))]
    world_size: PositiveCount
    threads: PositiveCount
    dtypes: dict[str, DtypeSpeeds]
    # by kind; without its speed that of the rest of its name (expert reduce: reduce), or the first
    collectives: dict[str, CollectiveSpeed]
    overlap: Share  # largest share of a collective that can overlap with computation
    block_s: Seconds  # time in which the host issues a block's two passes
    step_s: Seconds  # and everything else in a step
    assumptions: list[str]  # behind a prediction, one per line

    def __post_init__(self) -> None:
        """Look up every number once, so that incomplete tables are rejected here.

        Raises:
            ValueError, KeyError, IndexError: if something is missing, or sizes do not ascend.
        """
        if not self.dtypes:
            raise ValueError("no dtypes")
        for dtype, speeds in self.dtypes.items():
            axes = speeds.products[:3]
            curves = [speeds.attention_flops_per_s[kind] for kind in ATTENTION_KINDS]
            for sizes in (*axes, *([length for length, _ in curve] for curve in curves)):
                if not sizes or sizes != sorted(set(sizes)):
                    raise ValueError(f"{dtype}: sizes do not ascend")
            for kind, *corner in itertools.product(PRODUCT_KINDS, *axes):
                self.item_s(Product(kind, *corner), dtype)
            speeds.seconds_per_byte["copy_"]

    @property
    def waits_for_host(self) -> bool:
        """Whether host and computation overlap, as on a GPU; on a CPU the host's time adds up."""
        return self.device_type == "cuda"

    def item_s(self, item: Item, dtype: str) -> float:
        """Return the time of one item. A product takes the longer of its arithmetic and its memory
        traffic."""
        speeds = self.dtypes[dtype]
        copy_s = speeds.seconds_per_byte["copy_"]
        if isinstance(item, Pass):
            return item.num_bytes * speeds.seconds_per_byte.get(item.kind, copy_s)
        if isinstance(item, Attention):
            lengths, rates = zip(*speeds.attention_flops_per_s[item.kind], strict=True)
            return item.flops / _interpolated(rates, [lengths], [item.length])
        sizes = tokens, inputs, outputs = item.tokens, item.inputs, item.outputs
        itemsize = 4 if dtype == "fp32" else 2
        of_factors = 1 if item.kind == EIGHT_BITS else itemsize
        moved = of_factors * (tokens * inputs + inputs * outputs) + itemsize * tokens * outputs
        if item.kind == "weight gradient":  # fp32 totals
            moved += (8 - itemsize) * inputs * outputs
        rate = _interpolated(speeds.products.flops_per_s[item.kind], speeds.products[:3], sizes)
        return max(item.flops / rate, item.times * moved * copy_s)

    def collective_s(self, kind: str, collectives: int, wire_bytes: float) -> float:
        """Return the time of collectives that send this many bytes in total."""
        of_kind = self.collectives.get(kind) or self.collectives.get(kind.removeprefix("expert "))
        speed = of_kind or next(iter(self.collectives.values()))
        return collectives * speed.latency_s + wire_bytes / speed.bytes_per_s

    def traffic_s(self, traffic: Mapping[str, Total]) -> float:
        """Return the time of all collectives."""
        return sum(
            self.collective_s(kind, total.collectives, total.wire_bytes)
            for kind, total in traffic.items()
        )


# -- the file
# ----------------------------------------------------------------------------------------------------------


def read_speeds(path: Path) -> Speeds:
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
        if not isinstance(values, dict) or (values.pop("format", ""), values.pop("version", 0)) != (
            FORMAT,
            VERSION,
        ):
            raise ValueError(f"its format is not {FORMAT} of version {VERSION}")
        return cast(Speeds, decode(Speeds, {**values, "path": str(path), "assumptions": []}))
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror or type(error).__name__}; {fix}") from None
    except (DamagedError, ValueError, KeyError, IndexError, RecursionError) as error:
        said = str(error).replace("\n", " ")[:120]
        problem = f"no {said}" if isinstance(error, KeyError) else said
        raise UsageError(f"{where}: not a file of machine speeds ({problem}); {fix}") from None
