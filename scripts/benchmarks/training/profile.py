"""The time of a step by kind of operation or by kernel, from PyTorch's profiler around turns of
each row.

The profiler slows every operation slightly. `rest` is the time outside operations: Python, autograd
and, with several ranks, waiting for other ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from scripts.benchmarks.training.measure import Contestant

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


def profile_in_turns(
    contestants: Mapping[str, Contestant], turns: Sequence[Sequence[Sequence[Tensor]]]
) -> dict[str, dict[str, float]]:
    """Train more turns; return each row's seconds per step by kind of operation, and the rest.

    Medians over all turns except the first, in which the profiler starts.
    """
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
    for steps in turns:
        for name, contestant in contestants.items():
            measured[name].append(_profile(contestant, steps))
    return {
        name: {kind: statistics.median(one[kind] for one in every[1:]) for kind in (*KINDS, REST)}
        for name, every in measured.items()
    }


def _profile(contestant: Contestant, steps: Sequence[Sequence[Tensor]]) -> dict[str, float]:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        before = time.perf_counter()
        for micro_batches in steps:
            contestant.step(micro_batches)
        contestant.finish()
        step_s = (time.perf_counter() - before) / len(steps)
    seconds = dict.fromkeys(KINDS, 0.0)
    for event in recorded.key_averages():
        kind = kind_of(event.key)
        if kind is not None:
            seconds[kind] += event.self_cpu_time_total / 1e6 / len(steps)
    return {**seconds, REST: step_s - sum(seconds.values())}


def kernels(contestant: Contestant, steps: Sequence[Sequence[Tensor]]) -> dict[str, float]:
    """Return the seconds that each kernel takes in a step on the GPU, the longest first, `rest`
    included.

    The host runs ahead of the device, so `rest`, the time of the step in which no kernel runs, is
    small unless the host is the slower one; kernels on several streams at once make it smaller
    still.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        before = time.perf_counter()
        for micro_batches in steps:
            contestant.step(micro_batches)
        contestant.finish()
        torch.cuda.synchronize()
        step_s = (time.perf_counter() - before) / len(steps)
    seconds = {
        event.key: event.self_device_time_total / 1e6 / len(steps)
        for event in recorded.key_averages()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    }
    seconds[REST] = step_s - sum(seconds.values())
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def by_kind(kernels_s: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step by kind of kernel, and the rest."""
    seconds = dict.fromkeys((*KERNELS, REST), 0.0)
    for name, value in kernels_s.items():
        seconds[REST if name == REST else kind_of(name, KERNELS) or OTHERS] += value
    return seconds


def kind_of(operation: str, kinds: Mapping[str, Sequence[str]] = KINDS) -> str | None:
    """Return the kind of an operation or a kernel by its name; None for events that are not
    operations."""
    lower = operation.lower()
    return next(
        (kind for kind, parts in kinds.items() if any(part in lower for part in parts)), None
    )
