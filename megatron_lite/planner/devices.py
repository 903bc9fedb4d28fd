"""Data sheets of the devices and links that a dry run plans for; the memory of an 80 GB GPU."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from megatron_lite.config import DistributedConfig
from megatron_lite.config.dimensions import (
    DATA,
    DIMENSIONS,
    GROUPS,
    Dimension,
    RankGrid,
    ranks_per_layer,
)
from megatron_lite.config.structured_values import Interconnect, interconnect
from megatron_lite.config.values import counted, shown
from megatron_lite.errors import UsageError
from megatron_lite.monitor.metrics import known_peak_tflops
from megatron_lite.planner.command import GPUS_PER_NODE, layout_of_nodes
from megatron_lite.planner.speeds import (
    ATTENTION_KINDS,
    EIGHT_BITS,
    PRODUCT_KINDS,
    CollectiveSpeed,
    DtypeSpeeds,
    Grid,
    Speeds,
    read_speeds,
)

MIB, GIB = 2**20, 2**30

# Memory that torch reports for an 80 GB GPU; a dry run queries no device. 79.10 GiB is the minimum
# over many logs of A100 and H100 cards ("GPU 3 has a total capacity of 79.10 GiB",
# github.com/stas00/ml-engineering, debug/pytorch.md); others show up to 79.33 GiB. The driver
# reserves the rest of the 81,559 MiB (H100) or 81,920 MiB (A100) shown by nvidia-smi.
PLANNED_GPU_BYTES = int(79.1 * GIB)

DEFAULT_GPU = "h100"


class Shares(NamedTuple):
    """Shares of a device's peak that products and attention reach in a step, and their source."""

    products: float
    attention: float
    source: str


# These shares reproduce the throughput of Mistral-7B in Fast-LLM's tutorial: 4,234 tokens/s on each
# of 4 A100 (3,804 with the MLPs recomputed) and about 9,000 on each of 128 H100, whose clock and
# memory are slower relative to its tensor cores.
AMPERE, HOPPER = (Shares(*shares, "from published runs") for shares in ((0.74, 0.45), (0.5, 0.32)))
# Measured on one H200 at 700 W (docs/gpu_report.json): steps of Mistral-7B and Llama-3 layers take
# 0.98 to 1.00 of what these predict, with a window 1.10, because the flash kernels for windows are
# slower than cuDNN's.
ONE_H200 = Shares(0.67, 0.48, "measured on one H200")
ASSUMED = Shares(0.65, 0.4, "assumed, as no run on this device has been measured")


class Device(NamedTuple):
    """A kind of GPU, from the vendor's data sheet, or a CPU.

    memory_bytes: as torch reports, the minimum over several logs. fp32_tflops: products in fp32.
    memory_gb_s: memory bandwidth. link_gb_s: to its neighbours in a node, in one direction. tflops:
    dense products of 16-bit inputs (fp16 on V100) summed in fp32; TF32 reaches half.
    """

    memory_bytes: int
    fp32_tflops: float
    memory_gb_s: float
    link_gb_s: float
    shares: Shares = ASSUMED
    has_bf16: bool = True  # otherwise bf16 products are as slow as fp32 ones
    latency_s: float = 20e-6  # per collective
    overlap: float = 1.0  # largest share of a collective that can overlap with computation
    tflops: float = 0.0


# From the data sheets behind `known_peak_tflops`; numbers for sparse products are halved. Cards
# without NVLink have PCIe 4 or 5 (32 or 64 GB/s); RTX A6000 have NVLink only in pairs.
_SHEETS = {
    "h100": Device(PLANNED_GPU_BYTES, 66.9, 3350, 450, HOPPER),
    "h200": Device(int(139.7 * GIB), 66.9, 4800, 450, ONE_H200),
    "a100": Device(PLANNED_GPU_BYTES, 19.5, 2039, 300, AMPERE),
    "a100-40": Device(int(39.4 * GIB), 19.5, 1555, 300, AMPERE),
    "v100": Device(int(31.7 * GIB), 15.7, 900, 150, has_bf16=False),
    # NVIDIA HGX B200 data sheet: 36 PFLOP/s sparse, 600 TFLOP/s, 62 TB/s and 14.4 TB/s of NVLink
    # for eight
    "b200": Device(int(178.3 * GIB), 75, 7700, 900, HOPPER._replace(source=ASSUMED.source)),
    "l40s": Device(int(44.4 * GIB), 91.6, 864, 32),  # NVIDIA L40S data sheet
    "a6000": Device(int(47.5 * GIB), 38.7, 768, 32),  # NVIDIA GA102 whitepaper, RTX A6000
    # NVIDIA Ada GPU architecture whitepaper, appendix A
    "rtx4090": Device(int(23.5 * GIB), 82.6, 1008, 32),
    # NVIDIA RTX Blackwell whitepaper, appendix A
    "rtx5090": Device(int(31.3 * GIB), 104.8, 1792, 64),
    # AMD Instinct MI300X data sheet: seven links of 128 GB/s in both directions
    "mi300x": Device(int(191.6 * GIB), 163.4, 5300, 448),
}
GPUS = {name: gpu._replace(tflops=known_peak_tflops(name) or 0.0) for name, gpu in _SHEETS.items()}
# The network between nodes, per GPU and direction: one 400 Gbit/s adapter per GPU, or one 100
# Gbit/s adapter per node. A collective sends every byte once from node to node, through all of a
# node's adapters at once.
NODE_LINKS_GB_S = {"ib": 50.0, "ethernet": 12.5 / GPUS_PER_NODE}
# Shares of a data sheet's peaks reached in practice: memory passes 80 to 90 %, collectives over
# good links 80 %.
MEMORY_SHARE, LINK_SHARE = 0.8, 0.8
# Time in which the host issues a block's two passes; a faster GPU waits for it.
HOST_BLOCK_S = 1e-3
KINDS_IN_LAYERS = frozenset(kind for row in DIMENSIONS if row.in_layers for kind in row.kinds)


