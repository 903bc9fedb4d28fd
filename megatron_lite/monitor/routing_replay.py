"""Record the experts that each token chose in training, or choose them as recorded:
--moe_replay_routing.

A file a router contains K numbers for each position of each sample, in the order of the samples in
training: the chosen experts + 1, the best first, uint16 little-endian; 0: not recorded. Ranks,
micro-batches and batch sizes change nothing in it. A record reads chosen experts on the host: it is
a means to compare layouts and to debug.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_lite.config import Config
from megatron_lite.errors import DataError, UsageError


class RoutingReplay:
    """The record of all routers. reads: whether it exists; otherwise it is written."""

    def __init__(self, config: Config, reads: bool) -> None:
        model = config.model
        self._folder, self._reads = Path(config.run.moe_replay_routing or ""), reads
        self._length, self._experts = config.batch.sequence_length, model.num_experts
        self.sample_bytes = 2 * self._length * model.num_experts_per_token  # of a sample
        self._suffix = f"{self._experts}x{model.num_experts_per_token}x{self._length}"

    def __call__(self, first: int, router: str, chosen: Tensor) -> Tensor:
        """Return the experts of whole samples from index `first` on, (t, K) int64, the best first.

        chosen: what the router would choose.

        Raises:
            DataError: if the record lacks a sample.
        """
        path, offset = self.path(router), first * self.sample_bytes
        if self._reads:
            values = np.fromfile(path, "<u2", chosen.numel(), offset=offset)
            if len(values) < chosen.numel() or np.any((values < 1) | (values > self._experts)):
                count = len(chosen) // self._length
                raise DataError(f"{path}: samples {first} to {first + count - 1} are not all in it")
            recorded = torch.from_numpy(values.astype(np.int64) - 1)
            return recorded.view_as(chosen).to(chosen.device)
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            os.pwrite(file, (chosen.cpu().numpy() + 1).astype("<u2").tobytes(), offset)
        finally:
            os.close(file)
        return chosen

    def path(self, router: str) -> Path:
        """Return a router's file."""
        return self._folder / f"{router}.{self._suffix}.bin"


def open_replay(config: Config, samples: int) -> bool:
    """Prepare the folder on rank 0; return whether it has a record, which must have `samples`.

    Raises:
        UsageError: if the record does not fit the run, or the folder cannot be made or read.
    """
    folder = Path(config.run.moe_replay_routing or "")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            return False
    except OSError as error:
        rule = f"{error.strerror}; name a folder that can be written"
        raise UsageError(f"--moe_replay_routing={folder}: {rule}") from None
    replay = RoutingReplay(config, True)
    for index in filter(config.model.has_experts, range(config.model.num_layers)):
        path = replay.path(f"blocks.{index}.mlp.router")
        found = path.stat().st_size // replay.sample_bytes if path.is_file() else 0
        if found < samples:
            raise UsageError(
                f"--moe_replay_routing={folder}: {path.name} has {found:,} of {samples:,} samples; replay with the "
                "same experts and no more samples, or name an empty folder to record this run"
            )
    return True
