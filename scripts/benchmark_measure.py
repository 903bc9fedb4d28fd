"""How scripts/benchmark.py measures: all configurations in turn, each turn of a few steps between two barriers."""

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

# --max_others gives up after this many times --turns.
MAX_REPEATS = 6


class Contestant(Protocol):
    """Anything that can be trained step by step."""

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """One update from this rank's micro-batches (b, s + 1); returns its share of the mean loss, ()."""
        ...

    def finish(self) -> None:
        """Wait for what the last step has left under way, so that it takes no time from whoever is next."""
        ...

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(global name, full weight), valid until the next one is asked for. All ranks iterate to the end."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """State memory of this rank by kind."""
        ...


@dataclass
class Record:
    """What was measured of one configuration on this rank, per step: a value a turn, warm-up included."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    wire_bytes: list[float | None] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of every step
    others: list[float] = field(default_factory=list)  # share of the CPUs that other processes took meanwhile
    counts: list[bool] = field(default_factory=list)


def measure(
    contestants: dict[str, Contestant], settings: dict[str, Any], max_others: float | None, distributed: Distributed
) -> dict[str, Record]:
    """All configurations in turn until enough turns count."""
    records = {name: Record() for name in contestants}
    names = list(contestants)
    wanted, warmup, length = settings["turns"], settings["warmup_turns"], settings["steps_per_turn"]
    for turn in range(warmup + wanted * (1 if max_others is None else MAX_REPEATS)):
        steps = [make_tokens(settings, turn * length + index, distributed) for index in range(length)]
        first = turn % len(names)  # rotates, so that no configuration always follows the same one
        for name in names[first:] + names[:first]:
            record = records[name]
            if max_others is not None and turn >= warmup and distributed.rank == 0:
                report.wait_until_quiet(max_others)
            timed_turn(contestants[name], record, steps, distributed)
            record.counts.append(turn >= warmup and (max_others is None or record.others[-1] <= max_others))
        counted = min(sum(record.counts) for record in records.values())
        if distributed.rank == 0:
            loss, load = records[names[0]].losses[-1], max(record.others[-1] for record in records.values())
            line = f"benchmark: turn {turn + 1}: loss {loss:.6f}, others took up to {load:.0%}, {counted} turns count"
            print(line, file=sys.stderr, flush=True)
        if counted >= wanted:
            break
    return records


def timed_turn(
    contestant: Contestant, record: Record, steps: Sequence[Sequence[Tensor]], distributed: Distributed
) -> None:
    """Steps between two barriers; time stops when this rank is done, traffic is counted when all are."""
    distributed.barrier()
    wire_before = report.loopback_bytes()
    distributed.barrier()
    cpu_before, busy_before, before = time.process_time(), report.busy_seconds(), time.perf_counter()
    losses = [contestant.step(micro_batches) for micro_batches in steps]
    contestant.finish()
    if distributed.device.type == "cuda":
        torch.cuda.synchronize()
    record.seconds.append((time.perf_counter() - before) / len(steps))
    distributed.barrier()
    cpu_s, elapsed_s = time.process_time() - cpu_before, time.perf_counter() - before
    busy_s = report.busy_seconds() - busy_before if distributed.rank == 0 else 0.0
    wire_after = report.loopback_bytes()
    wire = None if wire_before is None or wire_after is None else (wire_after - wire_before) / len(steps)
    record.wire_bytes.append(wire)
    own = torch.tensor([*losses, cpu_s, busy_s], dtype=torch.float64, device=distributed.device)
    *total_losses, total_cpu_s, total_busy_s = distributed.sum_in_rank_order(own).tolist()
    record.losses += [loss / distributed.world_size for loss in total_losses]
    record.cpu_seconds.append(total_cpu_s / len(steps))
    record.others.append(max(0.0, total_busy_s - total_cpu_s) / (elapsed_s * (os.cpu_count() or 1)))
    # elapsed_s differs a little between ranks; all of them have to count the same turns.
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
