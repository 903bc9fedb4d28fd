"""Options of devices, partitioning and planning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from megatron_lite.config.dimensions import RankGrid, ranks_per_sample
from megatron_lite.config.option import (
    Area,
    Auto,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    idle_unless,
    low_precision_option,
    option,
    optional,
)


class DtypeNames(NamedTuple):
    """A dtype's names in other programs, and its size."""

    torch: str  # also in manifest.json and config.json
    safetensors: str
    itemsize: int  # bytes


DTYPES: Mapping[str, DtypeNames] = MappingProxyType(
    {
        "fp32": DtypeNames("float32", "F32", 4),
        "bf16": DtypeNames("bfloat16", "BF16", 2),
        "fp16": DtypeNames("float16", "F16", 2),
    }
)
DTYPE_ALIASES = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
}
PLANNED_DEVICES = (
    *(
        "h100",
        "h200",
        "b200",
        "a100",
        "a100-40",
        "v100",
        "l40s",
        "a6000",
        "rtx4090",
        "rtx5090",
        "mi300x",
        "cpu",
    ),
)

# mi300x has units for other formats
WITHOUT_FP8_UNITS = ("a100", "a100-40", "v100", "a6000", "mi300x")

# Options that have no effect unless another one has this value.
plan_option = idle_unless("dry_run")
gpu_option = idle_unless("device!=cpu")
throttled_option = idle_unless("throttle_cpu and device!=cpu")
tensor_parallel_option = idle_unless("tensor_parallel!=1")
pipeline_option = idle_unless("pipeline_parallel!=1")
PIPELINE_SCHEDULES = ("breadth_first", "one_f_one_b", "interleaved", "zero_bubble_v")
# there and back, with placement v; the others have as many loops as fit
ONE_LOOP = ("one_f_one_b", "zero_bubble_v")


@dataclass
class MultiStageConfig(Area):
    """ZeRO and stages"""

    zero_stage: int | Auto = optional(
        "1: shard optimizer state; 2: also gradients; 3: also weights; auto: the lowest that fits the device",
        "1",
        minimum=1,
        maximum=3,
        basic=True,
    )
    layers_per_stage: float | Auto = option(
        1.0,
        "transformer blocks per stage, the unit of gather and reduce; auto: enough that transfers outweigh latency",
        minimum=1.0,
        why="a layer cannot be split between stages; to save memory, write 1 and set fewer buffers",
    )
    num_weight_buffers: PositiveInt | None = optional(
        "full weight buffers; 1 saves memory, 2 overlap gathers",
        "one per stage; 2 for zero_stage 3",
    )
    num_grad_buffers: PositiveInt | None = optional(
        "full gradient buffers; 1 saves memory, 2 overlap reductions",
        "one per stage; 2 for zero_stage 2 and 3",
    )
    full_precision_gradients: bool = low_precision_option(
        True,
        "accumulate and reduce gradients in fp32",
        aliases="accumulate_allreduce_grads_in_fp32",
    )
    store_frozen_weights_in_optimization_precision: bool = option(
        True, "keep shards of frozen weights in fp32; 0: in the training dtype"
    )
    split_master_weights: bool = option(
        False,
        "bf16 training: split each fp32 master weight into the bf16 weight and a 16-bit remainder (saves 2 bytes per "
        "weight of a shard)",
        needs=(Rule("training_dtype=bf16", "only bf16 training can split masters"),),
    )
    pipeline_schedule: str = pipeline_option(
        "auto",
        "order of passes. breadth_first: all micro-batches through a stage, then the next (one gather and one "
        "reduction a stage, most activations); one_f_one_b and interleaved: forward and backward passes in turn, with "
        "one chunk of the model per rank or several; zero_bubble_v: gradients of weights fill the gaps, two chunks "
        "per rank; auto: breadth_first for ZeRO-2 and 3, else zero_bubble_v if there are enough stages for two chunks",
        choices=("auto", *PIPELINE_SCHEDULES),
    )
    pipeline_placement: str = pipeline_option(
        "auto",
        "loop: from the last pipeline rank on to the first again; v: there and back, with embedding and head on the "
        "first rank; auto: v for zero_bubble_v, and with breadth_first for tied weights if there are enough stages, else loop",
        choices=("auto", "loop", "v"),
    )
    stages_per_pipeline_stage: int = option(
        1,
        "stages that follow each other on a pipeline rank",
        minimum=1,
        maximum=1,
        why="write more --layers_per_stage instead",
    )
    throttle_cpu: bool = gpu_option(
        True, "several GPUs: keep the host from queueing schedule steps far ahead"
    )
    throttle_cpu_rate: PositiveInt = throttled_option(
        1, "record an event, and wait for one, every N schedule steps"
    )
    throttle_cpu_delay: NonNegativeInt = throttled_option(
        3, "wait for the event recorded N recordings ago"
    )


