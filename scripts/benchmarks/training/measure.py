"""Turns of training rows: steps between two barriers, with the machine's counters read before and
after."""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.seeds import derive_seed
from scripts.benchmarks.processor import Load, load, wait_until_quiet
from scripts.benchmarks.turns import Figures, Turns


class Contestant:
    """A configuration that trains step by step; this one trains nothing and holds no state."""

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Train one step on this rank's micro-batches (b, s + 1); return its share of the mean
        loss, ()."""
        return torch.zeros(())

    def finish(self) -> None:
        """Wait for all work that the last step left in flight, so that it does not slow the next
        configuration."""

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full weight), valid until the next item. Every rank must iterate to the
        end."""
        return iter(())

    def books(self) -> dict[str, Any]:
        """Return figures that need no measurement: `state_bytes_by_kind` of this rank, and
        others."""
        return {"state_bytes_by_kind": {}}


class Rounds:
    """Interleaved turns of all rows.

    By default, all rows are built at the start and stay alive until the end. With one_at_a_time,
    each row is rebuilt for every turn, warmed up, and freed afterwards, so that every turn starts
    from the initial weights.
    """

    def __init__(
        self,
        names: Sequence[str],
        make: Callable[[str], Contestant],
        options: argparse.Namespace,
        distributed: Distributed,
    ) -> None:
        self.contestants: dict[str, Contestant] = {}  # the rows still alive
        self.books: dict[str, dict[str, Any]] = {}
        self._names = names
        self._make = make
        self._options = options
        self._distributed = distributed
        self._allocated: dict[str, int] = {}  # GPU memory that each row holds
        self.turns = Turns(
            names,
            self._rebuilt if options.one_at_a_time else self._timed,
            options.turns,
            main="step_s",
            warm_up=0 if options.one_at_a_time else options.warmup_turns,
            max_others=options.max_others,
            # With several ranks the others would wait in a collective.
            failures=(Exception,) if options.one_at_a_time and distributed.world_size == 1 else (),
            prints=distributed.rank == 0,
        )

    def run(self) -> Iterator[bool]:
        """Measure, yielding after every turn whether it completes a round."""
        if not self._options.one_at_a_time:
            for name in self._names:
                self._build(name)
        yield from self.turns.run_turns()

    def _rebuilt(self, name: str, turn: int) -> Figures:
        options, before = self._options, torch.cuda.memory_allocated()
        try:
            self._build(name)
            for index in range(options.warmup_turns * options.steps_per_turn):
                self.contestants[name].step(make_tokens(options, index, self._distributed))
            # with moments that the first step allocates
            self._allocated[name] = torch.cuda.memory_allocated() - before
            return self._timed(name, turn + options.warmup_turns)
        finally:
            self.contestants.pop(name, None)
            gc.collect()
            torch.cuda.empty_cache()
            torch.use_deterministic_algorithms(False)  # set by deterministic rows
            torch.backends.cuda.enable_cudnn_sdp(True)

    def _build(self, name: str) -> None:
        before = torch.cuda.memory_allocated()  # 0 on a CPU
        self.contestants[name] = self._make(name)
        self._allocated[name] = torch.cuda.memory_allocated() - before

    def _timed(self, name: str, turn: int) -> Figures:
        options, distributed = self._options, self._distributed
        first = turn * options.steps_per_turn
        steps = [
            make_tokens(options, first + index, distributed)
            for index in range(options.steps_per_turn)
        ]
        if (
            options.max_others is not None
            and turn >= options.warmup_turns
            and distributed.rank == 0
        ):
            wait_until_quiet(options.max_others)
        held_by_others = torch.cuda.memory_allocated() - self._allocated[name]
        figures = timed_turn(self.contestants[name], steps, distributed)
        if distributed.device.type == "cuda":
            figures["peak_bytes"] = max(
                distributed.gather_objects(torch.cuda.max_memory_allocated() - held_by_others)
            )
            self._allocated[name] = torch.cuda.memory_allocated() - held_by_others
        self.books[name] = self.contestants[name].books()
        return figures


