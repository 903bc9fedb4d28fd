"""The end of a run that ran out of memory: the options that save some, and on a GPU a picture of what was allocated."""

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
    """Return the error itself, or an error about memory with everything that helps to need less.

    config: of the run, resolved. asked: the same as typed.
    """
    expected = as_run_error(error)
    if not isinstance(expected, OutOfMemoryError) or distributed is None or not str(expected).startswith(OUT_OF_MEMORY):
        return error  # of another kind, or in the program's own words, which need no more
    reason, on_gpu = str(expected).removesuffix(f"; {LESS_MEMORY}"), distributed.device.type == "cuda"
    snapshot, found, advice = "", list[Remedy](), ""
    if on_gpu and _is_of_host(error):
        advice = _LESS_HOST_MEMORY  # options of the device do not help the host
    else:
        if on_gpu and experiment is not None and experiment.root is not None:
            path, failure = write_snapshot(experiment.root, distributed)
            snapshot = "" if failure else str(path)
        with contextlib.suppress(Exception):  # memory is scarce: the error matters more than the advice
            search = _search(config, config if asked is None else asked, distributed)
            found = remedies(search)
            advice = less_memory(search)
    explained = OutOfMemoryError(f"{reason}; {advice or LESS_MEMORY}")
    explained.remedies, explained.snapshot, explained.agreed = found, snapshot, expected.agreed
    log_both(get_logger(), console="", file="\n".join([f"ERROR: {explained}", *explained.lines()]))
    return explained


def _is_of_host(error: BaseException) -> bool:
    """Whether the host's memory was too small, not the device's."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def _search(config: Config, asked: Config, distributed: Distributed) -> Search:
    device_bytes = device_memory_bytes(distributed.device, distributed.local_world_size)
    batch_size = config.batch.batch_size or 1
    return Search(asked, batch_size, distributed.world_size, distributed.device.type, device_bytes)