@dataclass
class DistributedConfig(Area):
    """Distributed"""

    device: str = option("auto", "device to run on", choices=("auto", "cuda", "cpu"), basic=True)
    training_dtype: str = option(
        "fp32",
        "dtype of weights and activations",
        choices=tuple(DTYPES),
        value_aliases=DTYPE_ALIASES,
        basic=True,
    )
    tf32: bool = option(
        False,
        "GPU: round the factors of fp32 products to TF32, 10 bits (faster)",
        needs=(Rule("training_dtype=fp32", "products of 16-bit weights have no fp32 factors"),),
        excludes=(
            Rule("device=cpu", "a CPU has no TF32"),
            Rule("gpu=cpu", "a CPU has no TF32"),
            Rule("machine_speeds", "its fp32 products were measured without TF32"),
        ),
    )
    seed: int = option(
        1234, "seed for weights, data order and dropout", minimum=0, maximum=2**63 - 1, basic=True
    )
    tensor_parallel: PositiveInt = option(
        1,
        "tensor-parallel ranks, which split heads, channels, vocabulary",
        basic=True,
        aliases="tensor_model_parallel_size",
    )
    pipeline_parallel: PositiveInt = option(
        1,
        "pipeline-parallel ranks, which have different layers",
        basic=True,
        aliases="pipeline_model_parallel_size",
    )
    expert_parallel: PositiveInt = option(
        1,
        "ranks of a data-parallel group that share out the experts, and exchange tokens",
        needs=(
            Rule("num_experts!=1", "a dense model has no experts to share out", fix="leave it out"),
        ),
        excludes=(
            Rule(
                "symmetric_memory", "its buffers belong to one group, and experts to a smaller one"
            ),
        ),
        aliases="expert_model_parallel_size",
    )
    data_parallel_shard: NonNegativeInt | None = optional(
        "hybrid shards: number of neighbouring data-parallel ranks that share weights and gradients; "
        "each further group of that size is a replica; 0: all",
        "with zero_stage 3 on several nodes, the ranks of a node if that divides all ranks; else 0",
        aliases="data_parallel_shard_degree",
    )
    replica_dcn_axis_size: PositiveInt = option(
        1,
        "number of replicas of hybrid shards; sets --data_parallel_shard to the data-parallel ranks of one replica",
        aliases="data_parallel_replicate_degree num_distributed_optimizer_instances",
    )
    replica_ici_axis_size: PositiveInt = option(
        1, "multiplies the number of replicas (in Levanter, the replicas within a slice)"
    )
    pipeline_first: bool = pipeline_option(
        False, "neighbouring ranks belong to the same pipeline; 0: to the same data-parallel group"
    )
    sequence_tensor_parallel: bool = tensor_parallel_option(
        False,
        "sequence parallelism: also shard norms, dropout and residuals along the sequence",
        aliases="sequence_parallel",
    )
    parallel_embeddings: bool = tensor_parallel_option(
        True,
        "split the vocabulary of embedding and head over the tensor-parallel ranks; 0: replicate both",
    )
    overlap_tensor_reduce: bool = tensor_parallel_option(
        False,
        "compute products that are summed over the tensor-parallel ranks in two halves of the tokens: the first half's "
        "sums overlap with the second product",
        excludes=(
            Rule(
                "fp8=tensorwise|rowwise|delayed or int8",
                "rounded factors have the scales of all tokens",
            ),
        ),
        aliases="tp_comm_overlap",
    )
    deterministic: bool = option(
        False, "use only deterministic GPU algorithms (slower)", aliases="deterministic_mode"
    )
    symmetric_memory: bool = gpu_option(
        False,
        "GPUs: gather by copy engines (zero-CTA collectives) from NCCL's symmetric memory (off until measured)",
        excludes=(Rule("deterministic", "NCCL then sums in an order that nothing pins"),),
    )
    check_replicas_interval: PositiveInt | None = optional(
        "iterations between checks that ranks agree on replicated state: weights in use, counters, schedule. A "
        "difference ends the run and names the ranks. Costs a pass over the weights, and gathers in ZeRO-3",
        "no checks",
    )
    distributed_timeout: float = option(
        60.0,
        "seconds before giving up a collective in a step, or a machine that is silent",
        above=0.0,
        maximum=1e6,
    )
    startup_timeout: float = option(
        3600.0,
        "seconds before giving up any other collective (start-up, data, saves) and, on a GPU, the first step, which "
        "compiles kernels",
        above=0.0,
        maximum=1e6,
    )
    ignore_memory_check: bool = idle_unless("device!=cuda")(
        False, "CPU: start even if the run is predicted to need more memory than is free"
    )
    preflight: str = option(
        "0",
        "before training, check links, clocks, space, versions and products on all ranks; end and name what is odd. "
        "only: end in any case",
        choices=("0", "1", "only"),
    )
    dry_run: bool = option(
        False, "print memory, traffic, predicted speed and a command that fits", basic=True
    )
    world_size: int | Auto | None = optional(
        "number of ranks to plan for in a dry run; auto: the fewest GPUs that fit",
        "as many as torchrun starts",
        minimum=1,
        maximum=2**24,
        needs=(
            Rule(
                "dry_run",
                "a run takes the number of ranks from torchrun (nproc-per-node and nnodes)",
            ),
        ),
    )
    gpu: str | None = plan_option(
        None,
        "device to plan for",
        choices=PLANNED_DEVICES,
        unset="a GPU of 80 GB: h100",
        excludes=(
            Rule("device=cpu", "--device=cpu plans for a CPU", when="gpu!=cpu"),
            Rule("device=cuda", "--device=cuda plans for a GPU", when="gpu=cpu"),
        ),
    )
    device_memory_gib: PositiveFloat | None = plan_option(
        None, "memory of the device to plan for (GiB)", unset="that of --gpu"
    )
    interconnect: str = plan_option(
        "auto",
        "slowest link between ranks: nvlink, ib or ethernet, optionally with GB/s per GPU and direction, as in "
        "ethernet:12.5; auto: nvlink within 8 GPUs, else ib at 50 GB/s",
    )
    machine_speeds: str | None = plan_option(
        None,
        "measured speeds to predict with, from python -m scripts.benchmarks.machine --output=FILE",
        unset="a data sheet",
    )
    write_sbatch: str | None = plan_option(
        None,
        "write a Slurm job with the recommended command to this file",
        unset="none",
        needs=(
            Rule(
                "experiment_dir",
                "a job that is requeued starts over without a folder to resume from",
            ),
            Rule("data_path or dataset_source=random", "the job has no data to train on"),
        ),
    )


