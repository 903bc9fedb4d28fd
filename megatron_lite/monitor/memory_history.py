"""Snapshot GPU memory: every allocation of the first iterations, and the allocations at
out-of-memory.

Torch writes these files as pickles, for https://pytorch.org/memory_viz; nothing here reads one.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from megatron_lite.config import Config
from megatron_lite.distributed.process_group import Distributed

# Torch keeps the newest events, each with its Python stack: several KB each, so 200 MB or so at
# most.
MAX_EVENTS = 50_000


def open_history(
    config: Config, root: Path | None, distributed: Distributed, logger: logging.Logger
) -> MemoryHistory | None:
    """Record every allocation from now on for --memory_snapshot; return None if nothing is
    recorded.

    root: the experiment directory.
    """
    iterations, ranks = config.profiling.memory_snapshot, config.profiling.profile_ranks
    if not iterations or root is None or (ranks and distributed.rank not in ranks):
        return None
    if distributed.device.type != "cuda":
        if config.distributed.device != "cpu":  # validation has warned about an explicit CPU
            logger.warning(
                "--memory_snapshot=%d has no effect: it is for CUDA, and this run is on CPU",
                iterations,
            )
        return None
    return MemoryHistory(iterations, root, distributed, logger)


class MemoryHistory:
    """A GPU's allocations since the start, written after a number of iterations or at an earlier
    end."""

    def __init__(
        self, iterations: int, root: Path, distributed: Distributed, logger: logging.Logger
    ) -> None:
        self._root = root
        self._distributed = distributed
        self._logger = logger
        self._iterations_left = iterations  # 0: no longer recording
        # C++ stacks would double the time and the size.
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_EVENTS)

    def end_iteration(self) -> None:
        """Count an iteration; after the last one, write the file and stop recording."""
        if self._iterations_left == 1:
            self.finish()
        self._iterations_left -= 1

    def finish(self) -> None:
        """Write the file and stop recording; a second call does nothing."""
        if self._iterations_left <= 0:
            return
        self._iterations_left = 0
        path, reason = write_snapshot(self._root, self._distributed)
        torch.cuda.memory._record_memory_history(None)
        if reason:
            self._logger.warning("--memory_snapshot: cannot write %s: %s", path, reason)
        else:
            self._logger.info(
                "memory snapshot in %s; https://pytorch.org/memory_viz shows it", path
            )


def write_snapshot(root: Path, distributed: Distributed) -> tuple[Path, str]:
    """Write the rank's GPU allocations, with their history since recording began. Never raises.

    Returns:
        The file, and why it could not be written: "" if it was.
    """
    path = root / "profiles" / f"memory_{distributed.rank}.pickle"
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(partial))
        partial.replace(path)
    except Exception as error:  # private functions of torch, on a possibly full device
        return path, f"{type(error).__name__}: {error}"
    return path, ""
