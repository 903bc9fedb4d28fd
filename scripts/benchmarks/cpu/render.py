"""Put a CPU report into docs/benchmarks.md, between `<!-- table: NAME -->` and `<!-- end -->` of each table.

python -m scripts.benchmarks.cpu.render                       docs/cpu_report.json
python -m scripts.benchmarks.cpu.render --report=other.json   another report of scripts.benchmarks.cpu
python -m scripts.benchmarks.cpu.render --check               compare only; exit code 1 if the document is stale
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.common import ROOT, argument_parser, markdown_table, spread_cell
from scripts.benchmarks.cpu.__main__ import REPORT
from scripts.benchmarks.cpu.goals import goal_rows, ours_over, ratio
from scripts.benchmarks.cpu.runs import BF16, CORES, GPT2, LLAMA, RANKS, RUNS, TENSOR, THREAD, Run
from scripts.benchmarks.instructions import sentence
from scripts.benchmarks.training.report import profile_table

DOCUMENT = ROOT / "docs" / "benchmarks.md"
NOT_MEASURED = "not yet measured"
TITLES = {"all": "everything", "avx2": "AVX2 only"}
MODELS = {GPT2: "GPT-2 11M", LLAMA: "Llama 39M"}
MIB = 2**20
PROFILED = ("torch", "ZeRO-1")
Report = dict[str, Any]


def goals(report: Report) -> list[str]:
    """Return the table of goals, with a column per model and choice of instruction sets."""
    header = ("", "goal", "moonshot", *(f"{model}, {title}" for model in MODELS.values() for title in TITLES.values()))
    return markdown_table(header, list(goal_rows(report, tuple(MODELS), tuple(TITLES))))


def programs(place: str) -> Callable[[Report], list[str]]:
    """Return the writer of the table of whole programs in one place."""
    columns = ("ours / it", "step, ms", "peak, MiB", "first step, s")
    return lambda report: _beside(report, "programs", place, columns, _program_cells)


def steps(place: str) -> Callable[[Report], list[str]]:
    """Return the writer of the table of bare steps in one place."""
    return lambda report: _beside(report, "steps", place, ("ours / it", "step, ms"), _step_cells)


def profiles(report: Report) -> list[str]:
    """Return a table per profile of one process: ms of a step by kind of operation, ours and plain torch's."""
    lines: list[str] = []
    for run in RUNS:
        for isa, result in report.get(run.name, {}).items() if run.place in (CORES, THREAD) else ():
            rows = {name: row for name, row in result.get("configurations", {}).items() if name in PROFILED}
            table = profile_table(rows)
            if table:
                lines += [f"{MODELS[run.model]}, {run.place}, {TITLES[isa]}:", "", *table, ""]
    return lines[:-1] or [NOT_MEASURED]


def _beside(
    report: Report, kind: str, place: str, columns: Sequence[str], cells: Callable[[dict[str, Any], str], list[str]]
) -> list[str]:
    """Return a table with a line per model and row, and `columns` once per choice of instruction sets."""
    header = ["", "", *(f"{column} ({TITLES[isa]})" for isa in TITLES for column in columns)]
    lines: list[list[str]] = []
    below: list[str] = []
    for run in RUNS:
        if (run.kind, run.place) != (kind, place):
            continue
        results = {isa: report.get(run.name, {}).get(isa) or {} for isa in TITLES}
        tables = {isa: result.get("programs") or result.get("configurations") or {} for isa, result in results.items()}
        for name in dict.fromkeys(name for table in tables.values() for name in table):
            made = [cells(table, name) if name in table else [""] * len(columns) for table in tables.values()]
            lines.append([MODELS[run.model], name, *(cell for one in made for cell in one)])
        below += _below(run, results)
    if not lines:
        return [NOT_MEASURED]
    return [*markdown_table(header, lines), "", *below]


def _program_cells(rows: dict[str, Any], name: str) -> list[str]:
    row = rows[name]
    if row["step_s"] is None:
        return ["failed" if row["failure"] else NOT_MEASURED, "", "", ""]
    return [
        spread_cell(row["ours_over_it"], 2) if not name.startswith("megatron_lite") else "",
        milliseconds(row["step_s"]),
        f"{row['peak_rss_bytes'] / MIB:,.0f}",
        f"{row['start_s']['median']:.1f}",
    ]


def _step_cells(rows: dict[str, Any], name: str) -> list[str]:
    found = None if name == "ZeRO-1" else ours_over(rows, name)
    return [spread_cell(found, 2), milliseconds(rows[name]["step_s"])]


