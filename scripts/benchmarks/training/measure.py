"""Turns of training rows: steps between two barriers, with the machine's counters read before and
after."""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_lite.distributed.process_group import Distributed
from megatron_lite.seeds import derive_seed
from scripts.benchmarks.pipeline import Figures, Turns
from scripts.benchmarks.processor import Load, load

Steps = Sequence[Sequence[Tensor]]  # this rank's micro-batches by step


class Contestant:
    """A configuration that trains step by step; this one trains nothing and holds no state."""

    def step(self, micro_batches: Sequence[Tensor]) -> Tensor:
        """Train one step on this rank's micro-batches (b, s + 1); return its share of the mean
        loss, ()."""
        return torch.zeros(())

    def finish(self) -> None:
        """Wait for all work that the last step left in flight, so that it does not slow the next
        configuration."""

    def books(self) -> dict[str, Any]:
        """Return figures that need no measurement: `state_bytes` of this rank, and others."""
        return {"state_bytes": 0}


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
        # Figures of a row that are no spreads, with the losses of all its turns.
        self.books: dict[str, dict[str, Any]] = {name: {"losses": []} for name in names}
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
            expected=(Exception,) if options.one_at_a_time and distributed.world_size == 1 else (),
            prints=distributed.rank == 0,
        )

    def run(self) -> Iterator[None]:
        """Measure, yielding after every round."""
        if not self._options.one_at_a_time:
            for name in self.books:
                self._build(name)
        yield from self.turns.run()

    def _rebuilt(self, name: str, turn: int) -> Figures:
        before, warmup = torch.cuda.memory_allocated(), self._options.warmup_turns
        try:
            self._build(name)
            for steps in range(warmup):
                for micro_batches in self.steps(steps):
                    self.contestants[name].step(micro_batches)
            # with moments that the first step allocates
            self._allocated[name] = torch.cuda.memory_allocated() - before
            return self._timed(name, turn + warmup)
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
        others = torch.cuda.memory_allocated() - self._allocated[name]
        figures, losses = timed_turn(self.contestants[name], self.steps(turn), self._distributed)
        books = self.books[name]
        books["losses"] += losses
        books |= self.contestants[name].books()
        if self._distributed.device.type == "cuda":
            peaks = self._distributed.gather_objects(torch.cuda.max_memory_allocated() - others)
            books["peak_bytes"] = max(*peaks, books.get("peak_bytes", 0))
            self._allocated[name] = torch.cuda.memory_allocated() - others
        return figures

    def steps(self, turn: int) -> list[list[Tensor]]:
        """Return this rank's micro-batches of all steps of a turn."""
        count = self._options.steps_per_turn
        first = turn * count
        return [
            make_tokens(self._options, step, self._distributed)
            for step in range(first, first + count)
        ]


def timed_turn(
    contestant: Contestant, steps: Steps, distributed: Distributed
) -> tuple[Figures, list[float]]:
    """Time some steps between two barriers; return the figures and the losses, the same on every
    rank.

    Step time is the maximum over ranks. Traffic counts until all ranks are done.
    """
    on_gpu = distributed.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    distributed.barrier()
    wire_before = loopback_bytes()
    distributed.barrier()
    synchronize(distributed)
    before = load()
    losses = [contestant.step(micro_batches) for micro_batches in steps]
    contestant.finish()
    synchronize(distributed)
    step_s = (time.perf_counter() - before.elapsed_s) / len(steps)
    distributed.barrier()
    span, wire = load().since(before), loopback_bytes() - wire_before
    ranks = distributed.gather_objects([step_s, span, wire, [float(loss) for loss in losses]])
    # rank 0's view of the machine, because all ranks must count the same turns
    _, first, wire, _ = ranks[0]
    own_s = sum(Load(*rank[1]).own_s for rank in ranks)
    figures = {
        "step_s": max(rank[0] for rank in ranks),
        "others": Load(*first)._replace(own_s=own_s).others,
        "wire_bytes": None if on_gpu or len(ranks) == 1 else wire / len(steps),
    }
    by_step = zip(*(rank[-1] for rank in ranks), strict=True)
    return figures, [sum(one) / len(ranks) for one in by_step]


def synchronize(distributed: Distributed) -> None:
    """Wait for the GPU, if there is one."""
    if distributed.device.type == "cuda":
        torch.cuda.synchronize()


def make_tokens(options: argparse.Namespace, step: int, distributed: Distributed) -> list[Tensor]:
    """Draw this rank's micro-batches of one step, (b, s + 1) each; tensor-parallel ranks draw the
    same."""
    generator = torch.Generator().manual_seed(
        derive_seed(0, "benchmark", step, distributed.data.rank)
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


def loopback_bytes() -> int:
    """Return the bytes sent over the loopback device since boot by all processes, or 0 if
    unknown."""
    try:
        return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text("ascii"))
    except OSError:
        return 0
