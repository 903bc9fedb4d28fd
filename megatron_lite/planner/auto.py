"""Values for `auto`: the lowest ZeRO stage that fits a device, the blocks per stage."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch

from megatron_lite.config import Config, changed
from megatron_lite.config.system import shard_of_node
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import LESS_MEMORY, OUT_OF_MEMORY, OutOfMemoryError
from megatron_lite.kernels.choice import REFERENCES
from megatron_lite.model.gpt import model_layers
from megatron_lite.model.layer import Layer
from megatron_lite.parameter import DTYPES, Parameter
from megatron_lite.planner.devices import GIB, MIB
from megatron_lite.planner.plan import Planner, SimulatedGroup
from megatron_lite.run.host import available_bytes
from megatron_lite.validation.rules import Note

# Cost of a gather: startup seconds, seconds per further rank, bytes per second. See
# `worthwhile_bytes`.
NCCL_COST = (20e-6, 2e-6, 50e9)
GLOO_COST = (100e-6, 50e-6, 1e9)
LATENCY_SHARE = 0.1
SMALLEST_NCCL_GATHER = 32 * MIB
# More bytes than a run needs per weight, and per weight and token divided by the hidden size.
MOST_STATE_BYTES, MOST_TOKEN_BYTES = 32, 16


def resolve_auto(
    config: Config, world_size: int, device_type: str, device_bytes: int, nodes: int = 1
) -> tuple[Config, tuple[Note, ...]]:
    """Replace options that depend on the devices by numbers; return the options and, per choice, a
    note with the reason.

    --zero_stage=auto becomes the lowest stage whose predicted memory (`plan.py`) fits
    `device_bytes`; if none does, the highest, with a warning. --layers_per_stage=auto: see
    `blocks_per_stage`. An unset --data_parallel_shard: see `shard_of_node`. All ranks must pass the
    same numbers.
    """
    notes: list[Note] = []
    if config.distributed.data_parallel_shard is None:
        size = shard_of_node(config.distributed, world_size, nodes)
        config = changed(config, {"data_parallel_shard": size})
        if size:
            reason = f"the data-parallel ranks of each of {nodes} nodes, so that ZeRO-3 gathers weights inside of them"
            notes.append(
                Note(
                    f"--data_parallel_shard is {size}: {reason} (0: all ranks, for the least memory)"
                )
            )
    if config.multi_stage.layers_per_stage == "auto":
        blocks, note = blocks_per_stage(config, world_size, device_type)
        config = changed(config, {"layers_per_stage": float(blocks)})
        notes.append(note)
    if config.multi_stage.zero_stage == "auto":
        zero_stage, note = _lowest_zero_stage(config, world_size, device_type, device_bytes)
        config = changed(config, {"zero_stage": zero_stage})
        notes.append(note)
    return config, tuple(notes)


def _lowest_zero_stage(
    config: Config, world_size: int, device_type: str, device_bytes: int
) -> tuple[int, Note]:
    predicted: list[str] = []
    planner = Planner(world_size, device_type)
    zero_stage = 0
    needed = 0
    # Half of a split master weight is stored in its stage's own weight buffer, which ZeRO-3 does
    # not have.
    for zero_stage in (1, 2) if config.multi_stage.split_master_weights else (1, 2, 3):
        needed = planner.plan(changed(config, {"zero_stage": zero_stage})).needed_bytes()
        predicted.append(f"ZeRO-{zero_stage} {needed / GIB:.1f} GiB")
        if needed <= device_bytes:
            break
    choice = f"--zero_stage=auto is {zero_stage}"
    facts = f"{', '.join(predicted)} of {device_bytes / GIB:.1f} GiB"
    if needed <= device_bytes:
        return zero_stage, Note(f"{choice}, the lowest stage whose predicted memory fits: {facts}")
    return zero_stage, Note(
        f"{choice}, but its predicted memory is {(needed - device_bytes) / GIB:.1f} GiB too much: {facts}; use a "
        "smaller --micro_batch_size, --mlp_recompute_level=full, or more ranks (--dry_run=1 finds flags that fit)",
        is_warning=True,
    )


def blocks_per_stage(config: Config, world_size: int, device_type: str) -> tuple[int, Note]:
    """Choose the number of blocks per stage, with the reason: enough to make a gather worth its
    latency.

    At most a quarter of a rank's blocks, so that the two ZeRO-3 buffers store at most half of them,
    some remain to overlap, and every pipeline schedule has its chunks. A group of one rank gathers
    nothing and gets 1.
    """
    group = SimulatedGroup(0, world_size, device_type, options=config.distributed)
    ranks = group.shard.world_size
    if ranks == 1:
        return 1, Note("--layers_per_stage=auto is 1: one rank gathers nothing")
    block = model_layers(config, REFERENCES, group)[1]
    numel = sum(
        parameter.spec.local_numel
        for parameter in block.parameters()
        if isinstance(parameter, Parameter)
    )
    block_bytes = numel * DTYPES[config.distributed.training_dtype].itemsize
    own = config.model.num_layers // group.pipeline.world_size
    wanted, most = worthwhile_bytes(ranks, device_type), max(1, own // 4)
    blocks = min(most, math.ceil(wanted / block_bytes))
    capped = f"; {most} is a quarter of a rank's blocks" if blocks * block_bytes < wanted else ""
    return blocks, Note(
        f"--layers_per_stage=auto is {blocks}: the weights of a block take {block_bytes / MIB:,.1f} MiB, and with "
        f"{ranks} ranks a gather is worth its latency from {wanted / MIB:,.1f} MiB on{capped}"
    )


def worthwhile_bytes(world_size: int, device_type: str) -> int:
    """Return the smallest size of a stage's weights, in the training dtype, at which latency is at
    most a tenth of a gather.

    A gather of n bytes takes latency + n / bandwidth. With NCCL a launch costs about 20 us, and
    each of the N - 1 hops of a ring about 2 us; 50 GB/s is one 400 Gbit/s adapter per GPU. The
    result is 63 MiB for 64 GPUs and 118 MiB for 128. A single machine has few hops, but NVLink has
    several times the bandwidth, so the minimum is 32 MiB. With gloo, pairs of messages of about 50
    us share about 1 GB/s: 1.3 MiB for 2 processes.
    """
    start_s, per_rank_s, bytes_per_s = NCCL_COST if device_type == "cuda" else GLOO_COST
    latency_s = start_s + per_rank_s * (world_size - 1)
    wanted = math.ceil(latency_s * bytes_per_s * (1 - LATENCY_SHARE) / LATENCY_SHARE)
    return max(wanted, SMALLEST_NCCL_GATHER) if device_type == "cuda" else wanted


def most_bytes(config: Config, layers: Sequence[Layer]) -> float:
    """Return an upper bound on a rank's tensors: each weight has state, and products create
    activations for each token."""
    batch = config.batch
    tokens = batch.micro_batch_size * batch.breadth_first_micro_batches * batch.sequence_length
    weights = sum(parameter.numel() for layer in layers for parameter in layer.parameters())
    return weights * (MOST_STATE_BYTES + MOST_TOKEN_BYTES * tokens / config.model.hidden_size)


def check_memory(config: Config, layers: Sequence[Layer], distributed: Distributed) -> None:
    """Check, before anything is allocated, that a CPU run has the memory for its tensors. A GPU
    refuses by itself.

    A first plan takes a second, so runs that are small for their machine skip it. The runtime does
    not count.

    Raises:
        OutOfMemoryError: if this machine's free memory, divided by its ranks, is too little.
    """
    ranks = distributed.local_world_size
    exempt = config.training.inference or config.distributed.ignore_memory_check
    free = available_bytes() // ranks
    if distributed.device.type != "cpu" or exempt or most_bytes(config, layers) <= free:
        return
    try:
        needed = Planner(distributed.world_size, "cpu", distributed.rank).plan(config).peak_bytes()
    except Exception:  # a run that cannot be planned may still work
        return
    if needed > free:
        each = f" for each of the {ranks} ranks of this machine" if ranks > 1 else ""
        facts = f"the tensors need {needed / GIB:,.1f} GiB by the plan, and {free / GIB:,.1f} GiB are free{each}"
        error = OutOfMemoryError(
            f"{OUT_OF_MEMORY}{facts} (--ignore_memory_check=1 starts all the same); {LESS_MEMORY}"
        )
        error.free_bytes = free
        raise error


def device_memory_bytes(device: torch.device, local_world_size: int) -> int:
    """Return a GPU's memory, or this rank's share of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local_world_size