def milliseconds(spread: dict[str, Any] | None) -> str:
    """Format a spread of seconds as milliseconds."""
    if spread is None:
        return ""
    values = {"median": 1000 * spread["median"], "quartiles": [1000 * value for value in spread["quartiles"]]}
    return spread_cell(values, 0)


def bf16(report: Report) -> list[str]:
    """Return the table of bf16 on a CPU without instructions for it."""
    lines = []
    run = next(run for run in RUNS if run.place == BF16)
    results = report.get(run.name, {})
    for result in results.values():
        rows = result["configurations"]
        fp32 = ratio(rows, "ZeRO-1", "ZeRO-1 fp32")
        lines.append([MODELS[run.model], milliseconds(rows["ZeRO-1"]["step_s"]), spread_cell(fp32, 2)])
    if not lines:
        return [NOT_MEASURED]
    return [*markdown_table(("", "step, ms", "/ fp32"), lines), "", *_below(run, results)]


def tensor_parallel(report: Report) -> list[str]:
    """Return the table of ranks that share each layer: step time, and bytes that both ranks send in a step."""
    run = next(run for run in RUNS if run.place == TENSOR)
    results = report.get(run.name, {})
    lines = []
    for result in results.values():
        rows = result["configurations"]
        for name, row in rows.items():
            peer = f"torch {name}"
            over_peer = ratio(rows, name, peer) if peer in rows else None
            sent = [row.get(key) for key in ("wire_bytes", "wire_counted_bytes")]
            mib = [f"{value / MIB:.1f}" if value else "" for value in sent]
            lines.append([name, milliseconds(row["step_s"]), spread_cell(over_peer, 2), *mib])
    if not lines:
        return [NOT_MEASURED]
    header = ("", "step, ms", "ours / torch", "sent, MiB", "counted, MiB")
    return [*markdown_table(header, lines), "", *_below(run, results)]


def _below(run: Run, results: dict[str, Any]) -> Iterator[str]:
    """Yield the machine, versions and date of each result, and what did not run."""
    for isa, result in results.items():
        if not result:
            continue
        machine, numbers = result["machine"], result["versions"]
        known = ", ".join(f"{name} {version}" for name, version in numbers.items() if name != "megatron_lite")
        yield (
            f"- {MODELS[run.model]}, {TITLES[isa]}: {machine['device']}, {machine['cores']} cores; "
            f"{sentence(machine['instruction_sets'])}; {known}; commit {result['commit']}, {result['date']}."
        )
        missing = [f"{name} ({reason})" for name, reason in result["unavailable"].items() if name != "torchtitan"]
        if missing:
            yield f"  Not run: {'; '.join(missing)}."


TABLES: dict[str, Callable[[Report], list[str]]] = {
    "goals": goals,
    "programs_cores": programs(CORES),
    "programs_thread": programs(THREAD),
    "programs_ranks": programs(RANKS),
    "steps_cores": steps(CORES),
    "steps_thread": steps(THREAD),
    "steps_ranks": steps(RANKS),
    "profiles": profiles,
    "tensor_parallel": tensor_parallel,
    "bf16_without_instructions": bf16,
}


def rendered(text: str, report: Report) -> str:
    """Return the document with every table written anew.

    Raises:
        ValueError: if the document lacks the place of a table.
    """
    for name, write in TABLES.items():
        found = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", text, re.S)
        if found is None:
            raise ValueError(f"the document needs <!-- table: {name} --> and <!-- end --> after it")
        table = "\n".join(["", *write(report), "", ""])
        text = text[: found.start(1)] + table + text[found.end(1) :]
    return text


def main(argv: Sequence[str]) -> int:
    """Write or compare the tables; return the exit code."""
    parser = argument_parser(__doc__)
    parser.add_argument("--report", type=Path, default=REPORT, help="default docs/cpu_report.json")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="default docs/benchmarks.md")
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 if the document is stale")
    options = parser.parse_args(argv)
    if options.report != REPORT and not options.report.exists():
        parser.error(f"--report: {options.report} does not exist")
    report = json.loads(options.report.read_text("utf-8")) if options.report.exists() else {}
    text = options.document.read_text("utf-8")
    try:
        new = rendered(text, report)
    except ValueError as error:
        parser.error(f"--document: {options.document}: {error}")
    if options.check:
        if new != text:
            print(f"{options.document} is out of date: run python -m scripts.benchmarks.cpu.render", file=sys.stderr)
        return int(new != text)
    options.document.write_text(new, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
