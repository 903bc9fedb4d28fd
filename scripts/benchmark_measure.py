"""How scripts/benchmark.py measures: all configurations in turn, step by step, each step between two barriers."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import benchmark_report as report
import torch
from torch import Tensor

from megatron_lite.distributed import Distributed
from megatron_lite.seeds import derive_seed

# --max_others gives up after this many times --steps.
MAX_REPEATS = 6


class Contestant(Protocol):
    """Anything that can be trained step by step."""

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """One update from this rank's micro-batches (b, s + 1); returns its share of the mean loss, ()."""
        ...

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(global name, full weight), valid until the next one is asked for. All ranks iterate to the end."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """State memory of this rank by kind."""
        ...


@dataclass
class Record:
    """What was measured of one configuration on this rank, a value a step, warm-up included."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    wire_bytes: list[int | None] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)  # share of the CPUs that other processes took meanwhile
    counts: list[bool] = field(default_factory=list)


def measure(
    contestants: dict[str, Contestant], settings: dict[str, Any], max_others: float | None, distributed: Distributed
) -> dict[str, Record]:
    """All configurations in turn, step by step, until enough steps count."""
    records = {name: Record() for name in contestants}
    names = list(contestants)
    wanted, warmup = settings["steps"], settings["warmup_steps"]
    for step in range(warmup + wanted * (1 if max_others is None else MAX_REPEATS)):
        micro_batches = make_tokens(settings, step, distributed)
        first = step % len(names)  # rotates, so that no configuration always follows the same one
        for name in names[first:] + names[:first]:
            record = records[name]
            if max_others is not None and step >= warmup and distributed.rank == 0:
                report.wait_until_quiet(max_others)
            timed_step(contestants[name], record, micro_batches, distributed)
            record.counts.append(step >= warmup and (max_others is None or record.others[-1] <= max_others))
        counted = min(sum(record.counts) for record in records.values())
        if distributed.rank == 0:
            loss, load = records[names[0]].losses[-1], max(record.others[-1] for record in records.values())
            line = f"benchmark: step {step + 1}: loss {loss:.6f}, others took up to {load:.0%}, {counted} steps count"
            print(line, file=sys.stderr, flush=True)
        if counted >= wanted:
            break
    return records


def timed_step(
    contestant: Contestant, record: Record, micro_batches: Sequence[Tensor], distributed: Distributed
) -> None:
    """One step between two barriers; time stops when this rank is done, traffic is counted when all are."""
    distributed.barrier()
    wire_before = report.loopback_bytes()
    distributed.barrier()
    cpu_before, busy_before, before = time.process_time(), report.busy_seconds(), time.perf_counter()
    loss = contestant.step(micro_batches)
    if distributed.device.type == "cuda":
        torch.cuda.synchronize()
    record.seconds.append(time.perf_counter() - before)
    distributed.barrier()
    cpu_s, elapsed_s = time.process_time() - cpu_before, time.perf_counter() - before
    busy_s = report.busy_seconds() - busy_before if distributed.rank == 0 else 0.0
    wire_after = report.loopback_bytes()
    record.wire_bytes.append(None if wire_before is None or wire_after is None else wire_after - wire_before)
    own = torch.tensor([loss.double(), cpu_s, busy_s], dtype=torch.float64, device=distributed.device)
    total_loss, total_cpu_s, total_busy_s = distributed.sum_in_rank_order(own).tolist()
    record.losses.append(total_loss / distributed.world_size)
    record.cpu_seconds.append(total_cpu_s)
    record.others.append(max(0.0, total_busy_s - total_cpu_s) / (elapsed_s * (os.cpu_count() or 1)))
    # elapsed_s differs a little between ranks; all of them have to count the same steps.
    record.others[-1] = float(distributed.broadcast_object(record.others[-1]))


def make_tokens(settings: dict[str, Any], step: int, distributed: Distributed) -> list[Tensor]:
    """This rank's micro-batches of one step, (b, s + 1) each."""
    generator = torch.Generator().manual_seed(derive_seed(settings["seed"], "benchmark", step, distributed.rank))
    shape = (settings["micro_batch_size"], settings["sequence_length"] + 1)
    return [
        torch.randint(0, settings["vocab_size"], shape, generator=generator) for _ in range(settings["micro_batches"])
    ]


def largest_difference(losses: Sequence[Sequence[float]]) -> float:
    """The largest difference between any two configurations at any step."""
    differences = [max(values) - min(values) for values in zip(*losses, strict=True)]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf
