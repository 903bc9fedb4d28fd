"""Put a CPU report into docs/benchmarks.md, between `<!-- table: NAME -->` and `<!-- end -->` of each table.

python -m scripts.benchmarks.cpu.render                       docs/cpu_report.json
python -m scripts.benchmarks.cpu.render --report=other.json   another report of scripts.benchmarks.cpu
python -m scripts.benchmarks.cpu.render --check               compare only; exit code 1 if the document is stale
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

from scripts.benchmarks.cpu.__main__ import REPORT
from scripts.benchmarks.cpu.goals import OURS, PROGRAM, Report, goal_rows
from scripts.benchmarks.cpu.runs import BF16, CORES, GPT2, LLAMA, RANKS, RUNS, TENSOR, THREAD, Run
from scripts.benchmarks.results import MIB, Result
from scripts.benchmarks.tables import NOT_MEASURED, Column, compared, number, over, render, spread, surroundings
from scripts.benchmarks.training.report import profile_table
from scripts.docs.tables import markdown_table

TITLES = {"all": "everything", "avx2": "AVX2 only"}
MODELS = {GPT2: "GPT-2 11M", LLAMA: "Llama 39M"}
PROFILED = ("torch", OURS)
STEP = spread("step, ms", "step_s", 0, 1e3)
PROGRAM_COLUMNS = (
    Column("ours / it", lambda rows, name: "" if name.startswith(PROGRAM) else compared("").cell(rows, name)),
    STEP,
    number("peak, MiB", "peak_rss_bytes", ",.0f", 1 / MIB),
    number("first step, s", "start_s", ".1f"),
)
STEP_COLUMNS = (Column("ours / it", lambda rows, name: "" if name == OURS else over("", name).cell(rows, OURS)), STEP)
TENSOR_COLUMNS = (
    STEP,
    Column("ours / torch", lambda rows, name: over("", f"torch {name}").cell(rows, name)),
    number("sent, MiB", "wire_bytes", ".1f", 1 / MIB),
    number("counted, MiB", "wire_counted_bytes", ".1f", 1 / MIB),
)


def goals(report: Report) -> list[str]:
    """Return the table of goals, with a column per model and instruction set."""
    header = ("", "goal", "moonshot", *(f"{model}, {title}" for model in MODELS.values() for title in TITLES.values()))
    return markdown_table(header, list(goal_rows(report, tuple(MODELS), tuple(TITLES))))


def side_by_side(kind: str, place: str, columns: Sequence[Column]) -> Callable[[Report], list[str]]:
    """Return the writer of a table with a line per model and row, and `columns` repeated per instruction set."""

    def write(report: Report) -> list[str]:
        header = ["", "", *(f"{column.title} ({TITLES[isa]})" for isa in TITLES for column in columns)]
        lines: list[list[str]] = []
        below: list[str] = []
        for run in RUNS:
            if (run.kind, run.place) == (kind, place):
                results = [report.get(run.name, {}).get(isa, {}) for isa in TITLES]
                for name in dict.fromkeys(name for result in results for name in result.get("rows", {})):
                    cells = [cell for result in results for cell in _cells(result, name, columns)]
                    lines.append([MODELS[run.model], name, *cells])
                below += _below(run, report)
        return [*markdown_table(header, lines), "", *below] if lines else [NOT_MEASURED]

    return write


def alone(place: str, first: str, columns: Sequence[Column], rows: Sequence[str] = ()) -> Callable[[Report], list[str]]:
    """Return the writer of the table of a place with a single run.

    Args:
        first: the first cell of every line; empty: the row's name.
        rows: rows to show (default: all).
    """
    run = next(run for run in RUNS if run.place == place)

    def write(report: Report) -> list[str]:
        lines = [
            [first or name, *(column.cell(result["rows"], name) for column in columns)]
            for result in report.get(run.name, {}).values()
            for name in rows or result["rows"]
        ]
        header = ("", *(column.title for column in columns))
        return [*markdown_table(header, lines), "", *_below(run, report)] if lines else [NOT_MEASURED]

    return write


def profiles(report: Report) -> list[str]:
    """Return a table per single-process profile: ms per step by kind of operation, ours and plain torch's."""
    lines: list[str] = []
    for run in RUNS:
        for isa, result in report.get(run.name, {}).items() if run.place in (CORES, THREAD) else ():
            table = profile_table({name: row for name, row in result["rows"].items() if name in PROFILED})
            if table:
                lines += [f"{MODELS[run.model]}, {run.place}, {TITLES[isa]}:", "", *table, ""]
    return lines[:-1] or [NOT_MEASURED]


def _cells(result: Result, name: str, columns: Sequence[Column]) -> list[str]:
    rows = result.get("rows", {})
    if name not in rows:
        return [""] * len(columns)
    if rows[name]["step_s"] is None:
        return ["failed" if name in result["failures"] else NOT_MEASURED, *[""] * (len(columns) - 1)]
    return [column.cell(rows, name) for column in columns]


def _below(run: Run, report: Report) -> Iterator[str]:
    """Yield the machine, versions and date of each result, and the contestants that did not run."""
    for isa, result in report.get(run.name, {}).items():
        yield f"- {MODELS[run.model]}, {TITLES[isa]}: {surroundings(result['environment'])}."
        missing = [f"{name} ({reason})" for name, reason in result["missing"].items() if name != "torchtitan"]
        if missing:
            yield f"  Not run: {'; '.join(missing)}."


TABLES: dict[str, Callable[[Report], list[str]]] = {
    "goals": goals,
    "programs_cores": side_by_side("programs", CORES, PROGRAM_COLUMNS),
    "programs_thread": side_by_side("programs", THREAD, PROGRAM_COLUMNS),
    "programs_ranks": side_by_side("programs", RANKS, PROGRAM_COLUMNS),
    "steps_cores": side_by_side("steps", CORES, STEP_COLUMNS),
    "steps_thread": side_by_side("steps", THREAD, STEP_COLUMNS),
    "steps_ranks": side_by_side("steps", RANKS, STEP_COLUMNS),
    "profiles": profiles,
    "tensor_parallel": alone(TENSOR, "", TENSOR_COLUMNS),
    "bf16_without_instructions": alone(BF16, MODELS[GPT2], (STEP, over("/ fp32", f"{OURS} fp32")), (OURS,)),
}


def main(argv: Sequence[str]) -> int:
    """Write or compare the tables; return the exit code."""
    return render(argv, __doc__, REPORT, TABLES, "python -m scripts.benchmarks.cpu.render")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
