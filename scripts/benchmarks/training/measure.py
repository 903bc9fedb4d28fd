"""Measurement: rows take turns of a few steps between two barriers; counters of the machine are read around them."""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

import megatron_lite
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.seeds import derive_seed
from scripts.benchmarks.common import busy_seconds, cores

# --max_others gives up after this many times --turns.
MAX_REPEATS = 6


class Contestant(Protocol):
    """A configuration that trains step by step."""

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Train one step on this rank's micro-batches (b, s + 1); return its share of the mean loss, ()."""
        ...

    def finish(self) -> None:
        """Wait for everything the last step left in flight, so that it costs the next configuration no time."""
        ...

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full weight), valid until the next item. Every rank must iterate to the end."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """Return the state memory of this rank by kind."""
        ...


@dataclass
class Record:
    """Measurements of one row on this rank, per step; one value a turn, warm-up included."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    wire_bytes: list[float | None] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of every step
    others: list[float] = field(default_factory=list)  # share of the CPUs that other processes took meanwhile
    counts: list[bool] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)  # GPU memory of this row
    allocated_bytes: int = 0  # GPU memory that this row holds now
    books: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


class Rounds:
    """All rows in turn until enough turns count.

    Side by side, rows are built at the start and live until the end. One at a time, each row is rebuilt for every turn,
    warmed up, and freed afterwards, so every turn starts from the initial weights.
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
        """Measure, yielding after every round. `records` holds the results, `contestants` the rows still alive."""
        options, names = self._options, list(self.records)
        if not options.one_at_a_time:
            for name in names:
                self._build(name)
        warmup = 0 if options.one_at_a_time else options.warmup_turns
        for turn in range(warmup + options.turns * (1 if options.max_others is None else MAX_REPEATS)):
            first = turn % len(names)  # rotates, so that no row always follows the same one
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
            wait_until_quiet(options.max_others)
        timed_turn(self.contestants[name], record, steps, self._distributed)
        record.books = self._books(self.contestants[name])
        quiet = options.max_others is None or record.others[-1] <= options.max_others
        record.counts.append(may_count and quiet)

    def _say(self, turn: int, counted: int) -> None:
        sound = self._sound()
        if self._distributed.rank != 0 or not sound:
            return
        loss, load = sound[0].losses[-1], max(record.others[-1] for record in sound)
        line = f"benchmark: turn {turn + 1}: loss {loss:.6f}, other processes up to {load:.0%}, {counted} turns count"
        print(line, file=sys.stderr, flush=True)


def timed_turn(
    contestant: Contestant, record: Record, steps: Sequence[Sequence[Tensor]], distributed: Distributed
) -> None:
    """Time some steps between two barriers: the time until this rank is done, and the traffic until all are."""
    on_gpu = distributed.device.type == "cuda"
    allocated = allocated_bytes(distributed)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    distributed.barrier()
    wire_before = loopback_bytes()
    distributed.barrier()
    if on_gpu:
        torch.cuda.synchronize()
    cpu_before, busy_before, before = time.process_time(), busy_seconds(), time.perf_counter()
    losses = [contestant.step(micro_batches) for micro_batches in steps]
    contestant.finish()
    if on_gpu:
        torch.cuda.synchronize()
    record.seconds.append((time.perf_counter() - before) / len(steps))
    distributed.barrier()
    cpu_s, elapsed_s = time.process_time() - cpu_before, time.perf_counter() - before
    busy_s = busy_seconds() - busy_before if distributed.rank == 0 else 0.0
    wire_after = loopback_bytes()
    wire = None if wire_before is None or wire_after is None else (wire_after - wire_before) / len(steps)
    record.wire_bytes.append(None if on_gpu else wire)
    if on_gpu:  # without the memory that other rows hold meanwhile
        held_by_others = allocated - record.allocated_bytes
        record.peak_bytes.append(torch.cuda.max_memory_allocated() - held_by_others)
        record.allocated_bytes = allocated_bytes(distributed) - held_by_others
    own = torch.tensor([*losses, cpu_s, busy_s], dtype=torch.float64, device=distributed.device)
    *total_losses, total_cpu_s, total_busy_s = distributed.sum_in_rank_order(own).tolist()
    record.losses += [loss / distributed.world_size for loss in total_losses]
    record.cpu_seconds.append(total_cpu_s / len(steps))
    # elapsed_s differs a little between ranks, but all ranks must count the same turns.
    others = share_of_cpus(total_busy_s - total_cpu_s, elapsed_s)
    record.others.append(float(distributed.broadcast_object(others)))


def make_tokens(options: argparse.Namespace, step: int, distributed: Distributed) -> list[Tensor]:
    """Draw this rank's micro-batches of one step, (b, s + 1) each; ranks that share layers draw the same."""
    generator = torch.Generator().manual_seed(derive_seed(options.seed, "benchmark", step, distributed.data.rank))
    shape = (options.micro_batch_size, options.sequence_length + 1)
    return [torch.randint(0, options.vocab_size, shape, generator=generator) for _ in range(options.micro_batches)]


