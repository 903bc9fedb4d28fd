"""Speeds of the collectives of a step, alone and overlapped with products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_lite.distributed.process_group import Distributed

SMALL_NUMEL, LARGE_NUMEL = {"cpu": 2**10, "cuda": 2**14}, {"cpu": 2**21, "cuda": 2**26}  # of a full buffer, fp32
TURNS = 7
SIDE = {"cpu": 512, "cuda": 8192}  # of the square products that overlap with a collective


def measure_collectives(distributed: Distributed) -> dict[str, Any]:
    """Return latency and bytes/s of gathers and reductions, and the fraction that overlaps; nothing for one rank."""
    if distributed.world_size == 1:
        return {"collectives": {}, "overlap": 0.0}
    found, hidden = {}, []
    for kind, start in (("gather", distributed.all_gather), ("reduce", distributed.reduce_scatter)):
        seconds = []
        for numel in (SMALL_NUMEL, LARGE_NUMEL):
            size = numel[distributed.device.type] // distributed.world_size * distributed.world_size
            buffer = torch.zeros(size, device=distributed.device)
            seconds.append(_seconds(distributed, lambda: start(buffer).wait()))  # noqa: B023
        sent = buffer.nbytes * (distributed.world_size - 1) / distributed.world_size
        found[kind] = {"latency_s": seconds[0], "bytes_per_s": sent / max(seconds[1] - seconds[0], 1e-9)}
        hidden.append(_hidden_share(distributed, lambda: start(buffer), seconds[1]))  # noqa: B023
    return {"collectives": found, "overlap": min(hidden)}


def _hidden_share(distributed: Distributed, start: Callable[[], Any], alone_s: float) -> float:
    """Return the fraction of a collective's time that is hidden by overlapped products."""
    side = SIDE[distributed.device.type]
    a, b = (torch.ones(side, side, device=distributed.device) for _ in range(2))
    out = torch.empty_like(a)
    once_s = _seconds(distributed, lambda: torch.mm(a, b, out=out))
    times = max(1, round(1.5 * alone_s / once_s))

    def multiply() -> Tensor:
        for _ in range(times):
            torch.mm(a, b, out=out)
        return out

    def both() -> None:
        work = start()
        multiply()
        work.wait()

    products_s, both_s = _seconds(distributed, multiply), _seconds(distributed, both)
    return min(max((products_s + alone_s - both_s) / alone_s, 0.0), 1.0)


def _seconds(distributed: Distributed, call: Callable[[], Any]) -> float:
    """Return the median time of a call that all ranks start together."""
    times = []
    for turn in range(TURNS + 1):
        distributed.barrier()
        distributed.wait_for_device()
        start_s = time.perf_counter()
        call()
        distributed.wait_for_device()
        if turn:
            times.append(time.perf_counter() - start_s)
    return statistics.median(times)
