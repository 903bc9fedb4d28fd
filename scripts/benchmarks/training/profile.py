"""The time of a step by kind of operation (on a CPU) or of kernel (on a GPU), by PyTorch's
profiler.

The profiler slows every operation slightly. `rest` is the time outside operations: Python, autograd
and, with several ranks, waiting for other ranks. On a GPU, where the host runs ahead, it is the
time in which no kernel runs; kernels on several streams at once make it smaller still.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from megatron_lite.distributed.process_group import Distributed
from scripts.benchmarks.training.measure import Contestant, Steps, synchronize

PRODUCTS = "products"
OTHERS = "copies, sums, others"
REST = "rest"
# The first kind with a substring of the operation's name.
KINDS = {
    "attention": ("scaled_dot_product",),
    PRODUCTS: ("::mm", "::addmm", "::bmm", "::baddbmm"),
    # of activations and of the gradient
    "norms": ("layer_norm", "rms_norm", "vector_norm", "_foreach_norm"),
    "optimizer": ("fused_adamw", "_foreach"),
    "activation": ("gelu", "silu", "sigmoid", "addcmul"),
    "compiled": ("## call", "torch-compiled region", "compiledfunction"),
    OTHERS: ("aten::",),
}
# The same for kernels: PyTorch's, cuBLAS's and cuDNN's, ours, and those that torch.compile
# generates.
KERNELS = {
    "attention": ("sdpa", "flash", "fmha", "cudnn::fusion"),
    PRODUCTS: ("nvjet", "gemm", "cutlass", "splitk"),
    "loss": ("_sweep_kernel", "softmax"),
    "norms": ("_forward_kernel", "_backward_kernel", "_add_sums_kernel", "_piece_kernel", "norm"),
    "optimizer": ("adamw", "multi_tensor_apply"),
    "activation": ("_activate_kernel", "gelu", "silu"),
    OTHERS: ("",),
}


def seconds_by_kind(
    contestant: Contestant, steps: Steps, distributed: Distributed
) -> dict[str, float]:
    """Train some steps; return the seconds of one by kind of operation or kernel, and the rest."""
    on_gpu = distributed.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as recorded:
        before = time.perf_counter()
        for micro_batches in steps:
            contestant.step(micro_batches)
        contestant.finish()
        synchronize(distributed)
        step_s = (time.perf_counter() - before) / len(steps)
    kinds = KERNELS if on_gpu else KINDS
    seconds = dict.fromkeys(kinds, 0.0)
    for event in recorded.key_averages():
        kind = kind_of(event.key, kinds)
        if kind is not None and (not on_gpu or _is_kernel(event)):
            took_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            seconds[kind] += took_us / 1e6 / len(steps)
    return {**seconds, REST: step_s - sum(seconds.values())}


def _is_kernel(event: Any) -> bool:
    return event.device_type == DeviceType.CUDA and not event.is_user_annotation


def kind_of(operation: str, kinds: Mapping[str, Sequence[str]] = KINDS) -> str | None:
    """Return the kind of an operation or a kernel by its name; None for events that are not
    operations."""
    lower = operation.lower()
    return next(
        (kind for kind, parts in kinds.items() if any(part in lower for part in parts)), None
    )
