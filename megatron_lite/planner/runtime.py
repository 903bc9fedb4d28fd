"""Compute a rank's memory in addition to its tensors: each number with its source."""

from __future__ import annotations

from megatron_lite.checkpoint.writing import host_copy_bytes
from megatron_lite.config import Config
from megatron_lite.distributed.rank_group import reduction_scratch_bytes
from megatron_lite.planner.devices import GIB, MIB
from megatron_lite.planner.step_memory import Partition
from megatron_lite.zero.multi_stage import MultiStage

FP32_BYTES = 4

# The context of a process takes about 400 MB (github.com/pytorch/pytorch/issues/109888); 514 MiB in
# the log of a card of 79.19 GiB. CUDA loads each kernel at its first launch: 0.59 GiB in logs of
# training on single H100 cards, the process's memory minus torch's reserved memory.
CUDA_CONTEXT_BYTES = int(0.6 * GIB)
# torch keeps a workspace for each pair of cuBLAS handle and stream
# (docs.pytorch.org/docs/stable/notes/cuda.html, "cuBLAS workspaces"): one for the thread of the
# forward pass and one for autograd's; cuBLASLt takes a third. NVIDIA recommends 32 MiB on Hopper
# (docs.nvidia.com/cuda/cublas, cublasSetWorkspace); torch follows (pull request 120925).
CUBLAS_BYTES = 3 * 32 * MIB
# NCCL buffers a connection of a channel with 4 MiB (NCCL_BUFFSIZE), 4.7 MiB (LL128) and 0.5 MiB
# (LL): src/init.cc. In units of 2 MiB these are 10 MiB, as in the log of
# github.com/NVIDIA/nccl/issues/1685. A ring has two connections per channel on any number of ranks
# (issues/986), and 32 channels are the most in that log of H100 cards. Other algorithms connect
# when they are first used (NCCL_RUNTIME_CONNECT). All collectives of a group share one
# communicator.
NCCL_CHANNELS, NCCL_CONNECTION_BYTES = 32, 10 * MIB
# NVLink SHARP, within a machine: 16 channels x 2 buffers of 1 MiB x 8 GPUs (src/transport/nvls.cc).
NVLS_BYTES = 256 * MIB
# The caching allocator cannot fill every hole between freed tensors. With expandable segments,
# which `run/host.py` chooses, it keeps one range of addresses that grows by pages of 20 MiB, and
# returns the empty pages in holes before memory runs out ("Expandable Segments" in
# c10/cuda/CUDACachingAllocator.cpp). Replays of steps by these rules take up to 0.2 times the two
# largest temporary tensors of a micro-batch more than all tensors, without returning any
# (tests/planner/test_runtime.py). Without expandable segments it was 0.2 to 2.5 times as much,
# which CPUs still get.
HOLES = 0.5
PAGE_BYTES = 20 * MIB
HOST_HOLES = 2.5
# On a CPU, measured as resident sets of this program: 380 MiB before a small model takes its first
# step, and what oneDNN adds to larger ones. A process of the data loader imports no torch: 36 MiB.
INTERPRETER_BYTES = 512 * MIB
WORKER_BYTES = 40 * MIB


def runtime_bytes(config: Config, partition: Partition) -> dict[str, int]:
    """Return the bytes that a rank needs in addition to its tensors, by name."""
    model, needs = partition.model, dict[str, int]()
    data = model.group.world_size
    tensor = model.tensor.world_size
    pipeline = model.ranks.world_size
    costs = partition.training(config, config.performance.mlp_recompute_level)
    own = (costs[stage.index].passes for stage in model.stages)
    largest = max(cost.largest for passes in own for pair in passes for cost in pair)
    if partition.device_type == "cuda":
        # The group of all ranks is also the data-parallel one without tensor and pipeline
        # parallelism; a pipeline has a group for sums, and one for messages in each direction.
        groups = sum(
            ranks > 1 for ranks in (data * tensor, *((data, tensor) if tensor > 1 else ()))
        )
        groups += 4 - (data * tensor == 1) if pipeline > 1 else 0
        if (experts := config.distributed.expert_parallel) > 1:
            # of ranks with other experts; with the same, and with other parts, if there are any
            groups += 1 + 2 * (data > experts)
        needs["CUDA context, kernels"] = CUDA_CONTEXT_BYTES
        if groups:
            needs["NCCL channels"] = groups * (
                NCCL_CHANNELS * 2 * NCCL_CONNECTION_BYTES + NVLS_BYTES
            )
        needs["cuBLAS workspaces"] = CUBLAS_BYTES
        needs["allocator fragmentation"] = int(HOLES * largest) + PAGE_BYTES
    else:
        needs["interpreter, libraries"] = INTERPRETER_BYTES
        if config.data.num_workers:
            needs["loader processes"] = config.data.num_workers * WORKER_BYTES
        needs["allocator fragmentation"] = int(HOST_HOLES * largest)
        if tensor > 1:
            needs["tensor-parallel scratch"] = _tensor_parallel_scratch_bytes(config, model)
        if copy := host_copy_bytes(config, model):
            needs["copy for async_checkpoint"] = copy
    if "updates" in config.tracking.watch:
        needs["old weights for watch"] = partition.largest_shard * FP32_BYTES
    return needs


def _tensor_parallel_scratch_bytes(config: Config, model: MultiStage) -> int:
    """Return the receive buffer for tensor-parallel collectives on a CPU; two ranks swap whole
    hidden states."""
    ranks, dtype = model.tensor.world_size, model.precision.training
    numel = config.batch.micro_batch_size * config.batch.sequence_length * config.model.hidden_size
    if ranks == 2 and not config.distributed.sequence_tensor_parallel:
        return numel * dtype.itemsize
    return reduction_scratch_bytes("cpu", ranks, numel // ranks, dtype)
