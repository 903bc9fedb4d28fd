"""Choose each operation's implementation: once per run, logged, and passed to the layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_lite.config import Config
from megatron_lite.config.system import WITHOUT_FP8_UNITS
from megatron_lite.distributed.agreement import together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import UsageError
from megatron_lite.kernels.attention.attention import Documents, attention
from megatron_lite.kernels.attention.choice import (
    AUTOMATIC,
    DESCRIPTIONS,
    PLANNED_GPU,
    Work,
    choose_attention,
)
from megatron_lite.kernels.eight_bit import RECIPES, Units, units_of
from megatron_lite.kernels.triton_support import runs_on
from megatron_lite.parameter import DTYPES, Parameter

# (backend, device, work) -> why it fails
AttentionTest = Callable[[str, torch.device, Work], str | None]
# The small problem that tests an attention backend: documents in tokens, with one boundary within a
# sample and one between. cuDNN has returned NaN gradients for a length of 64 more than a multiple
# of 128 where the logarithm of a row's sum is below -88: the logits of the second sample are around
# -100.
SAMPLES = 2
LENGTH = 192
WINDOW = 64
GROUPS = 2
DOCUMENTS = (90, 102, 192)
FAR_LOGIT = -100.0


@dataclass(frozen=True)
class Kernels:
    """One run's implementations and tile sizes."""

    triton: bool = False  # Triton kernels instead of the references
    attention: str = "auto"  # a backend of `attention/choice.py`
    cross_entropy: str = "torch"  # or "triton"
    cross_entropy_splits: int | None = None
    cross_entropy_block_size: int | None = None
    eight_bit_units: Units = ()  # see `eight_bit.multiply`
    warnings: tuple[str, ...] = ()  # for the log: attention backends that fail unexpectedly

    def describe(self) -> str:
        """Return one line for the log."""
        attention = f"{self.attention} ({DESCRIPTIONS[self.attention]})"
        return (
            f"kernels: {'Triton' if self.triton else 'torch'}; attention: {attention}; "
            f"cross-entropy: {'Triton' if self.cross_entropy == 'triton' else 'torch'}"
        )


# The torch references, which run on any device.
REFERENCES: Kernels = Kernels()


def agree_on_kernels(config: Config, distributed: Distributed) -> Kernels:
    """Choose the same kernels on every rank: if any rank rejects an attention backend, none uses
    it.

    Raises:
        UsageError: on all ranks, if the configuration names an implementation that one of them
            lacks.
    """
    failures: list[dict[str, str]] = [{} for _ in range(distributed.world_size)]
    excluded: tuple[str, ...] = ()

    def fails(backend: str, device: torch.device, work: Work) -> str | None:
        if backend in excluded:
            return "another rank cannot use it"
        if (reason := _trial(backend, device, work)) is not None:
            own[backend] = reason
        return reason

    while True:
        own: dict[str, str] = {}
        kernels = together(
            distributed, lambda: choose_kernels(config, distributed.device, fails=fails)
        )
        units = kernels.eight_bit_units
        every = distributed.gather_objects(
            [kernels.attention, own, [str(dtype) for dtype in units]]
        )
        for known, (_, found, _) in zip(failures, every, strict=True):
            known.update(found)
        names = {name for name, *_ in every}
        if len(names) == 1:
            units = tuple(
                dtype for dtype in units if all(str(dtype) in written for *_, written in every)
            )
            warnings = tuple(_warnings(failures, kernels.attention))
            return dataclasses.replace(kernels, eight_bit_units=units, warnings=warnings)
        excluded = AUTOMATIC[: max(map(AUTOMATIC.index, names))]  # all before the last chosen one


def _warnings(failures: Sequence[dict[str, str]], chosen: str) -> Iterator[str]:
    """Yield a warning per failed backend: where and why it failed."""
    for backend in AUTOMATIC:
        reasons = {
            rank: failed[backend] for rank, failed in enumerate(failures) if backend in failed
        }
        if reasons:
            first, *others = reasons
            more = f" and on {len(others)} more of {len(failures)} ranks" if others else ""
            yield (
                f"attention: {backend} should work but fails on rank {first}{more}: {reasons[first]}; "
                f"every rank uses {chosen}"
            )