def largest_difference(losses: Sequence[Sequence[float]]) -> float:
    """Return the largest difference between any two rows at any step; infinity if a loss is not finite."""
    differences = [max(values) - min(values) for values in zip(*losses, strict=True)]
    return max(differences, default=0.0) if all(map(math.isfinite, differences)) else math.inf


# -- the machine -----------------------------------------------------------------------------------------------------


def allocated_bytes(distributed: Distributed) -> int:
    """Return the GPU memory that tensors of this process take; 0 on a CPU."""
    return torch.cuda.memory_allocated() if distributed.device.type == "cuda" else 0


def loopback_bytes() -> int | None:
    """Return the bytes sent over the loopback device since boot by all processes, or None if unknown."""
    try:
        with open("/proc/net/dev", encoding="ascii") as file:
            fields = {name.strip(): values.split() for name, _, values in (line.partition(":") for line in file)}
        return int(fields["lo"][8])
    except (OSError, KeyError, IndexError, ValueError):
        return None


def peak_rss_bytes() -> int | None:
    """Return the peak resident memory of this process, or None if unknown."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            (line,) = [line for line in file if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return None


def share_of_cpus(cpu_s: float, elapsed_s: float) -> float:
    """Return CPU seconds as a share of the cores that this process may use during some elapsed time."""
    return max(0.0, cpu_s) / (elapsed_s * len(cores()))


def wait_until_quiet(max_busy: float, at_most_s: float = 60.0, sample_s: float = 0.5) -> None:
    """Sleep until all processes together use less than a share of the CPUs, or the time is up."""
    deadline, busy_s = time.monotonic() + at_most_s, busy_seconds()
    while time.monotonic() < deadline:
        time.sleep(sample_s)
        before, busy_s = busy_s, busy_seconds()
        if share_of_cpus(busy_s - before, sample_s) <= max_busy:
            return


def versions() -> dict[str, str]:
    """Return the versions of everything installed that computes."""
    known = {"python": platform.python_version(), "torch": torch.__version__}
    known["megatron_lite"] = megatron_lite.__version__
    if torch.version.cuda is not None:
        known |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    for name in ("triton", "transformers", "liger_kernel", "torchtitan"):
        try:
            known[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known


def describe(device: torch.device, load_before: Sequence[float]) -> dict[str, Any]:
    """Return the name of the processor or GPU and the load averages of the machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    if device.type == "cpu" and os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
        name = names[0] if names else name
    return {"device": name, "cores": len(cores()), "load_before": load_before, "load_after": os.getloadavg()}


def set_switches(threads: int, fp32_matmul: str) -> None:
    """Set the process-wide switches, which apply to all rows."""
    torch.set_num_threads(threads)
    if fp32_matmul == "onednn":
        # Rounds to bf16 only where the CPU has AMX.
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    elif fp32_matmul == "tf32":
        torch.set_float32_matmul_precision("high")
    # Rows share the code of their blocks, so torch.compile must not give up on a row because it has compiled many.
    torch._dynamo.config.recompile_limit = 64


def is_crowded(parameters: int, rows: int, device: torch.device) -> bool:
    """Return whether this many rows, of at least 18 bytes per parameter, may not fit the GPU side by side."""
    if device.type != "cuda":
        return False
    return 18 * parameters * rows > 0.5 * torch.cuda.get_device_properties(device).total_memory
