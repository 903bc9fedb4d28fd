"""Put a CPU report into docs/benchmarks.md, between `<!-- table: NAME -->` and `<!-- end -->` of
each table.

python -m scripts.benchmarks.cpu.render                       docs/cpu_report.json
python -m scripts.benchmarks.cpu.render --report=other.json   another report of scripts.benchmarks.cpu
python -m scripts.benchmarks.cpu.render --check               compare only; exit code 1 if the document is stale
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from megatron_lite.config.system import PIPELINE_SCHEDULES
from scripts.benchmarks.cpu.__main__ import (
    BF16,
    CORES,
    GPT2,
    HYBRID,
    LLAMA,
    PIPELINE,
    RANKS,
    REPORT,
    RUNS,
    TENSOR,
    THREAD,
    Run,
)
from scripts.benchmarks.results import MIB, Result, Rows, compared_with
from scripts.benchmarks.tables import (
    NOT_MEASURED,
    Column,
    Goal,
    compared,
    number,
    over,
    render,
    spread,
    surroundings,
)
from scripts.benchmarks.training.report import profile_table
from scripts.docs.tables import markdown_table

Report = dict[str, dict[str, Result]]  # run -> instruction set -> result
OURS, PROGRAM = "ZeRO-1", "megatron_lite"
TITLES = {"all": "everything", "avx2": "AVX2 only"}
MODELS = {GPT2: "GPT-2 11M", LLAMA: "Llama 39M"}
PROFILED = ("torch", OURS)
STEP = spread("step, ms", "step_s", 0, 1e3)
PROGRAM_COLUMNS = (
    Column(
        "ours / it",
        lambda rows, name: "" if name.startswith(PROGRAM) else compared("").cell(rows, name),
    ),
    STEP,
    number("peak, MiB", "peak_rss_bytes", ",.0f", 1 / MIB),
    number("first step, s", "start_s", ".1f"),
)
STEP_COLUMNS = (
    Column("ours / it", lambda rows, name: "" if name == OURS else over("", name).cell(rows, OURS)),
    STEP,
)
WIRE = (
    number("sent, MiB", "wire_bytes", ".1f", 1 / MIB),
    number("counted, MiB", "wire_counted_bytes", ".1f", 1 / MIB),
)
TENSOR_COLUMNS = (
    STEP,
    Column("ours / torch", lambda rows, name: over("", f"torch {name}").cell(rows, name)),
    *WIRE,
)
HYBRID_COLUMNS = (
    STEP,
    *(over(f"/ {name}", name) for name in ("FSDP2", "FSDP2 all resharded", "FSDP2 no reshard")),
    *WIRE,
    number("state, MiB", "state_bytes", ",.0f", 1 / MIB),
)


PEERS = ("nanoGPT", "nanoGPT compiled", "HF Trainer", "HF Trainer compiled", "litgpt")
TORCH = ("torch", "torch compiled")
# Step-time limits by place: (goal, moonshot).
BY_CORES = (0.92, 0.80)
BY_THREAD = (0.90, 0.80)
BY_RANKS = (0.90, 0.82)
MEMORY = "memory"  # peak memory over the smallest peer's
_CORES = "one process, all cores"
_THREAD = "one process, one thread"
_RANKS = "two ranks"


class GoalLine(NamedTuple):
    """One line of the table: a goal in some runs, one per model."""

    title: str
    kind: str  # kind of run: "programs" or "steps"
    place: str
    goal: Goal

    def value(self, report: Report, model: str, isa: str) -> float | None:
        """Return the measured value, or None."""
        rows: Rows = (
            report.get(f"{self.kind} {model} {self.place}", {}).get(isa, {}).get("rows", {})
        )
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
        yield GoalLine(
            f"{title}: {kind.removesuffix('s')} / {peer}",
            kind,
            place,
            Goal(ours, f"/ {peer}", *limits),
        )


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
    GoalLine(
        f"{_RANKS}: step of ZeRO-3 / ZeRO-1", "steps", RANKS, Goal("ZeRO-3", "/ ZeRO-1", 1.04, 1.00)
    ),
    GoalLine(
        f"{_RANKS}: step of ZeRO-3 / FSDP2", "steps", RANKS, Goal("ZeRO-3", "/ FSDP2", 0.65, 0.55)
    ),
    GoalLine("tensor parallelism: step / torch", "steps", TENSOR, Goal("TP", "/ torch TP", 0.80)),
    GoalLine(
        "tensor and sequence parallelism: step / torch",
        "steps",
        TENSOR,
        Goal("TP+SP", "/ torch TP+SP", 0.80),
    ),
    *(
        GoalLine(
            f"pipeline, {name}: step / torch",
            "steps",
            PIPELINE,
            Goal(name, f"/ torch {name}", 0.85),
        )
        for name in PIPELINE_SCHEDULES
    ),
    *(
        GoalLine(
            f"hybrid shards: step of {ours} / {peer}", "steps", HYBRID, Goal(ours, f"/ {peer}", 0.7)
        )
        for ours, peer in (
            ("ZeRO-2", "FSDP2 no reshard"),
            ("ZeRO-3", "FSDP2"),
            ("ZeRO-3", "FSDP2 all resharded"),
        )
    ),
    GoalLine(
        "bf16 without instructions for it: step / fp32",
        "steps",
        BF16,
        Goal(OURS, f"/ {OURS} fp32", 1.3, 1.0),
    ),
    GoalLine(
        f"{_CORES}: command to first step, s", "programs", CORES, Goal(PROGRAM, "start_s", 4.0)
    ),
    GoalLine(
        f"{_RANKS}: command to first step, s", "programs", RANKS, Goal(PROGRAM, "start_s", 6.0)
    ),
    GoalLine(
        f"{_CORES}: peak memory / smallest peer's", "programs", CORES, Goal(PROGRAM, MEMORY, 1.0)
    ),
    GoalLine(
        f"{_RANKS}: peak memory / smallest peer's", "programs", RANKS, Goal(PROGRAM, MEMORY, 1.0)
    ),
)


def goals(report: Report) -> list[str]:
    """Return the table of goals, with a column per model and instruction set; a missed goal is
    bold."""
    header = (
        "",
        "goal",
        "moonshot",
        *(f"{model}, {title}" for model in MODELS.values() for title in TITLES.values()),
    )
    lines = []
    for line in LINES:
        goal, cells = line.goal, []
        for value in (line.value(report, model, isa) for model in MODELS for isa in TITLES):
            cells.append(
                "" if value is None else f"{value:.2f}" if goal.met(value) else f"**{value:.2f}**"
            )
        moonshot = "" if goal.moonshot is None else f"{goal.moonshot:.2f}"
        lines.append([line.title, f"{goal.goal:.2f}", moonshot, *cells])
    return markdown_table(header, lines)


def side_by_side(report: Report, kind: str, place: str, columns: Sequence[Column]) -> list[str]:
    """Return a table with a line per model and row, and `columns` repeated per instruction set."""
    header = ["", "", *(f"{column.title} ({TITLES[isa]})" for isa in TITLES for column in columns)]
    lines: list[list[str]] = []
    below: list[str] = []
    for run in (run for run in RUNS if (run.kind, run.place) == (kind, place)):
        results = [report.get(run.name, {}).get(isa, {}) for isa in TITLES]
        for name in dict.fromkeys(name for result in results for name in result.get("rows", {})):
            cells = [cell for result in results for cell in _cells(result, name, columns)]
            lines.append([MODELS[run.model], name, *cells])
        below += _below(run, report)
    return [*markdown_table(header, lines), "", *below] if lines else [NOT_MEASURED]


def alone(
    report: Report, place: str, columns: Sequence[Column], shown: Mapping[str, str] | None = None
) -> list[str]:
    """Return the table of a place with a single run. shown: rows with the first cells of their
    lines (default: all)."""
    run = next(run for run in RUNS if run.place == place)
    lines = [
        [first, *(column.cell(result["rows"], name) for column in columns)]
        for result in report.get(run.name, {}).values()
        for name, first in (shown or dict(zip(result["rows"], result["rows"], strict=True))).items()
    ]
    header = ("", *(column.title for column in columns))
    return [*markdown_table(header, lines), "", *_below(run, report)] if lines else [NOT_MEASURED]


def profiles(report: Report) -> list[str]:
    """Return a table per single-process profile: ms per step by kind of operation, ours and plain
    torch's."""
    lines: list[str] = []
    for run in RUNS:
        for isa, result in report.get(run.name, {}).items() if run.place in (CORES, THREAD) else ():
            table = profile_table(
                {name: row for name, row in result["rows"].items() if name in PROFILED}
            )
            if table:
                lines += [f"{MODELS[run.model]}, {run.place}, {TITLES[isa]}:", "", *table, ""]
    return lines[:-1] or [NOT_MEASURED]


