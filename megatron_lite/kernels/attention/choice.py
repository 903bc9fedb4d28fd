"""Choose among the attention backends by what each supports.

| backend | dtypes | head sizes | window | documents | deterministic | where |
| --- | --- | --- | --- | --- | --- | --- |
| cudnn | bf16, fp16 | multiples of 8 up to 128 | no | no | no | Hopper; cuDNN from 9.15.1 (4) |
| flash3 | bf16, fp16 | multiples of 8 up to 256 | yes | yes | no (3) | Hopper; the package
  flash_attn_interface |
| flash4 | bf16, fp16 | multiples of 8 up to 256 (5) | yes | yes | yes (2) | Hopper, B200; the
  package flash-attn-4 |
| flash | bf16, fp16 | multiples of 8 up to 256 (1) | no | no | yes (2) | GPUs from Ampere |
| flash | fp32 | all | no | no | yes | CPUs |
| flash | bf16 | all | no | no | yes | CPUs with instructions for bf16; `auto`: from 1,024 positions
  on |
| varlen | bf16, fp16 | multiples of 8 up to 256 (1) | yes | yes | yes (2) | GPUs from Ampere |
| flex | all | from 16 | yes | yes | yes | GPUs from Ampere, Triton; compiled at its first use |
| math | all | all | yes | yes | yes | everywhere; also --attention_dropout |

flash3 is FlashAttention 3 from the package `flash_attn_interface`, which torch can use instead of
its own version 2: 1.5 to 2 times as fast on H100 (Shah et al. 2024, section 4). flash4 is
FlashAttention 4, called directly: torch's switch to it does not fit the package's later versions.
cudnn and flash are `scaled_dot_product_attention` restricted to one backend, varlen is
`torch.nn.attention.varlen` (the flash kernels with document borders), flex is `flex_attention` with
a block mask, math is the formula in `blocks.py`.
All read grouped keys without copies. math saves query, key and value for the backward pass; the
others also save the output and one fp32 number per row and head; flex also a block mask. None saves
probabilities.

(1) With gradients at most 192 on compute capability 8.6 to 8.9 and 12. (2) With torch's
deterministic algorithms on. (3) Its backward pass has an untested option for that. (4) Not on B200,
where it is wrong with fewer than 8 key heads (pytorch issue 193893, open). (5) At most 128 on B200.
Only flex and math cap scores (--attention_soft_cap); varlen, flash3, math and a CPU's flash have
sinks (--attention_sinks).
`auto` takes the first of cudnn, flash3, flash4, flash, varlen, math that supports the inputs: cuDNN
is the fastest for full causal attention on Hopper. On a CPU, flash takes 0.6 to 1.1 times as long
as math in fp32. In bf16 it takes, with instructions for bf16 (Zen 4), 0.77 to 0.83 at 1,024
positions and 0.52 to 0.61 at 2,048; without them, and in fp16, up to 11.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron_lite.errors import UsageError
from megatron_lite.kernels.converted_products import computes_in_fp32
from megatron_lite.kernels.triton_support import triton

AUTOMATIC = ("cudnn", "flash3", "flash4", "flash", "varlen", "math")
DESCRIPTIONS = {
    "cudnn": "cuDNN's fused kernels",
    "flash3": "FlashAttention 3",
    "flash4": "FlashAttention 4",
    "flash": "torch's flash kernels",
    "varlen": "torch's flash kernels for windows and packed documents",
    "flex": "flex_attention, compiled",
    "math": "the plain formula, in blocks of queries",
}
HALVES = (torch.bfloat16, torch.float16)
CUDNN_WITH_ANY_LENGTH = 91501  # earlier versions are wrong unless the length is a multiple of 128
LONG_IN_BF16 = 1024  # positions from which a CPU's flash kernel is faster in bf16 than math, with instructions for bf16
FIX = "leave the flag out, or write --attention_backend=auto"


@dataclass(frozen=True)
class Machine:
    """Properties of a GPU or CPU that determine the backend; a CPU has capability None."""

    capability: tuple[int, int] | None
    cudnn: int = 0  # 91501 is version 9.15.1
    flash3: bool = False  # FlashAttention 3 is installed
    flash4: bool = False
    flex: bool = True  # Triton is installed, which compiles flex_attention
    has_bf16: bool = False  # a CPU with instructions for bf16


# A plan assumes this GPU, because it must not query a device.
PLANNED_GPU = Machine((9, 0), CUDNN_WITH_ANY_LENGTH)


@dataclass(frozen=True)
class Work:
    """The inputs of an attention layer that determine the backend."""

    dtype: torch.dtype
    head_size: int
    windowed: bool = False  # with a window shorter than the sequence
    documents: bool = False
    deterministic: bool = False
    dropout: bool = False
    heads_per_group: int = 1  # query heads that share a key head
    length: int = 0  # positions; 0: unknown
    soft_cap: float = 0.0  # bound on the scores; 0: none
    sinks: bool = False


@functools.cache
def machine_of(device: torch.device) -> Machine:
    """Query torch and the device."""
    if device.type != "cuda":
        return Machine(None, has_bf16=not computes_in_fp32(device, torch.bfloat16))
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else 0
    capability = torch.cuda.get_device_capability(device)
    return Machine(capability, cudnn or 0, _has_flash3(), _has_flash4(), triton is not None)


def _has_flash3() -> bool:
    """Return whether torch supports version 3 of the flash kernels and its package is installed."""
    installed = importlib.util.find_spec("flash_attn_interface") is not None
    return installed and "FA3" in torch.nn.attention.list_flash_attention_impls()


def _has_flash4() -> bool:
    """Return whether version 4's package is installed; its folder `flash_attn` may also belong to
    another version."""
    return any(importlib.metadata.distributions(name="flash-attn-4"))


def obstacle(backend: str, machine: Machine, work: Work) -> str | None:
    """Return why a backend does not support the work on this machine, to follow
    "--attention_backend=<backend>: ", or None."""
    if backend == "math":
        return None
    return next((reason for applies, reason in _obstacles(backend, machine, work) if applies), None)


def _obstacles(backend: str, machine: Machine, work: Work) -> Iterator[tuple[bool, str]]:
    """Yield each obstacle in order, preceded by whether it applies."""
    dtype = str(work.dtype).removeprefix("torch.")
    on_cpu = machine.capability is None
    capability = (0, 0)
    if machine.capability is not None:
        capability = machine.capability
        found = ".".join(map(str, capability))
        yield (
            capability < (8, 0),
            f"needs a GPU of compute capability 8.0, and this one has {found}",
        )
    else:
        yield backend != "flash", "needs a GPU, and this run is on cpu"
    yield work.dropout, "has no dropout (--attention_dropout)"
    yield work.soft_cap > 0 and backend != "flex", "cannot cap scores (--attention_soft_cap)"
    has_sinks = backend in ("varlen", "flash3") or (backend == "flash" and on_cpu)
    yield work.sinks and not has_sinks, "has no sinks (--attention_sinks)"
    if backend == "flex":
        yield not machine.flex, "needs Triton"
        few = f"needs heads of at least 16 channels (--kv_channels), not of {work.head_size}"
        yield work.head_size < 16, few
        return
    if on_cpu:
        native = machine.has_bf16 and work.dtype == torch.bfloat16
        yield work.dtype in HALVES and not native, f"computes in fp32 on this CPU, not in {dtype}"
    else:
        yield work.dtype not in HALVES, f"computes only in bf16 and fp16, not in {dtype}"
    if backend == "flash3":
        yield capability[0] != 9, "needs compute capability 9 (Hopper)"
        yield not machine.flash3, "needs the package flash_attn_interface (FlashAttention 3)"
        yield work.deterministic, "is not known to be repeatable (--deterministic=1)"
    elif backend == "flash4":
        yield capability[0] not in (9, 10), "needs compute capability 9 or 10 (Hopper, B200)"
        yield not machine.flash4, "needs the package flash-attn-4 (FlashAttention 4)"
    elif backend != "varlen":
        yield work.windowed, "takes no sliding window (--window_size)"
        yield work.documents, "takes no packed documents (--cross_document_attention=0)"
    if backend == "cudnn":
        yield (
            capability[0] == 10,
            "gives wrong results on B200 with few key heads (pytorch issue 193893)",
        )
        yield capability[0] != 9, "needs compute capability 9 (Hopper)"
        yield (
            machine.cudnn < CUDNN_WITH_ANY_LENGTH,
            f"needs cuDNN 9.15.1, and this machine has {machine.cudnn}",
        )
        yield work.deterministic, "is not repeatable (--deterministic=1)"
    limit = 128 if backend == "cudnn" or (backend == "flash4" and capability[0] == 10) else 256
    if backend in ("flash", "varlen") and ((8, 6) <= capability <= (8, 9) or capability[0] == 12):
        limit = 192
    size = f"needs heads of a multiple of 8 channels up to {limit} (--kv_channels), not of {work.head_size}"
    yield not on_cpu and (work.head_size % 8 != 0 or work.head_size > limit), size


def choose_attention(
    wanted: str,
    device: torch.device,
    work: Work,
    machine: Machine | None = None,
    works: Callable[[str], bool] = lambda backend: True,
) -> str:
    """Return the wanted backend or, for "auto", the fastest that supports the work.

    Args:
        machine: replaces the device's properties; a plan passes `PLANNED_GPU` so that no device is
            queried.
        works: tests a backend without known obstacles.

    Raises:
        UsageError: if the wanted backend is unavailable or does not support the work.
    """
    machine = machine or machine_of(device)
    if wanted == "auto":
        slow = ["flash"] * (
            machine.has_bf16 and work.dtype == torch.bfloat16 and work.length < LONG_IN_BF16
        )
        able = (
            name for name in AUTOMATIC if name not in slow and obstacle(name, machine, work) is None
        )
        return next(backend for backend in able if backend == "math" or works(backend))
    reason = obstacle(wanted, machine, work)
    if reason is None and wanted != "math" and not works(wanted):
        reason = "fails to compute a small problem on this machine as math does"
    if reason is not None:
        raise UsageError(f"--attention_backend={wanted}: {wanted} {reason}; {FIX}")
    return wanted