def planned_type(distributed: DistributedConfig) -> str:
    """Return the device type that a dry run plans for; `--device=auto` plans for GPUs."""
    return "cpu" if "cpu" in (distributed.device, distributed.gpu) else "cuda"


def planned_nodes(distributed: DistributedConfig, device_type: str, world_size: int) -> int:
    """Return the number of nodes of a plan; ranks on CPUs share one."""
    if device_type != "cuda":
        return 1
    return layout_of_nodes(world_size, ranks_per_layer(distributed))[0]


def gpu_of(distributed: DistributedConfig) -> Device:
    """Return the GPU that a dry run plans for."""
    return GPUS[distributed.gpu or DEFAULT_GPU]


def cpu_of(threads: int) -> Device:
    """Return an unknown CPU: roughly 60 GFLOP/s and 6 GB/s per thread, and gloo at 1 GB/s."""
    return Device(
        0, 0.06 * threads, 6 * threads, 1, latency_s=100e-6, overlap=0, tflops=0.06 * threads
    )


def planned_speeds(distributed: DistributedConfig, device_type: str, world_size: int) -> Speeds:
    """Return the measured speeds in --machine_speeds or, without it, a data sheet's.

    Raises:
        UsageError: if the file cannot be read, the device type or dtype differs, or collectives are
        missing.
    """
    if distributed.machine_speeds is None:
        return data_sheet(distributed, device_type, world_size)
    path, dtype = Path(distributed.machine_speeds), distributed.training_dtype
    speeds, where = read_speeds(path), f"--machine_speeds={shown(str(path))}"
    if device_type != speeds.device_type:
        other = "--gpu=cpu" if speeds.device_type == "cpu" else "--device=cuda"
        raise UsageError(
            f"{where}: measured on {speeds.device_type}, and the plan is for {device_type}; add {other}"
        )
    if dtype not in speeds.dtypes:
        has = ", ".join(speeds.dtypes)
        raise UsageError(
            f"{where}: measured in {has}, not in {dtype}; measure again with --dtypes={dtype}"
        )
    if world_size > 1 and not speeds.collectives:
        again = f"torchrun --nproc-per-node={world_size} -m scripts.benchmarks.machine"
        raise UsageError(
            f"{where}: one rank has measured no collectives, and the plan has {world_size}; use {again}"
        )
    ranks, threads = counted(speeds.world_size, "rank"), counted(speeds.threads, "thread")
    lines = [
        f"measured on {speeds.device} ({path}), {ranks} of {threads}; the run is assumed to have as many on a machine"
    ]
    if world_size > 1:
        lines.append(f"{speeds.overlap:.0%} of a collective overlaps with computation, as measured")
    return dataclasses.replace(speeds, assumptions=lines)


