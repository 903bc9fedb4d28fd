"""Which implementation each operation uses: chosen once per run, logged, and passed to the layers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from megatron_lite.config import Config
from megatron_lite.distributed.agreement import together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import UsageError
from megatron_lite.kernels.attention.choice import AUTOMATIC, PLANNED_GPU, Work, choose_attention, describe_attention
from megatron_lite.kernels.attention.probe import failure
from megatron_lite.kernels.triton_support import runs_on
from megatron_lite.parameter import DTYPES


@dataclass(frozen=True)
class Kernels:
    """Implementations and tile sizes of one run."""

    triton: bool = False  # Triton kernels instead of the references
    attention: str = "auto"  # a backend of `attention/choice.py`
    cross_entropy: str = "torch"  # or "triton"
    cross_entropy_splits: int | None = None
    cross_entropy_block_size: int | None = None
    warnings: tuple[str, ...] = ()  # for the log: attention backends that fail unexpectedly

    def describe(self) -> str:
        """Return one line for the log."""
        return (
            f"kernels: {'Triton' if self.triton else 'torch'}; attention: {describe_attention(self.attention)}; "
            f"cross-entropy: {'Triton' if self.cross_entropy == 'triton' else 'torch'}"
        )


# The torch references, which run on any device.
REFERENCES = Kernels()


def agree_on_kernels(config: Config, distributed: Distributed) -> Kernels:
    """Choose the same kernels on every rank: if any rank rejects an attention backend, none uses it.

    Raises:
        UsageError: on all ranks, if the configuration names an implementation that is not available on one.
    """
    failures: dict[int, dict[str, str]] = {}
    excluded: tuple[str, ...] = ()
    while True:
        own: dict[str, str] = {}
        choose = functools.partial(choose_kernels, config, distributed.device, excluded=excluded, failures=own)
        kernels = together(distributed, choose)
        every = distributed.gather_objects([kernels.attention, own])
        for rank, (_, failed) in enumerate(every):
            failures.setdefault(rank, {}).update(failed)
        names = {name for name, _ in every}
        if len(names) == 1:
            return dataclasses.replace(kernels, warnings=tuple(_warnings(failures, kernels.attention)))
        excluded = AUTOMATIC[: max(map(AUTOMATIC.index, names))]  # all before the last chosen one


def _warnings(failures: dict[int, dict[str, str]], chosen: str) -> Iterator[str]:
    """Say where and why each failed backend failed."""
    for backend in AUTOMATIC:
        reasons = {rank: failed[backend] for rank, failed in failures.items() if backend in failed}
        if reasons:
            first, *others = reasons
            more = f" and on {len(others)} more of {len(failures)} ranks" if others else ""
            yield (
                f"attention: {backend} should work but fails on rank {first}{more}: {reasons[first]}; "
                f"every rank uses {chosen}"
            )


def choose_kernels(
    config: Config,
    device: torch.device,
    planned: bool = False,
    excluded: Collection[str] = (),
    failures: dict[str, str] | None = None,
) -> Kernels:
    """Resolve a configuration's choices for a device.

    Args:
        excluded: attention backends that "auto" skips.
        failures: receives a reason for each backend that was tried and failed.
        planned: the device need not exist; query neither the device nor the installed libraries.

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
        attention=_attention(config, device, planned, excluded, {} if failures is None else failures),
        cross_entropy=automatic if wanted.cross_entropy_impl == "auto" else wanted.cross_entropy_impl,
        cross_entropy_splits=wanted.cross_entropy_splits,
        cross_entropy_block_size=wanted.cross_entropy_block_size,
    )


def _attention(
    config: Config, device: torch.device, planned: bool, excluded: Collection[str], failures: dict[str, str]
) -> str:
    model = config.model
    work = Work(
        DTYPES[config.distributed.training_dtype],
        model.kv_channels,
        windowed=model.window_size is not None and model.window_size < config.batch.sequence_length,
        documents=not config.data.cross_document_attention,
        deterministic=config.distributed.deterministic,
        dropout=model.attention_dropout > 0,
        heads_per_group=model.num_attention_heads // model.head_groups,
    )

    def works(backend: str) -> bool:
        reason = None if backend in excluded else failure(backend, device, work)
        if reason is not None:
            failures[backend] = reason
        return reason is None and backend not in excluded

    wanted = "math" if model.attention_softmax_in_fp32 else config.performance.attention_backend
    if device.type != "cuda":
        return choose_attention(wanted, device, work)
    if planned:
        return choose_attention(wanted, device, work, PLANNED_GPU)
    return choose_attention(wanted, device, work, works=works)