def choose_kernels(
    config: Config, device: torch.device, planned: bool = False, fails: AttentionTest | None = None
) -> Kernels:
    """Resolve a configuration's choices for a device.

    Args:
        planned: the device need not exist; query neither the device nor the installed libraries.
        fails: returns why an attention backend fails, or None if it works; on a GPU by default
            `failure`.

    Raises:
        UsageError: if the configuration names an implementation that is not available.
    """
    wanted = config.performance
    on_gpu, triton = device.type == "cuda", wanted.enable_triton_kernels
    available = runs_on(device) or (planned and on_gpu)  # a plan assumes Triton
    for flag, needs_triton in (
        ("--enable_triton_kernels=1", triton),
        ("--cross_entropy_impl=triton", wanted.cross_entropy_impl == "triton"),
    ):
        if needs_triton and not available and on_gpu:
            raise UsageError(f"{flag}: Triton is not installed; install it, or leave the flag out")
        if needs_triton and not available:
            raise UsageError(
                f"{flag}: Triton kernels need a GPU, and this run is on {device.type}; leave it out, or write "
                "--device=cuda"
            )
    triton = available and on_gpu if triton is None else triton
    automatic = "triton" if triton else "torch"
    return Kernels(
        triton=triton,
        attention=_attention(config, device, planned, fails or _trial),
        cross_entropy=automatic
        if wanted.cross_entropy_impl == "auto"
        else wanted.cross_entropy_impl,
        cross_entropy_splits=wanted.cross_entropy_splits,
        cross_entropy_block_size=wanted.cross_entropy_block_size,
        eight_bit_units=_eight_bit_units(config, device, planned),
    )


def _eight_bit_units(config: Config, device: torch.device, planned: bool) -> Units:
    if not config.performance.eight_bit:
        return ()
    if planned:
        has_units = device.type == "cuda" and config.distributed.gpu not in WITHOUT_FP8_UNITS
        return (torch.bfloat16, torch.float16, torch.float32) if has_units else ()
    return units_of(device, RECIPES[config.performance.eight_bit])


def _attention(config: Config, device: torch.device, planned: bool, fails: AttentionTest) -> str:
    model = config.model
    work = Work(
        DTYPES[config.distributed.training_dtype],
        model.kv_channels,
        windowed=any(
            window is not None and window < config.batch.sequence_length for window in model.windows
        ),
        documents=not config.data.cross_document_attention,
        deterministic=config.distributed.deterministic,
        dropout=model.attention_dropout > 0,
        heads_per_group=model.num_attention_heads // model.head_groups,
        length=config.batch.sequence_length,
        soft_cap=model.attention_soft_cap,
        sinks=model.attention_sinks,
    )
    wanted = "math" if model.attention_softmax_in_fp32 else config.performance.attention_backend
    if planned:
        # A package named by the user counts as installed, whatever this machine has; the run itself
        # checks.
        gpu = (
            PLANNED_GPU
            if wanted == "auto"
            else dataclasses.replace(PLANNED_GPU, flash3=True, flash4=True)
        )
        return choose_attention(wanted, device, work, gpu if device.type == "cuda" else None)
    return choose_attention(
        wanted, device, work, works=lambda backend: fails(backend, device, work) is None
    )


def _trial(backend: str, device: torch.device, work: Work) -> str | None:
    """Return `failure` on a GPU, None on a CPU, whose backends are part of torch."""
    return failure(backend, device, work) if device.type == "cuda" else None


@functools.cache
def failure(backend: str, device: torch.device, work: Work) -> str | None:
    """Return why a backend fails to match "math" on a small problem, forward and backward; None if
    it matches.

    The problem has the dtype, head size, heads per group, window and documents of `work`. Waits for
    the device. A library may refuse for reasons unknown to `choice.py`.
    """
    try:
        found, expected = (_small_problem(name, device, work) for name in (backend, "math"))
    except Exception as error:  # whatever the reason, another backend may work
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    for name, a, b in zip(("output", "gradient"), found, expected, strict=True):
        difference, largest = float((a - b).abs().max()), float(b.abs().max())
        if not difference <= 0.05 * largest:  # NaN fails, too
            return f"its {name} differs from the formula's by {difference:.3g}, where the largest number is {largest:.3g}"
    return None


def _small_problem(backend: str, device: torch.device, work: Work) -> tuple[Tensor, Tensor]:
    """Return the small problem's output and gradient, in fp32."""
    heads = GROUPS * work.heads_per_group
    generator = torch.Generator(device).manual_seed(0)
    size = (SAMPLES, LENGTH, heads + 2 * GROUPS, work.head_size)
    numbers = torch.randn(size, dtype=torch.float32, device=device, generator=generator)
    offset = (-FAR_LOGIT * work.head_size**-0.5) ** 0.5
    numbers[1, :, :heads] += offset
    numbers[1, :, heads : heads + GROUPS] -= offset
    projection = numbers.to(work.dtype).requires_grad_()
    query, key, value = (
        part.transpose(1, 2) for part in projection.split([heads, GROUPS, GROUPS], dim=2)
    )
    documents = None
    if work.documents:
        starts = torch.tensor([0, *DOCUMENTS], dtype=torch.int32, device=device).cumsum(
            0, dtype=torch.int32
        )
        documents = Documents(starts, DOCUMENTS)
    window = WINDOW if work.windowed else None
    sinks = Parameter(torch.linspace(-1.0, 1.0, heads, device=device), requires_grad=False)
    output = attention(
        *(query, key, value, window, 0.0, None),
        backend=backend,
        documents=documents,
        soft_cap=work.soft_cap,
        sinks=sinks if work.sinks else None,
    )
    output.backward(torch.ones_like(output))
    assert projection.grad is not None
    return output.detach().float(), projection.grad.float()
