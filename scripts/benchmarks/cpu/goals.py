"""The goals on CPUs, and how each is read from a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from scripts.benchmarks.cpu.runs import BF16, CORES, RANKS, TENSOR, THREAD
from scripts.benchmarks.results import Result, Rows, compared_with
from scripts.benchmarks.tables import Goal

Report = dict[str, dict[str, Result]]  # run -> instruction sets -> result
OURS, PROGRAM = "ZeRO-1", "megatron_lite"
PEERS = ("nanoGPT", "nanoGPT compiled", "HF Trainer", "HF Trainer compiled", "litgpt")
TORCH = ("torch", "torch compiled")
# Step-time limits by place: (goal, moonshot).
BY_CORES, BY_THREAD, BY_RANKS = (0.92, 0.80), (0.90, 0.80), (0.90, 0.82)
MEMORY = "memory"  # peak memory over the smallest peer's
_CORES, _THREAD, _RANKS = "one process, all cores", "one process, one thread", "two ranks"


class GoalLine(NamedTuple):
    """One line of the table: a goal in some runs, one per model."""

    title: str
    kind: str  # kind of run: "programs" or "steps"
    place: str
    goal: Goal

    def value(self, report: Report, model: str, isa: str) -> float | None:
        """Return the measured value, or None."""
        rows: Rows = report.get(f"{self.kind} {model} {self.place}", {}).get(isa, {}).get("rows", {})
        if self.goal.figure == MEMORY:
            return _memory(rows)
        if self.kind == "programs" and self.goal.figure.startswith("/ "):
            # A program is compared with our variant that computes the same.
            found = compared_with(rows, self.goal.figure[2:])
            return found["median"] if found else None
        return self.goal.value(rows)


def _memory(rows: Rows) -> float | None:
    peers = [row["peak_rss_bytes"] for name, row in rows.items() if not name.startswith(PROGRAM)]
    sound = [peak for peak in peers if peak]
    return rows[PROGRAM]["peak_rss_bytes"] / min(sound) if sound and PROGRAM in rows else None


def _compared(
    kind: str, place: str, title: str, peers: Sequence[str], limits: tuple[float, float]
) -> Iterator[GoalLine]:
    ours = PROGRAM if kind == "programs" else OURS
    for peer in peers:
        yield GoalLine(f"{title}: {kind.removesuffix('s')} / {peer}", kind, place, Goal(ours, f"/ {peer}", *limits))


_SHARE = "share of a step that is matrix products"
_PRODUCTS = Goal("products", f"/ {OURS}", 0.85, 0.92, at_least=True)
LINES = (
    *_compared("programs", CORES, _CORES, PEERS, BY_CORES),
    *_compared("steps", CORES, _CORES, TORCH, BY_CORES),
    GoalLine(f"{_CORES}: {_SHARE}", "steps", CORES, _PRODUCTS),
    *_compared("programs", THREAD, _THREAD, PEERS, BY_THREAD),
    *_compared("steps", THREAD, _THREAD, TORCH, BY_THREAD),
    GoalLine(f"{_THREAD}: {_SHARE}", "steps", THREAD, _PRODUCTS),
    *_compared("programs", RANKS, _RANKS, ("nanoGPT", "HF Trainer", "picotron"), BY_RANKS),
    *_compared("steps", RANKS, _RANKS, ("DDP", "HF DDP"), BY_RANKS),
    GoalLine(f"{_RANKS}: step of ZeRO-3 / ZeRO-1", "steps", RANKS, Goal("ZeRO-3", "/ ZeRO-1", 1.04, 1.00)),
    GoalLine(f"{_RANKS}: step of ZeRO-3 / FSDP2", "steps", RANKS, Goal("ZeRO-3", "/ FSDP2", 0.65, 0.55)),
    GoalLine("tensor parallelism: step / torch", "steps", TENSOR, Goal("TP", "/ torch TP", 0.80)),
    GoalLine("tensor and sequence parallelism: step / torch", "steps", TENSOR, Goal("TP+SP", "/ torch TP+SP", 0.80)),
    GoalLine("bf16 without instructions for it: step / fp32", "steps", BF16, Goal(OURS, f"/ {OURS} fp32", 1.3, 1.0)),
    GoalLine(f"{_CORES}: command to first step, s", "programs", CORES, Goal(PROGRAM, "start_s", 4.0)),
    GoalLine(f"{_RANKS}: command to first step, s", "programs", RANKS, Goal(PROGRAM, "start_s", 6.0)),
    GoalLine(f"{_CORES}: peak memory / smallest peer's", "programs", CORES, Goal(PROGRAM, MEMORY, 1.0)),
    GoalLine(f"{_RANKS}: peak memory / smallest peer's", "programs", RANKS, Goal(PROGRAM, MEMORY, 1.0)),
)


def goal_rows(report: Report, models: Sequence[str], isas: Sequence[str]) -> Iterator[list[str]]:
    """Yield the cells of each line: title, goal, moonshot, and the results by model and instruction set."""
    for line in LINES:
        moonshot = "" if line.goal.moonshot is None else f"{line.goal.moonshot:.2f}"
        cells = [_cell(line.goal, line.value(report, model, isa)) for model in models for isa in isas]
        yield [line.title, f"{line.goal.goal:.2f}", moonshot, *cells]


def _cell(goal: Goal, value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if goal.met(value) else f"**{value:.2f}**"