def number_of_stages(num_layers: int, layers_per_stage: float) -> int:
    """Return the number of stages: the embedding, the groups of blocks, the head.

    Group n, counted from 1, ends at block int(n * layers_per_stage), or at the last block.
    """
    # may be off by one, as products round differently
    groups = math.ceil(num_layers / layers_per_stage)
    while int(groups * layers_per_stage) < num_layers:
        groups += 1
    while int((groups - 1) * layers_per_stage) >= num_layers:
        groups -= 1
    return groups + 2


def shard_of_node(options: DistributedConfig, world_size: int, nodes: int) -> int:
    """Return the data-parallel ranks of a node, of nodes with equally many, if they are side by
    side; else 0 (all)."""
    ranks = world_size // ranks_per_sample(options)
    size, rest = divmod(world_size, nodes * RankGrid(world_size, options).strides["expert"])
    return size if rest == 0 and 1 < size < ranks and ranks % size == 0 else 0


def number_of_chunks(ranks: int, blocks: int, schedule: str, placement: str) -> int:
    """Return a pipeline's number of chunks (see `zero/pipeline.py`); 0 if it has too few stages of
    blocks."""
    if ranks == 1:
        return 1
    unit = ranks * (2 if placement == "v" else 1)
    return unit * min(blocks // unit, 1) if schedule in ONE_LOOP else blocks // unit * unit
