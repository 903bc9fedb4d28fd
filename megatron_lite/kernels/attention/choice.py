"""Which attention a device has, and which of them a run uses.

| backend | dtypes | head sizes | window | documents | deterministic | where |
| --- | --- | --- | --- | --- | --- | --- |
| cudnn | bf16, fp16 | multiples of 8 up to 128 | no | no | no | Hopper, Blackwell B200; cuDNN from 9.15.1 |
| flash | bf16, fp16 | multiples of 8 up to 256 (1) | no | no | yes (2) | GPUs from Ampere |
| varlen | bf16, fp16 | multiples of 8 up to 256 (1) | yes | yes | yes (2) | GPUs from Ampere, torch from 2.11 |
| flex | all | from 16 | yes | yes | yes | GPUs from Ampere, Triton; compiled at its first use |
| math | all | all | yes | yes | yes | everywhere; drops probabilities (--attention_dropout) |

cudnn and flash are `scaled_dot_product_attention` held to one backend, varlen is `torch.nn.attention.varlen` (the same
flash kernels, told where documents begin), flex is `flex_attention` with a mask of blocks, math is
`kernels/attention_blocks.py`. All of them read grouped keys as they are, and keep query, key, value, and, but for math,
the output and one fp32 number for each row and head: no probabilities and no masks (flex: one of blocks).

(1) Backward, not above 192 on compute capability 8.6 to 8.9 and 12. (2) With torch's deterministic algorithms on.
`auto` takes the first that can do the work, of cudnn, flash, varlen, math: on Hopper cuDNN is the fastest for full
causal attention.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_lite.errors import UsageError
from megatron_lite.kernels.triton_support import triton

BACKENDS = ("cudnn", "flash", "varlen", "flex", "math")
AUTOMATIC = ("cudnn", "flash", "varlen", "math")
DESCRIPTIONS = {
    "cudnn": "cuDNN's fused kernels",
    "flash": "torch's flash kernels",
    "varlen": "torch's flash kernels for windows and packed documents",
    "flex": "flex_attention, compiled",
    "math": "the formula in blocks of queries",
}
HALVES = (torch.bfloat16, torch.float16)
CUDNN_WITH_ANY_LENGTH = 91501  # earlier ones are wrong for lengths that are no multiples of 128
FIX = "leave the flag out, or write --attention_backend=auto"


@dataclass(frozen=True)
class Machine:
    """What decides on a backend, beside the work: of a GPU, or capability None of a CPU."""

    capability: tuple[int, int] | None
    cudnn: int = 0  # version, 91501 for 9.15.1
    varlen: bool = True  # torch.nn.attention.varlen, with windows
    flex: bool = True  # flex_attention, and Triton to compile it


# What a plan takes a GPU for: it is not to look at any.
PLANNED_GPU = Machine((9, 0), CUDNN_WITH_ANY_LENGTH)


@dataclass(frozen=True)
class Work:
    """What attention has to do."""

    dtype: torch.dtype
    head_size: int
    windowed: bool = False
    documents: bool = False
    deterministic: bool = False
    dropout: bool = False


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """Asks torch, and the GPU if it is one."""
    if device.type != "cuda":
        return Machine(None)
    has_varlen = importlib.util.find_spec("torch.nn.attention.varlen") is not None
    if has_varlen:
        from torch.nn.attention.varlen import varlen_attn

        has_varlen = "window_size" in inspect.signature(varlen_attn).parameters
    has_flex = importlib.util.find_spec("torch.nn.attention.flex_attention") is not None and triton is not None
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else 0
    return Machine(torch.cuda.get_device_capability(device), cudnn or 0, has_varlen, has_flex)


def obstacle(backend: str, machine: Machine, work: Work) -> str | None:
    """Why a backend cannot do the work on this machine, as the end of "--attention_backend=<backend>: "; or None."""
    if backend == "math":
        return None
    if machine.capability is None:
        return "needs a GPU, and this run is on cpu"
    if machine.capability < (8, 0):
        return f"needs a GPU of compute capability 8.0, and this one has {'.'.join(map(str, machine.capability))}"
    if work.dropout:
        return "does not drop probabilities (--attention_dropout)"
    if backend == "flex":
        return _flex_obstacle(machine, work)
    if work.dtype not in HALVES:
        return f"computes in bf16 and fp16 only, not in {str(work.dtype).removeprefix('torch.')}"
    if backend == "varlen":
        missing = "needs torch.nn.attention.varlen with windows, which came with torch 2.11"
        return _head_size_obstacle(work, _flash_limit(machine)) if machine.varlen else missing
    if work.windowed:
        return "takes no sliding window (--window_size)"
    if work.documents:
        return "takes no packed documents (--cross_document_attention=0)"
    return _cudnn_obstacle(machine, work) if backend == "cudnn" else _head_size_obstacle(work, _flash_limit(machine))


def _cudnn_obstacle(machine: Machine, work: Work) -> str | None:
    assert machine.capability is not None
    if machine.capability[0] not in (9, 10):
        return "is for compute capability 9 and 10 (Hopper, B200)"
    if machine.cudnn < CUDNN_WITH_ANY_LENGTH:
        return f"needs cuDNN 9.15.1, and here is {machine.cudnn}"
    if work.deterministic:
        return "is not repeatable (--deterministic=1)"
    return _head_size_obstacle(work, 128)


def _flex_obstacle(machine: Machine, work: Work) -> str | None:
    if not machine.flex:
        return "needs torch.nn.attention.flex_attention and Triton"
    return None if work.head_size >= 16 else f"needs heads of 16 channels (--kv_channels), not of {work.head_size}"


def _flash_limit(machine: Machine) -> int:
    """The largest head size of the flash kernels with gradients."""
    assert machine.capability is not None
    return 192 if (8, 6) <= machine.capability <= (8, 9) or machine.capability[0] == 12 else 256


def _head_size_obstacle(work: Work, limit: int) -> str | None:
    if work.head_size % 8 == 0 and work.head_size <= limit:
        return None
    return f"takes heads of a multiple of 8 channels up to {limit} (--kv_channels), not of {work.head_size}"


def choose_attention(
    wanted: str,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None,
    documents: bool,
    head_size: int,
    deterministic: bool = False,
    dropout: bool = False,
    machine: Machine | None = None,
    works: Callable[[str], bool] = lambda backend: True,
) -> str:
    """The backend's name: the one wanted or, of "auto", the fastest that can do the work.

    `window`: None also where it is not shorter than the sequence. `machine`: instead of the one at hand; a plan, which
    looks at no device, gives `PLANNED_GPU`. `works` tries a backend of which nothing is known against it.

    Raises:
        UsageError: if the one wanted is absent or cannot do it.
    """
    machine = machine or machine_of(device)
    work = Work(dtype, head_size, window is not None, documents, deterministic, dropout)
    if wanted == "auto":
        able = (backend for backend in AUTOMATIC if obstacle(backend, machine, work) is None)
        return next(backend for backend in able if backend == "math" or works(backend))
    reason = obstacle(wanted, machine, work)
    if reason is None and wanted != "math" and not works(wanted):
        reason = "does not compute a small problem on this machine as math does"
    if reason is not None:
        raise UsageError(f"--attention_backend={wanted}: {wanted} {reason}; {FIX}")
    return wanted


def describe_attention(backend: str) -> str:
    """For the log."""
    return f"{backend} ({DESCRIPTIONS[backend]})"
