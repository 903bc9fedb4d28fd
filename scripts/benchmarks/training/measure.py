"""How the benchmark measures: all configurations in turn, each turn of a few steps between two barriers."""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.seeds import derive_seed
from scripts.benchmarks.training import machine

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
        """(name, full weight), valid until the next one is asked for. All ranks iterate to the end."""
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
    peak_bytes: list[int] = field(default_factory=list)  # GPU memory of this configuration
    allocated_bytes: int = 0  # the same now
    books: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


class Rounds:
    """All configurations in turn until enough turns count.

    Side by side they are built at the start and live until the end. One at a time, each is built anew for every turn,
    warmed up, and freed afterwards; then a turn starts from the initial weights.
    """

    def __init__(
        self,
        names: Sequence[str],
        make: Callable[[str], Contestant],
        books: Callable[[Contestant], dict[str, Any]],
        options: argparse.Namespace,
        distributed: Distributed,
    ) -> None:
        self.records = {name: Record() for name in names}
        self.contestants: dict[str, Contestant] = {}
        self._make, self._books, self._options, self._distributed = make, books, options, distributed

    def run(self) -> Iterator[None]:
        """Measure, a round between two items. `records` holds the results, `contestants` what is still alive."""
        options, names = self._options, list(self.records)
        if not options.one_at_a_time:
            for name in names:
                self._build(name)
        warmup = 0 if options.one_at_a_time else options.warmup_turns
        for turn in range(warmup + options.turns * (1 if options.max_others is None else MAX_REPEATS)):
            first = turn % len(names)  # rotates, so that no configuration always follows the same one
            for name in names[first:] + names[:first]:
                if self.records[name].failure is None:
                    self._turn(name, turn, turn >= warmup)
            counted = min((sum(record.counts) for record in self._sound()), default=0)
            self._say(turn, counted)
            yield
            if counted >= options.turns or not self._sound():
                break

    def _sound(self) -> list[Record]:
        return [record for record in self.records.values() if record.failure is None]

    def _turn(self, name: str, turn: int, may_count: bool) -> None:
        options, record = self._options, self.records[name]
        if not options.one_at_a_time:
            self._timed(name, turn, may_count)
            return
        try:
            self._build(name)
            for index in range(options.warmup_turns * options.steps_per_turn):
                self.contestants[name].step(make_tokens(options, index, self._distributed))
            self._timed(name, turn + options.warmup_turns, may_count)
        except Exception as error:
            if self._distributed.world_size > 1:
                raise  # the other ranks wait in a collective
            record.failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
            print(f"benchmark: {name}: {record.failure}", file=sys.stderr, flush=True)
        self.contestants.pop(name, None)
        gc.collect()
        if self._distributed.device.type == "cuda":
            torch.cuda.empty_cache()

    def _build(self, name: str) -> None:
        before = allocated_bytes(self._distributed)
        self.contestants[name] = self._make(name)
        self.records[name].allocated_bytes = allocated_bytes(self._distributed) - before

    def _timed(self, name: str, turn: int, may_count: bool) -> None:
        options, record = self._options, self.records[name]
        first = turn * options.steps_per_turn
        steps = [make_tokens(options, first + index, self._distributed) for index in range(options.steps_per_turn)]
        if options.max_others is not None and may_count and self._distributed.rank == 0:
            machine.wait_until_quiet(options.max_others)
        timed_turn(self.contestants[name], record, steps, self._distributed)
        record.books = self._books(self.contestants[name])
        quiet = options.max_others is None or record.others[-1] <= options.max_others
        record.counts.append(may_count and quiet)

    def _say(self, turn: int, counted: int) -> None:
        sound = self._sound()
        if self._distributed.rank != 0 or not sound:
            return
        loss, load = sound[0].losses[-1], max(record.others[-1] for record in sound)
        line = f"benchmark: turn {turn + 1}: loss {loss:.6f}, others took up to {load:.0%}, {counted} turns count"
        print(line, file=sys.stderr, flush=True)


def allocated_bytes(distributed: Distributed) -> int:
    """GPU memory that tensors of this process take; 0 on a CPU."""
    return torch.cuda.memory_allocated() if distributed.device.type == "cuda" else 0


def timed_turn(
    contestant: Contestant, record: Record, steps: Sequence[Sequence[Tensor]], distributed: Distributed
) -> None:
    """Steps between two barriers; time stops when this rank is done, traffic is counted when all are."""
    on_gpu = distributed.device.type == "cuda"
    allocated = allocated_bytes(distributed)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    distributed.barrier()
    wire_before = machine.loopback_bytes()
    distributed.barrier()
    if on_gpu:
        torch.cuda.synchronize()
    cpu_before, busy_before, before = time.process_time(), machine.busy_seconds(), time.perf_counter()
    losses = [contestant.step(micro_batches) for micro_batches in steps]
    contestant.finish()
    if on_gpu:
        torch.cuda.synchronize()
    record.seconds.append((time.perf_counter() - before) / len(steps))
    distributed.barrier()
    cpu_s, elapsed_s = time.process_time() - cpu_before, time.perf_counter() - before
    busy_s = machine.busy_seconds() - busy_before if distributed.rank == 0 else 0.0
    wire_after = machine.loopback_bytes()
    wire = None if wire_before is None or wire_after is None else (wire_after - wire_before) / len(steps)
    record.wire_bytes.append(None if on_gpu else wire)
    if on_gpu:  # what others hold meanwhile does not count
        others = allocated - record.allocated_bytes
        record.peak_bytes.append(torch.cuda.max_memory_allocated() - others)
        record.allocated_bytes = allocated_bytes(distributed) - others
    own = torch.tensor([*losses, cpu_s, busy_s], dtype=torch.float64, device=distributed.device)
    *total_losses, total_cpu_s, total_busy_s = distributed.sum_in_rank_order(own).tolist()
    record.losses += [loss / distributed.world_size for loss in total_losses]
    record.cpu_seconds.append(total_cpu_s / len(steps))
    record.others.append(max(0.0, total_busy_s - total_cpu_s) / (elapsed_s * (os.cpu_count() or 1)))
    # elapsed_s differs a little between ranks; all of them have to count the same turns.
    record.others[-1] = float(distributed.broadcast_object(record.others[-1]))


def make_tokens(options: argparse.Namespace, step: int, distributed: Distributed) -> list[Tensor]:
    """This rank's micro-batches of one step, (b, s + 1) each."""
    generator = torch.Generator().manual_seed(derive_seed(options.seed, "benchmark", step, distributed.rank))
    shape = (options.micro_batch_size, options.sequence_length + 1)
    return [torch.randint(0, options.vocab_size, shape, generator=generator) for _ in range(options.micro_batches)]


def largest_difference(losses: Sequence[Sequence[float]]) -> float:
    """The largest difference between any two configurations at any step."""
    differences = [max(values) - min(values) for values in zip(*losses, strict=True)]
    return max(differences, default=0.0) if all(map(math.isfinite, differences)) else math.inf
