"""Options of devices, partitioning, logs and files of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from megatron_lite.config.option import (
    SAVED,
    Area,
    Auto,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    debug_level,
    idle_unless,
    low_precision_option,
    option,
    optional,
)
from megatron_lite.config.tracking import WANDB


class DtypeNames(NamedTuple):
    """Names that other programs use for the dtypes of weights."""

    torch: str  # also in manifest.json and config.json
    safetensors: str


DTYPES: Mapping[str, DtypeNames] = MappingProxyType(
    {"fp32": DtypeNames("float32", "F32"), "bf16": DtypeNames("bfloat16", "BF16"), "fp16": DtypeNames("float16", "F16")}
)
DTYPE_ALIASES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


PLANNED_DEVICES = ("h100", "h200", "a100", "a100-40", "l40s", "v100", "b200", "cpu")
for_plans = idle_unless("dry_run")


@dataclass
class MultiStageConfig(Area):
    """ZeRO and stages"""

    zero_stage: int | Auto | None = optional(
        "1: shard optimizer state; 2: also gradients; 3: also weights; auto: the lowest that fits the device",
        "1",
        minimum=1,
        maximum=3,
        basic=True,
    )
    layers_per_stage: float | Auto = option(
        1.0,
        "transformer blocks per stage, the unit of gather and reduce; auto: enough that transfer time outweighs "
        "latency",
        minimum=1.0,
        why="a layer cannot be split between stages; to save memory, write 1 and set fewer buffers",
    )
    num_weight_buffers: PositiveInt | None = optional(
        "full weight buffers; 1 saves memory, 2 overlap gathers", "one per stage; 2 for zero_stage 3"
    )
    num_grad_buffers: PositiveInt | None = optional(
        "full gradient buffers; 1 saves memory, 2 overlap reductions", "one per stage; 2 for zero_stage 2 and 3"
    )
    full_precision_gradients: bool = low_precision_option(
        True, "accumulate and reduce gradients in fp32", aliases="accumulate_allreduce_grads_in_fp32"
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
    stages_per_pipeline_stage: int = option(
        1, "stages per pipeline rank", minimum=1, maximum=1, why="there is no pipeline parallelism yet; leave it out"
    )
    pipeline_delay: float = option(0.0, "steps for data to go around the pipeline; unused, as there is no pipeline")
    throttle_cpu: bool = option(
        True, "GPU: keep the host from queueing schedule steps far ahead of the device", idle_unless="device!=cpu"
    )
    throttle_cpu_rate: PositiveInt = option(
        1, "record an event, and wait for one, every N schedule steps", idle_unless="throttle_cpu and device!=cpu"
    )
    throttle_cpu_delay: NonNegativeInt = option(
        3, "wait for the event recorded N recordings ago", idle_unless="throttle_cpu and device!=cpu"
    )


@dataclass
class DistributedConfig(Area):
    """Distributed"""

    device: str = option("auto", "device to run on", choices=("auto", "cuda", "cpu"), basic=True)
    training_dtype: str = option(
        "fp32", "dtype of weights and activations", choices=tuple(DTYPES), value_aliases=DTYPE_ALIASES, basic=True
    )
    seed: int = option(1234, "seed for weights, data order and dropout", minimum=0, maximum=2**63 - 1, basic=True)
    tensor_parallel: PositiveInt = option(
        1,
        "tensor-parallel ranks, which split heads, channels, vocabulary",
        basic=True,
        aliases="tensor_model_parallel_size",
    )
    sequence_tensor_parallel: bool = option(
        False,
        "sequence parallelism: also shard norms, dropout and residuals along the sequence",
        aliases="sequence_parallel",
        idle_unless="tensor_parallel!=1",
    )
    parallel_embeddings: bool = option(
        True,
        "split the vocabulary of embedding and head over the tensor-parallel ranks; 0: replicate both",
        idle_unless="tensor_parallel!=1",
    )
    deterministic: bool = option(False, "use only deterministic GPU algorithms (slower)", aliases="deterministic_mode")
    check_replicas_interval: PositiveInt | None = optional(
        "iterations between checks that ranks agree on replicated state: weights in use, counters, schedule. A "
        "difference ends the run and names the ranks. Costs a pass over the weights, in ZeRO-3 also gathers",
        "no checks",
    )
    distributed_timeout: float = option(60.0, "seconds before giving up a collective in a step", above=0.0, maximum=1e6)
    startup_timeout: float = option(
        3600.0, "seconds before giving up any other collective (start-up, data, saves)", above=0.0, maximum=1e6
    )
    dry_run: bool = option(False, "print memory, traffic, predicted speed and a command that fits", basic=True)
    world_size: int | Auto | None = optional(
        "number of ranks to plan for in a dry run; auto: the fewest GPUs that fit",
        "as many as torchrun starts",
        minimum=1,
        maximum=2**24,
        needs=(Rule("dry_run", "a run takes the number of ranks from torchrun (nproc-per-node and nnodes)"),),
    )
    gpu: str | None = for_plans(
        None,
        "device to plan for",
        choices=PLANNED_DEVICES,
        unset="a GPU of 80 GB: h100",
        excludes=(
            Rule("device=cpu", "--device=cpu plans for a CPU", when="gpu!=cpu"),
            Rule("device=cuda", "--device=cuda plans for a GPU", when="gpu=cpu"),
        ),
    )
    device_memory_gib: PositiveFloat | None = for_plans(
        None, "memory of the device to plan for (GiB)", unset="that of --gpu"
    )
    interconnect: str = for_plans(
        "auto",
        "slowest link between ranks: nvlink, ib, ethernet, or with a speed per GPU and direction as in ethernet:12.5 "
        "(GB/s); auto: nvlink within 8 GPUs, else ib of 50 GB/s",
    )
    machine_speeds: str | None = for_plans(
        None,
        "measured speeds to predict with, from python -m scripts.benchmarks.machine --output=FILE",
        unset="a data sheet",
    )
    write_sbatch: str | None = for_plans(
        None, "write a Slurm job of the recommended command to this file", unset="none"
    )


@dataclass
class RunConfig(Area):
    """Run and monitoring"""

    experiment_dir: str | None = optional("folder for all files of the run", "nothing is written", basic=True)
    experiment_name: str | None = idle_unless(WANDB)(
        None, "name of the run in Weights & Biases", unset="name of experiment_dir", aliases="wandb_exp_name"
    )
    report: bool = idle_unless("experiment_dir")(
        True, "write report.html, a page about the run, into experiment_dir at the end of each start"
    )
    log_interval: PositiveInt = option(100, "iterations between log lines", basic=True)
    log_offset: NonNegativeInt = option(1, "first logged iteration (0: only multiples of log_interval)")
    log_timestamps: bool = option(False, "prefix log lines with the time")
    show_all_options: bool = option(
        False, "print all options at the start, not only those that differ from their defaults"
    )
    enable_all_loggers: bool = option(False, "print the log of every rank to the console")
    log_communication: bool = option(
        False, "log the bytes that each step communicates, by kind, and the time they take"
    )
    debug_layer_outputs: int = debug_level("the output of each layer", training=True)
    debug_layer_gradients: int = debug_level("the gradient of each layer's input", training=True)
    debug_param_init: int = debug_level("each parameter after initialization")
    debug_param_gradients: int = debug_level("each gradient shard after reduction", training=True)
    debug_all_param_gradients: int = debug_level("each parameter's gradient after reduction", training=True)
    debug_param_update: int = debug_level("each parameter after the update", training=True)
    debug_global_tensors: bool = option(True, "gather tensors from all ranks before logging them (slow)")
    debug_activation_memory: bool = option(False, "log the memory in use after each layer")
    debug_tensor_parallel: bool = option(
        False,
        "check that tensor-parallel ranks agree on replicated weights, gradients and layer outputs (slow)",
        idle_unless="tensor_parallel!=1",
    )
    save_tensor_logs: bool = option(False, "save logged tensors in runs/<k>/artifacts of experiment_dir", needs=SAVED)
    show_tensor_logs: bool = option(True, "print logged tensors")
    tensor_logs_show_elements: NonNegativeInt = option(8, "sampled elements to print per tensor")
    peak_tflops: PositiveFloat | None = optional("dense peak TFLOP/s of one device, for mfu", "known for common GPUs")


def number_of_stages(num_layers: int, layers_per_stage: float) -> int:
    """Return the number of stages: the embedding, the groups of blocks, the head.

    Group n, counted from 1, ends at block int(n * layers_per_stage), or at the last block.
    """
    groups = math.ceil(num_layers / layers_per_stage)  # may be off by one, as products round differently
    while int(groups * layers_per_stage) < num_layers:
        groups += 1
    while int((groups - 1) * layers_per_stage) >= num_layers:
        groups -= 1
    return groups + 2