def timed_turn(
    contestant: Contestant, steps: Sequence[Sequence[Tensor]], distributed: Distributed
) -> Figures:
    """Time some steps between two barriers; return the same figures on every rank.

    Step time is the maximum over ranks. Traffic counts until all ranks are done.
    """
    on_gpu = distributed.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    distributed.barrier()
    wire_before = loopback_bytes()
    distributed.barrier()
    if on_gpu:
        torch.cuda.synchronize()
    before = load()
    losses = [contestant.step(micro_batches) for micro_batches in steps]
    contestant.finish()
    if on_gpu:
        torch.cuda.synchronize()
    step_s = (time.perf_counter() - before.elapsed_s) / len(steps)
    distributed.barrier()
    span, wire_after = load().since(before), loopback_bytes()
    known = wire_before is not None and wire_after is not None and not on_gpu
    wire = (wire_after or 0) - (wire_before or 0) if known else None
    ranks = distributed.gather_objects([step_s, span, wire, [float(loss) for loss in losses]])
    # rank 0's view of the machine, because all ranks must count the same turns
    _, first, wire, _ = ranks[0]
    own_s = sum(Load(*rank[1]).own_s for rank in ranks)
    return {
        "step_s": max(rank[0] for rank in ranks),
        "cpu_s": own_s / len(steps),
        "others": Load(*first)._replace(own_s=own_s).others,
        "wire_bytes": None if wire is None else wire / len(steps),
        "losses": [
            sum(one) / len(ranks) for one in zip(*(rank[-1] for rank in ranks), strict=True)
        ],
    }


def make_tokens(options: argparse.Namespace, step: int, distributed: Distributed) -> list[Tensor]:
    """Draw this rank's micro-batches of one step, (b, s + 1) each; tensor-parallel ranks draw the
    same."""
    generator = torch.Generator().manual_seed(
        derive_seed(options.seed, "benchmark", step, distributed.data.rank)
    )
    shape = (options.micro_batch_size, options.sequence_length + 1)
    pinned = distributed.device.type == "cuda"
    tokens = (
        torch.randint(0, options.vocab_size, shape, generator=generator)
        for _ in range(options.micro_batches)
    )
    return [one.pin_memory() if pinned else one for one in tokens]  # as the data loader does


def largest_difference(losses: Sequence[Sequence[float]]) -> float:
    """Return the largest loss difference between any two rows at any step; infinity if a loss is
    not finite.

    Counts the steps that all rows have made.
    """
    differences = [max(values) - min(values) for values in zip(*losses, strict=False)]
    return max(differences, default=0.0) if all(map(math.isfinite, differences)) else math.inf


def loopback_bytes() -> int | None:
    """Return the bytes sent over the loopback device since boot by all processes, or None if
    unknown."""
    try:
        with open("/proc/net/dev", encoding="ascii") as file:
            fields = {
                name.strip(): values.split()
                for name, _, values in (line.partition(":") for line in file)
            }
        return int(fields["lo"][8])
    except (OSError, KeyError, IndexError, ValueError):
        return None


def set_switches(threads: int, fp32_matmul: str) -> None:
    """Set the process-wide switches, which apply to all rows."""
    torch.set_num_threads(threads)
    if fp32_matmul == "onednn":
        # Rounds to bf16 only where the CPU has AMX.
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    elif fp32_matmul == "tf32":
        torch.set_float32_matmul_precision("high")
    # Rows share the code of their blocks, so torch.compile must not reach its recompilation limit.
    torch._dynamo.config.recompile_limit = 64


def is_crowded(parameters: int, rows: int, device: torch.device) -> bool:
    """Return whether this many rows, of at least 18 bytes per parameter, may not fit on the GPU
    together."""
    if device.type != "cuda":
        return False
    return 18 * parameters * rows > 0.5 * torch.cuda.get_device_properties(device).total_memory