def _cells(result: Result, name: str, columns: Sequence[Column]) -> list[str]:
    rows = result.get("rows", {})
    if name not in rows:
        return [""] * len(columns)
    if rows[name]["step_s"] is None:
        return [
            "failed" if name in result["failures"] else NOT_MEASURED,
            *[""] * (len(columns) - 1),
        ]
    return [column.cell(rows, name) for column in columns]


def _below(run: Run, report: Report) -> Iterator[str]:
    """Yield the machine, versions and date of each result, and the contestants that did not run."""
    for isa, result in report.get(run.name, {}).items():
        yield f"- {MODELS[run.model]}, {TITLES[isa]}: {surroundings(result['environment'])}."
        missing = [
            f"{name} ({reason})"
            for name, reason in result["missing"].items()
            if name != "torchtitan"
        ]
        if missing:
            yield f"  Not run: {'; '.join(missing)}."


PLACES = {"cores": CORES, "thread": THREAD, "ranks": RANKS}
BF16_COLUMNS = (STEP, over("/ fp32", f"{OURS} fp32"))
TABLES: dict[str, Callable[[Report], list[str]]] = {
    "goals": goals,
    "profiles": profiles,
    "tensor_parallel": partial(alone, place=TENSOR, columns=TENSOR_COLUMNS),
    "pipelines": partial(alone, place=PIPELINE, columns=TENSOR_COLUMNS),
    "hybrid_shards": partial(alone, place=HYBRID, columns=HYBRID_COLUMNS),
    "bf16_without_instructions": partial(
        alone, place=BF16, columns=BF16_COLUMNS, shown={OURS: MODELS[GPT2]}
    ),
    **{
        f"{kind}_{name}": partial(side_by_side, kind=kind, place=place, columns=columns)
        for kind, columns in (("programs", PROGRAM_COLUMNS), ("steps", STEP_COLUMNS))
        for name, place in PLACES.items()
    },
}


def main(argv: Sequence[str]) -> int:
    """Write or compare the tables; return the exit code."""
    return render(argv, __doc__, REPORT, TABLES, "python -m scripts.benchmarks.cpu.render")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
