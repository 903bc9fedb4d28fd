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
from scripts.benchmarks.pipeline import (
    MIB,
    NOT_MEASURED,
    Column,
    Result,
    Rows,
    compared,
    compared_with,
    median,
    number,
    over,
    profile_table,
    ratio,
    render,
    spread,
    surroundings,
)
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
Value = Callable[[Rows], float | None]


class Goal(NamedTuple):
    """One line of the table of goals: a number of some runs, one run per model."""

    title: str
    run: str  # kind and place, with {} for the model
    value: Value
    limit: float
    moonshot: float | None = None
    at_least: bool = False

    def cell(self, report: Report, model: str, isa: str) -> str:
        """Return the measured value, bold if it misses the goal; empty if not measured."""
        rows: Rows = report.get(self.run.format(model), {}).get(isa, {}).get("rows", {})
        value = self.value(rows)
        if value is None:
            return ""
        met = value >= self.limit if self.at_least else value <= self.limit
        return f"{value:.2f}" if met else f"**{value:.2f}**"


def step(own: str, other: str) -> Value:
    """Return the reader of the time of a row over another's."""
    return lambda rows: median(ratio(rows, own, other))


def program(peer: str) -> Value:
    """Return the reader of the time of our variant that computes the same, over a peer's."""
    return lambda rows: median(compared_with(rows, peer))


def start(rows: Rows) -> float | None:
    """Return the time from our command to its first step."""
    return median(rows.get(PROGRAM, {}).get("start_s"))


def memory(rows: Rows) -> float | None:
    """Return our peak memory over the smallest peer's."""
    peers = [row["peak_rss_bytes"] for name, row in rows.items() if not name.startswith(PROGRAM)]
    sound = [peak for peak in peers if peak]
    return rows[PROGRAM]["peak_rss_bytes"] / min(sound) if sound and PROGRAM in rows else None


_CORES = "one process, all cores"
_RANKS = "two ranks"
_TORCH = ("torch", "torch compiled")
# Title, place, programs and steps to compare with, goal, moonshot.
_PLACES = (
    (_CORES, CORES, PEERS, _TORCH, 0.92, 0.80),
    ("one process, one thread", THREAD, PEERS, _TORCH, 0.90, 0.80),
    (_RANKS, RANKS, ("nanoGPT", "HF Trainer", "picotron"), ("DDP", "HF DDP"), 0.90, 0.82),
)


def _goals_of_places() -> Iterator[Goal]:
    """Yield the goals of step times: our program over others, our step over others, and the share
    of products."""
    for title, place, programs, steps, limit, moonshot in _PLACES:
        programs_run, steps_run = (f"{kind} {{}} {place}" for kind in ("programs", "steps"))
        for peer in programs:
            yield Goal(f"{title}: program / {peer}", programs_run, program(peer), limit, moonshot)
        for peer in steps:
            yield Goal(f"{title}: step / {peer}", steps_run, step(OURS, peer), limit, moonshot)
        if place != RANKS:
            share = f"{title}: share of a step that is matrix products"
            yield Goal(share, steps_run, step("products", OURS), 0.85, 0.92, at_least=True)


_TWO, _SPLIT, _SHARDS = (f"steps {{}} {place}" for place in (RANKS, TENSOR, HYBRID))
GOALS = (
    *_goals_of_places(),
    Goal(f"{_RANKS}: step of ZeRO-3 / ZeRO-1", _TWO, step("ZeRO-3", "ZeRO-1"), 1.04, 1.00),
    Goal(f"{_RANKS}: step of ZeRO-3 / FSDP2", _TWO, step("ZeRO-3", "FSDP2"), 0.65, 0.55),
    Goal("tensor parallelism: step / torch", _SPLIT, step("TP", "torch TP"), 0.80),
    Goal(
        "tensor and sequence parallelism: step / torch", _SPLIT, step("TP+SP", "torch TP+SP"), 0.80
    ),
    *(
        Goal(
            f"pipeline, {name}: step / torch",
            f"steps {{}} {PIPELINE}",
            step(name, f"torch {name}"),
            0.85,
        )
        for name in PIPELINE_SCHEDULES
    ),
    *(
        Goal(f"hybrid shards: step of {ours} / {peer}", _SHARDS, step(ours, peer), 0.7)
        for ours, peer in (
            ("ZeRO-2", "FSDP2 no reshard"),
            ("ZeRO-3", "FSDP2"),
            ("ZeRO-3", "FSDP2 all resharded"),
        )
    ),
    Goal(
        "bf16 without instructions for it: step / fp32",
        f"steps {{}} {BF16}",
        step(OURS, f"{OURS} fp32"),
        1.3,
        1.0,
    ),
    Goal(f"{_CORES}: command to first step, s", f"programs {{}} {CORES}", start, 4.0),
    Goal(f"{_RANKS}: command to first step, s", f"programs {{}} {RANKS}", start, 6.0),
    Goal(f"{_CORES}: peak memory / smallest peer's", f"programs {{}} {CORES}", memory, 1.0),
    Goal(f"{_RANKS}: peak memory / smallest peer's", f"programs {{}} {RANKS}", memory, 1.0),
)


def goals(report: Report) -> list[str]:
    """Return the table of goals, with a column per model and instruction set; a missed goal is
    bold."""
    columns = [(model, isa) for model in MODELS for isa in TITLES]
    header = [
        "",
        "goal",
        "moonshot",
        *(f"{MODELS[model]}, {TITLES[isa]}" for model, isa in columns),
    ]
    lines = [
        [
            goal.title,
            f"{goal.limit:.2f}",
            "" if goal.moonshot is None else f"{goal.moonshot:.2f}",
            *(goal.cell(report, model, isa) for model, isa in columns),
        ]
        for goal in GOALS
    ]
    return markdown_table(header, lines)


def peers(report: Report) -> list[str]:
    """Return the table that opens the document: our time over each peer's, with all instruction
    sets."""
    runs = [(model, place) for model in MODELS for place in (CORES, THREAD, RANKS)]
    lines = []
    for peer in (*PEERS, "picotron", "FSDP2"):
        kind, value = "programs", program(peer)
        if peer == "FSDP2":
            kind, value = "steps", step("ZeRO-3", peer)
        found = [
            value(report.get(f"{kind} {model} {place}", {}).get("all", {}).get("rows", {}))
            for model, place in runs
        ]
        lines.append([peer, *("" if one is None else f"{one:.2f}" for one in found)])
    return markdown_table(["", *(f"{MODELS[model]}, {place}" for model, place in runs)], lines)


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
        missing = [f"{name} ({reason})" for name, reason in result["missing"].items()]
        if missing:
            yield f"  Not run: {'; '.join(missing)}."


PLACES = {"cores": CORES, "thread": THREAD, "ranks": RANKS}
BF16_COLUMNS = (STEP, over("/ fp32", f"{OURS} fp32"))
TABLES: dict[str, Callable[[Report], list[str]]] = {
    "peers": peers,
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
