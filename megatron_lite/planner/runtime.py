"""Memory that a rank needs in addition to its tensors, and that an 80 GB GPU offers: each number with its source."""

from __future__ import annotations

from collections.abc import Sequence

MIB, GIB = 2**20, 2**30

# Memory that torch reports for an 80 GB GPU; a dry run queries no device. 79.10 GiB is the least of many logs of A100
# and H100 cards ("GPU 3 has a total capacity of 79.10 GiB", github.com/stas00/ml-engineering, debug/pytorch.md); others
# show up to 79.33 GiB. The driver keeps the rest of the 81,559 MiB (H100) or 81,920 MiB (A100) that nvidia-smi shows.
PLANNED_GPU_BYTES = int(79.1 * GIB)

# The context of a process takes about 400 MB (github.com/pytorch/pytorch/issues/109888); 514 MiB in the log of a card
# of 79.19 GiB. CUDA loads each kernel at its first launch: 0.59 GiB in logs of training on single H100 cards, the
# process's memory minus the memory that torch has reserved.
CUDA_CONTEXT_BYTES = int(0.6 * GIB)
# torch keeps a workspace for each pair of cuBLAS handle and stream (docs.pytorch.org/docs/stable/notes/cuda.html,
# "cuBLAS workspaces"): one for the thread of the forward pass and one for autograd's; cuBLASLt takes a third. NVIDIA
# recommends 32 MiB on Hopper (docs.nvidia.com/cuda/cublas, cublasSetWorkspace); torch follows (pull request 120925).
CUBLAS_BYTES = 3 * 32 * MIB
# NCCL buffers a connection of a channel with 4 MiB (NCCL_BUFFSIZE), 4.7 MiB (LL128) and 0.5 MiB (LL): src/init.cc. In
# units of 2 MiB these are 10 MiB, as in the log of github.com/NVIDIA/nccl/issues/1685. A ring has two connections per
# channel on any number of ranks (issues/986), and 32 channels are the most in that log of H100 cards. Other algorithms
# connect when they are first used (NCCL_RUNTIME_CONNECT). All collectives of a group share one communicator.
NCCL_CHANNELS, NCCL_CONNECTION_BYTES = 32, 10 * MIB
# NVLink SHARP, within a machine: 16 channels x 2 buffers of 1 MiB x 8 GPUs (src/transport/nvls.cc).
NVLS_BYTES = 256 * MIB
# The caching allocator cannot fill every hole that freed tensors leave: at most this many times the largest temporary
# tensors of a micro-batch. Replays of steps through the rules of the allocator give 0.2 to 2.5 times as much
# (tests/planner/test_runtime.py). It rounds a large tensor of the state up to 2 MiB: by 1 MiB on average.
HOLES = 2.5
ROUNDING_BYTES = MIB
# On a CPU, measured as resident sets of this program: 380 MiB before a small model takes its first step, and what
# oneDNN adds to larger ones. A process of the data loader imports no torch: 36 MiB.
INTERPRETER_BYTES = 512 * MIB
WORKER_BYTES = 40 * MIB


def counted(number: int, noun: str) -> str:
    """Format a count: 1 stage, 2 stages, 3 micro-batches."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def runtime_needs(
    device_type: str, groups: Sequence[int], workers: int, state_tensors: int, largest_bytes: int
) -> dict[str, int]:
    """Return the bytes that a rank needs in addition to its tensors, by name.

    groups: sizes of the rank's process groups. workers: data loader processes. largest_bytes: size of a micro-batch's
    largest temporary tensors.
    """
    holes = int(HOLES * largest_bytes)
    if device_type != "cuda":
        return {
            "interpreter, libraries": INTERPRETER_BYTES,
            **({"loader processes": workers * WORKER_BYTES} if workers else {}),
            "allocator fragmentation": holes,
        }
    nccl = sum(ranks > 1 for ranks in groups) * (NCCL_CHANNELS * 2 * NCCL_CONNECTION_BYTES + NVLS_BYTES)
    return {
        "CUDA context, kernels": CUDA_CONTEXT_BYTES,
        **({"NCCL channels": nccl} if nccl else {}),
        "cuBLAS workspaces": CUBLAS_BYTES,
        "allocator fragmentation": holes + state_tensors * ROUNDING_BYTES,
    }
