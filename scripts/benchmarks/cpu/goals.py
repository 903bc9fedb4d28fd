"""The goals on CPUs, and how each is read from a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.benchmarks.cpu.runs import BF16, CORES, RANKS, TENSOR, THREAD

Spread = dict[str, Any]
Report = dict[str, Any]
OURS, PROGRAM = "ZeRO-1", "megatron_lite"
PEERS = ("nanoGPT", "nanoGPT compiled", "HF Trainer", "HF Trainer compiled", "litgpt")


@dataclass(frozen=True)
class Goal:
    """One line of the table: a number of some runs, one per model, that has to be small enough."""

    name: str
    kind: str  # of the run: "programs" or "steps"
    place: str
    row: str
    over: str  # the row that `row` is divided by; or "start", "memory"
    goal: float
    moonshot: float | None
    at_least: bool = False

    def value(self, report: Report, model: str, isa: str) -> Spread | None:
        """Return the measured spread, or None."""
        result = report.get(f"{self.kind} {model} {self.place}", {}).get(isa) or {}
        rows = result.get("programs") or result.get("configurations") or {}
        if self.row not in rows:
            return None
        if self.over == "start":
            found: Spread | None = rows[self.row]["start_s"]
            return found
        if self.over == "memory":
            peaks = [row["peak_rss_bytes"] for name, row in rows.items() if not name.startswith(PROGRAM)]
            sound = [peak for peak in peaks if peak]
            return _exact(rows[self.row]["peak_rss_bytes"] / min(sound)) if sound else None
        if self.over not in rows:
            return None
        if "programs" in result:
            return rows[self.over]["ours_over_it"]
        return ratio(rows, self.row, self.over)


def ratio(rows: dict[str, Any], row: str, over: str) -> Spread | None:
    """Return the ratio of two rows' step times, which the report keeps in one direction for some pairs."""
    direct, reverse = rows[row]["ratios"].get(over), rows[over]["ratios"].get(row)
    if direct is not None or reverse is None:
        return direct
    low, high = reverse["quartiles"]
    return {"median": 1 / reverse["median"], "quartiles": [1 / high, 1 / low]}


def ours_over(rows: dict[str, Any], name: str) -> Spread | None:
    """Return the ratio of ZeRO-1's step time to another row's."""
    return ratio(rows, OURS, name) if OURS in rows else None


def _exact(value: float) -> Spread:
    return {"median": value, "quartiles": [value, value]}


def _programs(place: str, title: str, peers: Sequence[str], goal: float, moonshot: float) -> Iterator[Goal]:
    for peer in peers:
        yield Goal(f"{title}: program / {peer}", "programs", place, PROGRAM, peer, goal, moonshot)


def _steps(place: str, title: str, peers: Sequence[str], goal: float, moonshot: float) -> Iterator[Goal]:
    for peer in peers:
        yield Goal(f"{title}: step / {peer}", "steps", place, OURS, peer, goal, moonshot)


def _products(place: str, title: str) -> Goal:
    name = f"{title}: share of a step that is matrix products"
    return Goal(name, "steps", place, "products", OURS, 0.85, 0.92, at_least=True)


def _start(place: str, title: str, limit_s: float) -> Goal:
    return Goal(f"{title}: command to first step, s", "programs", place, PROGRAM, "start", limit_s, None)


def _memory(place: str, title: str) -> Goal:
    return Goal(f"{title}: peak memory / smallest peer's", "programs", place, PROGRAM, "memory", 1.0, None)


_CORES, _THREAD, _RANKS = "one process, all cores", "one process, one thread", "two ranks"
_TORCH = ("torch", "torch compiled")
_ZERO_3 = f"{_RANKS}: step of ZeRO-3 /"
_BF16 = "bf16 without instructions for it: step / fp32"
GOALS = (
    *_programs(CORES, _CORES, PEERS, 0.92, 0.80),
    *_steps(CORES, _CORES, _TORCH, 0.92, 0.80),
    _products(CORES, _CORES),
    *_programs(THREAD, _THREAD, PEERS, 0.90, 0.80),
    *_steps(THREAD, _THREAD, _TORCH, 0.90, 0.80),
    _products(THREAD, _THREAD),
    *_programs(RANKS, _RANKS, ("nanoGPT", "HF Trainer", "picotron"), 0.90, 0.82),
    *_steps(RANKS, _RANKS, ("DDP", "HF DDP"), 0.90, 0.82),
    Goal(f"{_ZERO_3} ZeRO-1", "steps", RANKS, "ZeRO-3", OURS, 1.04, 1.00),
    Goal(f"{_ZERO_3} FSDP2", "steps", RANKS, "ZeRO-3", "FSDP2", 0.65, 0.55),
    Goal("tensor parallelism: step / torch", "steps", TENSOR, "TP", "torch TP", 0.80, None),
    Goal("tensor and sequence parallelism: step / torch", "steps", TENSOR, "TP+SP", "torch TP+SP", 0.80, None),
    Goal(_BF16, "steps", BF16, OURS, f"{OURS} fp32", 1.3, 1.0),
    _start(CORES, _CORES, 4.0),
    _start(RANKS, _RANKS, 6.0),
    _memory(CORES, _CORES),
    _memory(RANKS, _RANKS),
)


def goal_rows(report: Report, models: Sequence[str], isas: Sequence[str]) -> Iterator[list[str]]:
    """Yield the cells of each goal: name, goal, moonshot, and what each model reached with each instruction sets."""
    for goal in GOALS:
        moonshot = "" if goal.moonshot is None else f"{goal.moonshot:.2f}"
        cells = [_cell(goal, goal.value(report, model, isa)) for model in models for isa in isas]
        yield [goal.name, f"{goal.goal:.2f}", moonshot, *cells]


def _cell(goal: Goal, found: Spread | None) -> str:
    if found is None:
        return ""
    median = found["median"]
    met = median >= goal.goal if goal.at_least else median <= goal.goal
    return f"{median:.2f}" if met else f"**{median:.2f}**"
