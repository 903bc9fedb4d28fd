"""Data sheets of the devices and links that a dry run plans for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from megatron_lite.config import DistributedConfig
from megatron_lite.config.structured_values import Interconnect, interconnect
from megatron_lite.planner.runtime import GIB, PLANNED_GPU_BYTES
from megatron_lite.planner.speeds import DataSheet, Speeds, read_speeds

GPUS_PER_NODE = 8
DEFAULT_GPU = "h100"


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, from the vendor's data sheet.

    memory_bytes: as torch reports. tflops: dense products of 16-bit inputs (fp16 on V100). fp32_tflops: products in
    fp32 without TF32, which this program does not use. memory_gb_s: memory bandwidth. link_gb_s: to its neighbours in a
    node, in one direction. shares: shares of the peak that products and attention reach in a step.
    """

    memory_bytes: int
    tflops: float
    fp32_tflops: float
    memory_gb_s: float
    link_gb_s: float
    shares: tuple[float, float] = (0.65, 0.4)
    has_bf16: bool = True  # otherwise bf16 products are as slow as fp32 ones


# These shares reproduce the throughput of Mistral-7B in Fast-LLM's tutorial: 4,234 tokens/s on each of 4 A100 (3,804
# with the MLPs recomputed) and about 9,000 on each of 128 H100, whose clock and memory keep up less with its tensor
# cores.
AMPERE, HOPPER = (0.74, 0.45), (0.5, 0.32)


GPUS = {
    "h100": Gpu(PLANNED_GPU_BYTES, 989.4, 66.9, 3350, 450, HOPPER),
    "h200": Gpu(int(139.7 * GIB), 989.4, 66.9, 4800, 450, HOPPER),
    "a100": Gpu(PLANNED_GPU_BYTES, 312, 19.5, 2039, 300, AMPERE),
    "a100-40": Gpu(int(39.4 * GIB), 312, 19.5, 1555, 300, AMPERE),
    "l40s": Gpu(int(44.4 * GIB), 362, 91.6, 864, 32),  # no NVLink: PCIe 4
    "v100": Gpu(int(31.7 * GIB), 125, 15.7, 900, 150, has_bf16=False),
    "b200": Gpu(int(178.3 * GIB), 2250, 75, 7700, 900, HOPPER),
}
# The network between nodes, per GPU and direction: one 400 Gbit/s adapter per GPU, or one 100 Gbit/s adapter per node.
# A collective sends every byte once from node to node, through all adapters of a node at the same time.
NODE_LINKS_GB_S = {"ib": 50.0, "ethernet": 12.5 / GPUS_PER_NODE}
# Per thread of an unknown CPU.
CPU_FLOPS_PER_S, CPU_MEMORY_BYTES_PER_S, GLOO_BYTES_PER_S = 60e9, 6e9, 1e9


def planned_type(distributed: DistributedConfig) -> str:
    """Return the device type that a dry run plans for; `--device=auto` plans for GPUs."""
    return "cpu" if "cpu" in (distributed.device, distributed.gpu) else "cuda"


def gpu_of(distributed: DistributedConfig) -> Gpu:
    """Return the GPU that a dry run plans for."""
    return GPUS[distributed.gpu or DEFAULT_GPU]


def planned_speeds(distributed: DistributedConfig, device_type: str, world_size: int) -> Speeds:
    """Return the speeds in --machine_speeds or, without it, of a data sheet.

    Raises:
        UsageError: if the file of --machine_speeds cannot be read or does not match the plan.
    """
    if distributed.machine_speeds is not None:
        measured = read_speeds(Path(distributed.machine_speeds))
        measured.check(device_type, distributed.training_dtype, world_size)
        return measured
    if device_type == "cpu":
        return cpu_sheet(distributed, max((os.cpu_count() or 1) // world_size, 1))
    return gpu_sheet(distributed, world_size)


def gpu_sheet(distributed: DistributedConfig, world_size: int) -> DataSheet:
    """Return the speeds of a GPU and of the slowest link of a ring of ranks."""
    gpu = gpu_of(distributed)
    chosen, tensor = interconnect(distributed.interconnect), distributed.tensor_parallel
    link, link_name = link_gb_s(chosen, gpu, world_size, tensor)
    near = gpu.link_gb_s if chosen.kind != "nvlink" or chosen.gb_s is None else chosen.gb_s
    tensor_link = 0.0 if tensor == 1 else near if tensor <= GPUS_PER_NODE else link_gb_s(chosen, gpu, tensor)[0]
    dtype = distributed.training_dtype
    is_slow = dtype == "fp32" or (dtype == "bf16" and not gpu.has_bf16)
    return DataSheet(
        name=distributed.gpu or DEFAULT_GPU,
        product_flops_per_s={dtype: (gpu.fp32_tflops if is_slow else gpu.tflops) * 1e12},
        memory_bytes_per_s=gpu.memory_gb_s * 1e9,
        link_bytes_per_s=link * 1e9,
        link_name=link_name,
        tensor_bytes_per_s=tensor_link * 1e9,
        product_share=gpu.shares[0],
        attention_share=gpu.shares[1],
    )


def cpu_sheet(distributed: DistributedConfig, threads: int) -> DataSheet:
    """Return rough speeds of one CPU rank."""
    return DataSheet(
        name=f"no CPU in particular, {threads} thread{'s' * (threads > 1)}",
        product_flops_per_s={distributed.training_dtype: CPU_FLOPS_PER_S * threads},
        memory_bytes_per_s=CPU_MEMORY_BYTES_PER_S * threads,
        link_bytes_per_s=GLOO_BYTES_PER_S,
        link_name="gloo",
        latency_s=100e-6,
        overlap=0.0,
        waits_for_host=False,
    )


def link_gb_s(chosen: Interconnect, gpu: Gpu, world_size: int, tensor_parallel: int = 1) -> tuple[float, str]:
    """Return the speed of a ring's slowest link, and its name.

    The data-parallel rings of all tensor-parallel ranks in a node share its links.
    """
    if chosen.kind == "nvlink" or (chosen.kind == "auto" and world_size <= GPUS_PER_NODE):
        name = "links within a node" if chosen.kind == "auto" else "--interconnect=nvlink"
        return gpu.link_gb_s if chosen.gb_s is None else chosen.gb_s, name
    kind = "ib" if chosen.kind == "auto" else chosen.kind
    adapter = NODE_LINKS_GB_S[kind] if chosen.gb_s is None else chosen.gb_s
    per_node = max(GPUS_PER_NODE // tensor_parallel, 1) if world_size > GPUS_PER_NODE else 1
    name = f"links between nodes ({kind})" if chosen.kind == "auto" else f"--interconnect={kind}"
    adapters = f", {per_node} adapters of {adapter:,.4g} GB/s:" if per_node > 1 else ""
    return min(adapter * per_node, gpu.link_gb_s), name + adapters