def data_sheet(distributed: DistributedConfig, device_type: str, world_size: int) -> Speeds:
    """Return the speeds of a device and of the slowest link in a ring of ranks: shares of a data
    sheet's peaks."""
    threads, is_gpu = max((os.cpu_count() or 1) // world_size, 1), device_type == "cuda"
    gpu = gpu_of(distributed) if is_gpu else cpu_of(threads)
    name = (
        distributed.gpu or DEFAULT_GPU
        if is_gpu
        else f"no CPU in particular, {counted(threads, 'thread')}"
    )
    unnamed = " (as no --gpu is named)" if is_gpu and distributed.gpu is None else ""
    dtype, grid = distributed.training_dtype, RankGrid(world_size, distributed)
    chosen = interconnect(distributed.interconnect)
    is_slow = dtype == "fp32" or (dtype == "bf16" and not gpu.has_bf16)
    tflops, (products, attention, source) = gpu.fp32_tflops if is_slow else gpu.tflops, gpu.shares
    products_in = dtype
    if distributed.tf32 and gpu.has_bf16:  # like all GPUs with TF32
        products_in, tflops = "tf32", gpu.tflops / 2
    lines = [
        f"data sheet of {name}{unnamed}: {products_in} {tflops:,.4g} TFLOP/s, memory {gpu.memory_gb_s:,.0f} GB/s",
        f"products reach {products:.0%} of the peak, attention {attention:.0%} ({source}); passes over memory "
        f"{MEMORY_SHARE:.0%}",
    ]
    link, link_name = gpu.link_gb_s, "gloo"
    if is_gpu:
        rings = grid.size("layers") // grid.size(DATA)
        link, link_name = link_gb_s(chosen, gpu, grid.span("layers"), rings)
    if world_size > 1:
        hidden = (
            "they overlap with computation where there is a second buffer"
            if gpu.overlap
            else "none overlap"
        )
        lines.append(
            f"{link_name} {link:,.4g} GB/s in a ring of ranks, of which collectives reach {LINK_SHARE:.0%}; "
            f"{gpu.latency_s * 1e6:,.0f} us each; {hidden}"
        )
    links = {"all": link}  # GB/s by kind of collective
    if is_gpu:
        per_node = world_size // planned_nodes(distributed, device_type, world_size)
        speed = functools.partial(_own_link_gb_s, chosen, gpu, grid, per_node)
        along = {row.name: speed(row, GROUPS[row.name]) for row in DIMENSIONS}
        for row in sorted(DIMENSIONS, key=attrgetter("sends")):
            links |= dict.fromkeys(row.own_kinds, speed(row, (row.name,)))
            if (getattr(distributed, row.option, 1) or 0) > row.unset:
                links |= dict.fromkeys(row.kinds, along[row.name])
                lines += [row.remark.format_map(along)] * bool(row.remark)
    collectives = {
        kind: CollectiveSpeed(gpu.latency_s, gb_s * 1e9 * LINK_SHARE)
        for kind, gb_s in links.items()
    }
    rates = dict.fromkeys(PRODUCT_KINDS, tflops) | {EIGHT_BITS: 2 * gpu.tflops}
    speeds = DtypeSpeeds(
        Grid([1], [1], [1], {kind: [[[products * rate * 1e12]]] for kind, rate in rates.items()}),
        dict.fromkeys(ATTENTION_KINDS, [(1, attention * tflops * 1e12)]),
        {"copy_": 1 / (gpu.memory_gb_s * 1e9 * MEMORY_SHARE)},
    )
    return Speeds(
        "",
        name,
        device_type,
        1,
        1,
        {dtype: speeds},
        collectives,
        gpu.overlap,
        HOST_BLOCK_S,
        0.0,
        lines,
    )


def _own_link_gb_s(
    chosen: Interconnect,
    gpu: Device,
    grid: RankGrid,
    per_node: int,
    row: Dimension,
    dimensions: Sequence[str],
) -> float:
    """Return the speed along a dimension, of the slowest link. dimensions: of a ring, with nearer
    ones in it."""
    if row.is_near and per_node % grid.span(row.name) == 0:
        return gpu.link_gb_s if chosen.kind != "nvlink" or chosen.gb_s is None else chosen.gb_s
    nearer, size = DIMENSIONS[DIMENSIONS.index(row) + 1 :], grid.sizes[row.name]
    others = [grid.sizes[other.name] for other in nearer if other.name not in dimensions]
    # A GPU sends its messages alone; the rings of nearer ranks share the links of a node.
    alone = row.sends or row.exchanges
    rings = GPUS_PER_NODE if alone else math.prod(others)
    gb_s = link_gb_s(chosen, gpu, grid.span((*row.sums, row.name)[0]), rings)[0]
    if row.exchanges and size > 1:  # the others of a node take no link between nodes
        near = max(per_node // grid.strides[row.name], 1)
        gb_s = min(gb_s * (size - 1) / max(size - near, 1), gpu.link_gb_s)
    return gb_s


def link_gb_s(
    chosen: Interconnect, gpu: Device, world_size: int, rings: int = 1
) -> tuple[float, str]:
    """Return the speed of a ring's slowest link, and its name.

    world_size: neighbouring ranks that the ring is spread over. rings: those in a node, which share
    its links.
    """
    if chosen.kind == "nvlink" or (chosen.kind == "auto" and world_size <= GPUS_PER_NODE):
        name = "links within a node" if chosen.kind == "auto" else "--interconnect=nvlink"
        return gpu.link_gb_s if chosen.gb_s is None else chosen.gb_s, name
    kind = "ib" if chosen.kind == "auto" else chosen.kind
    adapter = NODE_LINKS_GB_S[kind] if chosen.gb_s is None else chosen.gb_s
    per_node = max(GPUS_PER_NODE // rings, 1) if world_size > GPUS_PER_NODE else 1
    name = f"links between nodes ({kind})" if chosen.kind == "auto" else f"--interconnect={kind}"
    adapters = f", {per_node} adapters of {adapter:,.4g} GB/s:" if per_node > 1 else ""
    return min(adapter * per_node, gpu.link_gb_s), name + adapters
