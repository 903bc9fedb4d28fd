"""Out-of-memory errors: options that save memory, and on a GPU a snapshot of the allocations."""

from __future__ import annotations

import contextlib

from megatron_lite.config import Config
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import LESS_MEMORY, OUT_OF_MEMORY, OutOfMemoryError, Remedy, as_run_error
from megatron_lite.monitor.logging import get_logger, log_both
from megatron_lite.monitor.memory_history import write_snapshot
from megatron_lite.planner.auto import device_memory_bytes
from megatron_lite.planner.search import Search, less_memory, remedies
from megatron_lite.run.experiment import Experiment

_LESS_HOST_MEMORY = "try fewer --num_workers, --async_checkpoint=0, or fewer ranks per machine"


def with_remedies(
    error: BaseException,
    config: Config,
    asked: Config | None,
    distributed: Distributed | None,
    experiment: Experiment | None,
) -> BaseException:
    """Return the error, or an out-of-memory error with remedies and a memory snapshot.

    config: resolved. asked: as typed.
    """
    expected = as_run_error(error)
    if not isinstance(expected, OutOfMemoryError) or distributed is None or not str(expected).startswith(OUT_OF_MEMORY):
        return error  # another kind of error, or one of our own messages, which name a fix already
    reason, on_gpu = str(expected).removesuffix(f"; {LESS_MEMORY}"), distributed.device.type == "cuda"
    snapshot, found, advice = "", list[Remedy](), ""
    if on_gpu and (isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)):
        advice = _LESS_HOST_MEMORY  # the host ran out of memory, not the device
    else:
        if on_gpu and experiment is not None and experiment.root is not None:
            path, failure = write_snapshot(experiment.root, distributed)
            snapshot = "" if failure else str(path)
        with contextlib.suppress(Exception):  # memory is scarce: a failed search must not hide the error
            device_bytes = device_memory_bytes(distributed.device, distributed.local_world_size)
            batch_size, device_type = config.batch.batch_size or 1, distributed.device.type
            search = Search(asked or config, batch_size, distributed.world_size, device_type, device_bytes)
            found = remedies(search)
            advice = less_memory(search)
    explained = OutOfMemoryError(f"{reason}; {advice or LESS_MEMORY}")
    explained.remedies, explained.snapshot, explained.agreed = found, snapshot, expected.agreed
    log_both(get_logger(), console="", file="\n".join([f"ERROR: {explained}", *explained.lines()]))
    return explained
