"""Asynchronous checkpointing: a thread per rank copies the shards into host memory and writes the files.

Only an update changes shards, so training continues with the next forward and backward pass while they are copied, and
the update waits for the rest of the copy.

The threads do not communicate. Between two iterations the main threads agree, over the CPU group, on whether all files
are written; then they gather sizes and checksums, and rank 0's thread adds the manifest and publishes. Until then the
checkpoint does not exist: a crash leaves a work folder, which the next save deletes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from megatron_lite.checkpoint.files import TensorToWrite, WrittenFile, logger
from megatron_lite.checkpoint.names import reason
from megatron_lite.checkpoint.space import host_copy_bytes
from megatron_lite.checkpoint.writing import Save, tensors_of
from megatron_lite.config import Config
from megatron_lite.distributed.agreement import together
from megatron_lite.errors import OutOfMemoryError
from megatron_lite.run.host import available_bytes

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed
    from megatron_lite.zero.multi_stage import MultiStage

_GIB = 2**30
_DONE, _WORKING, _FAILED = range(3)
T = TypeVar("T")


def pause_s(attempt: int) -> float:
    """Return the pause after failed attempt 1, 2, 3, ...: 1, 4, 16, then 60 s."""
    return float(min(4 ** (attempt - 1), 60))


@dataclass
class _Pending:
    save: Save
    job: Future[Any]  # writes this rank's file; then, on rank 0, publishes
    start_s: float
    copied: threading.Event
    blocked_s: float = 0.0
    written: list[WrittenFile] | None = None  # all ranks' files; None while they are written


class Finished(NamedTuple):
    """A published checkpoint."""

    folder: Path
    iteration: int
    num_bytes: int
    seconds: float  # since its start
    blocked_s: float  # time that training waited


class BackgroundSaves:
    """Asynchronous checkpointing: a copy of the shards in host memory, and at most one save in flight.

    Call `wait_for_copy` before anything changes the shards.

    retries: attempts to write a file after the first.
    """

    def __init__(self, model: MultiStage, distributed: Distributed, retries: int) -> None:
        self._distributed, self._retries = distributed, retries
        pinned = distributed.device.type == "cuda"
        self._copies = [
            torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).fill_(1) for tensor in tensors_of(model)
        ]  # filled, so that the memory is committed before the first save
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending: _Pending | None = None
        self._hurry = threading.Event()

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def begin(self, save: Save) -> None:
        """Start to copy and write the shards in the thread; `save` is prepared."""
        assert self._pending is None, "finish the save before"
        start_s, copied = time.perf_counter(), threading.Event()
        self._distributed.wait_for_device()  # the thread's stream does not wait for that of the last update
        job = self._pool.submit(self._copy_and_write, save, copied)
        self._pending = _Pending(save, job, start_s, copied, time.perf_counter() - start_s)

    def wait_for_copy(self) -> None:
        """Wait until the shards may change."""
        if self._pending is not None and not self._pending.copied.is_set():
            start_s = time.perf_counter()
            self._pending.copied.wait()
            self._pending.blocked_s += time.perf_counter() - start_s

    def advance(self) -> bool:
        """Advance the save without waiting; return whether `finish` would not wait. All ranks call this together."""
        if self._pending is None:
            return False
        job = self._pending.job
        state = _WORKING if not job.done() else _DONE if job.exception() is None else _FAILED
        state = self._distributed.agree_max(state)
        if state == _DONE and self._pending.written is None:
            self._publish(self._pending)
            return False
        return state != _WORKING

    def finish(self, hurry: bool = False) -> Finished | None:
        """Wait until the checkpoint is published; None if no save is pending. All ranks call this together.

        hurry: retry failed writes without a pause.

        Raises:
            StorageError: on every rank, if any rank could not write; older checkpoints are untouched.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        if hurry:
            self._hurry.set()
        save = pending.save
        try:
            written = self._publish(pending) if pending.written is None else pending.written
            save.confirm(pending.job.result)
        except Exception:
            save.abandon()
            raise
        num_bytes, seconds = sum(file.saved.size for file in written), time.perf_counter() - pending.start_s
        return Finished(save.folder, save.iteration, num_bytes, seconds, pending.blocked_s)

    def _copy_and_write(self, save: Save, copied: threading.Event) -> WrittenFile:
        """Copy this rank's shards and write its file, in the thread."""
        try:
            copies = list(zip(self._copies, save.tensors, strict=True))
            _copy_all(copies, self._distributed.device)
            save.tensors = [tensor._replace(read=partial(copy.view, -1)) for copy, tensor in copies]
        finally:
            copied.set()
        return self._insist(save, save.write)

    def _publish(self, pending: _Pending) -> list[WrittenFile]:
        """Gather sizes and checksums, and let rank 0's thread publish."""
        written = pending.written = pending.save.gather(pending.job.result)
        pending.job = self._pool.submit(self._insist, pending.save, partial(pending.save.complete, written))
        return written

    def _insist(self, save: Save, action: Callable[[], T]) -> T:
        """Run an action in the thread; retry it after a system error."""
        for attempt in range(1, self._retries + 1):
            try:
                return action()
            except OSError as error:
                text = "cannot write the checkpoint of iteration %d: %s; trying again in %.0f s (%d of %d)"
                logger.warning(text, save.iteration, reason(error), pause_s(attempt), attempt, self._retries)
            self._hurry.wait(pause_s(attempt))
        return action()


def _copy_all(copies: Sequence[tuple[Tensor, TensorToWrite]], device: torch.device) -> None:
    """Read tensors into host memory; on a GPU, on the thread's own stream, overlapped with training."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):  # None: nothing changes
        for copy, tensor in copies:
            _copy(tensor.read(), copy)
        if stream is not None:
            stream.synchronize()


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy a tensor to the host; on a CPU with NumPy, which, unlike torch, does not read the target first."""
    if source.device.type == "cpu":
        np.copyto(target.view(torch.uint8).numpy(), source.detach().contiguous().view(torch.uint8).numpy())
    else:
        target.copy_(source, non_blocking=True)


def open_background(config: Config, model: MultiStage, distributed: Distributed) -> BackgroundSaves | None:
    """Allocate the host memory of --async_checkpoint; None without it. All ranks call this together.

    Raises:
        OutOfMemoryError: on every rank, if the ranks of a machine need more than is left.
    """
    if not (own := host_copy_bytes(config, model)):
        return None

    def check_memory() -> None:
        needed, free = own * distributed.local_world_size, available_bytes()
        facts = f"{own / _GIB:.2f} GiB per rank, {needed / _GIB:.2f} GiB on this machine, of {free / _GIB:.2f} GiB free"
        if needed > free:
            raise OutOfMemoryError(
                f"--async_checkpoint=1 copies the weights and the optimizer state into host memory: {facts}; leave it "
                "out, or use more machines"
            )
        logger.info("asynchronous checkpoints: a copy in host memory, %s", facts)

    together(distributed, check_memory)  # no rank allocates before all have checked
    return together(distributed, lambda: BackgroundSaves(model, distributed, config.checkpoint.save_retries))
