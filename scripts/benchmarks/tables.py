"""Tables of results, printed and in docs/benchmarks.md, and comparison with goals. Imports no
torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scripts.benchmarks import results
from scripts.benchmarks.results import ROOT, Result, Rows, Spread, compared_with, ratio
from scripts.docs.tables import markdown_table, with_tables, write_documents

DOCUMENT = ROOT / "docs" / "benchmarks.md"
NOT_MEASURED = "not yet measured"


class Column(NamedTuple):
    """A column of a table."""

    title: str
    cell: Callable[[Rows, str], str]  # (all rows, name of this one) -> text


def spread_cell(spread: Spread | None, digits: int, factor: float = 1.0) -> str:
    """Format a spread as "median (low-high)", or as the median if all three are rounded to the same
    number."""
    if spread is None:
        return ""
    median, low, high = (
        f"{factor * value:.{digits}f}" for value in (spread["median"], *spread["quartiles"])
    )
    return median if low == high else f"{median} ({low}-{high})"


def number(title: str, figure: str, form: str, factor: float = 1.0, zero: bool = False) -> Column:
    """Return the column of a figure or its median, scaled by `factor`; empty if missing, or 0 and
    not `zero`."""

    def cell(rows: Rows, name: str) -> str:
        found = rows[name].get(figure)
        found = found["median"] if isinstance(found, dict) else found
        return format(found * factor, form) if found or (zero and found == 0) else ""

    return Column(title, cell)


def spread(title: str, figure: str, digits: int, factor: float = 1.0) -> Column:
    """Return the column of a figure with its quartiles, scaled by `factor`."""
    return Column(title, lambda rows, name: spread_cell(rows[name].get(figure), digits, factor))


def over(title: str, other: str, digits: int = 2) -> Column:
    """Return the column of the rows' times over another row's."""
    return Column(title, lambda rows, name: spread_cell(ratio(rows, name, other), digits))


def first_ratio(title: str, digits: int = 2) -> Column:
    """Return the column of each row's ratio to the first row that it is compared with."""
    return Column(
        title,
        lambda rows, name: spread_cell(
            next(iter(rows[name].get("ratios", {}).values()), None), digits
        ),
    )


def compared(title: str, digits: int = 2) -> Column:
    """Return the column of the time of the row that is compared with each row, over that row's
    own."""
    return Column(title, lambda rows, name: spread_cell(compared_with(rows, name), digits))


def table(rows: Rows, columns: Iterable[Column], first: str = "") -> list[str]:
    """Return a Markdown table with a line per row, without empty columns."""
    cells = {column.title: [column.cell(rows, name) for name in rows] for column in columns}
    shown = {title: texts for title, texts in cells.items() if any(texts)}
    return markdown_table(
        [first, *shown], [list(line) for line in zip(rows, *shown.values(), strict=True)]
    )


def publish(
    command: str,
    argv: Sequence[str],
    options: argparse.Namespace,
    rows: Rows,
    *tables: Sequence[str],
    about: str = "",
    goals: Sequence[Goal] = (),
    **more: Any,
) -> None:
    """Write the result of a benchmark to --output and print it.

    Args:
        command: the command without its arguments `argv`.
        tables: lines of the tables to print, between the machine and the goals.
        about: description of the measured setting, for the first line.
        more: further keys of the result, which override the usual ones.
    """
    result: Result = {
        "environment": results.environment(command, argv),
        "settings": vars(options),
        "rows": rows,
    }
    result |= {"missing": {}, "failures": {}, **more}
    results.write_json(options.output, result)
    below = ["", *remarks(result), *verdicts(goals, rows)]
    lines = [
        f"{about}{surroundings(result['environment'])}.",
        *(line for one in tables for line in ("", *one)),
        *below,
    ]
    print("\n".join(lines), flush=True)


def remarks(result: Result) -> Iterator[str]:
    """Yield a line per contestant that failed or cannot run."""
    yield from (f"failed: {name}: {reason}" for name, reason in result["failures"].items())
    yield from (f"not run: {name}: {reason}" for name, reason in result["missing"].items())


def surroundings(environment: Mapping[str, Any]) -> str:
    """Format machine, versions, commit and date as one line."""
    machine = environment["machine"]
    parts = [f"{machine['device']}, {machine['cores']} cores"]
    if machine.get("instruction_sets"):
        parts += [f"{library}: {name}" for library, name in machine["instruction_sets"].items()]
    known = environment["versions"].items()
    parts.append(
        ", ".join(
            f"{name} {version}" for name, version in known if version and name != "megatron_lite"
        )
    )
    return "; ".join([*parts, f"commit {environment['commit']}, {environment['date']}"])


@dataclass(frozen=True)
class Goal:
    """A goal for a figure of one row: at most `goal`, or at least if `at_least`."""

    row: str
    figure: str  # a figure of the row, or "/ OTHER": the ratio of its time to that of another row
    goal: float
    moonshot: float | None = None
    at_least: bool = False
    # settings of the runs that the goal applies to
    where: Mapping[str, Any] = field(default_factory=dict)

    def value(self, rows: Rows) -> float | None:
        """Return the measured value, the median of a spread; None if it was not measured."""
        other = self.figure.removeprefix("/ ")
        found: Any = rows.get(self.row, {}).get(self.figure)
        if other != self.figure:
            found = ratio(rows, self.row, other) if self.row in rows and other in rows else None
        return found["median"] if isinstance(found, dict) else found

    def met(self, value: float) -> bool:
        """Return whether a value reaches the goal."""
        return value >= self.goal if self.at_least else value <= self.goal

    def verdict(self, value: float) -> str:
        """Describe a measured value in one line."""
        moonshot = "" if self.moonshot is None else f", moonshot {self.moonshot:.4g}"
        wanted = f"at {'least' if self.at_least else 'most'} {self.goal:.4g}{moonshot}"
        name = f"{self.row}{' ' if self.figure[0] == '/' else ', '}{self.figure}"
        return f"{name}: {value:.4g}, goal: {wanted}: {'met' if self.met(value) else 'missed'}"


def verdicts(
    goals: Sequence[Goal], rows: Rows, settings: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield a line per goal that applies to these settings and was measured."""
    for goal in goals:
        value = goal.value(rows)
        if value is not None and all(
            (settings or {}).get(name) == wanted for name, wanted in goal.where.items()
        ):
            yield goal.verdict(value)


Tables = Mapping[str, Callable[[Any], Sequence[str]]]


def render(
    argv: Sequence[str], about: str | None, default: Path, tables: Tables, command: str
) -> int:
    """Write or compare the tables; return the exit code.

    Args:
        about: the command's description.
        default: the default report; if the file is missing, the tables are those of an empty
        report. tables: the writer of each table.
        command: regenerates the document; named in the message about a stale one.
    """
    parser = results.argument_parser(about)
    parser.add_argument("--report", type=Path, default=default, help=f"default docs/{default.name}")
    parser.add_argument(
        "--document", type=Path, default=DOCUMENT, help="default docs/benchmarks.md"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare only; exit code 1 if the document is stale"
    )
    options = parser.parse_args(argv)
    if options.report != default and not options.report.exists():
        parser.error(f"--report: {options.report} does not exist")
    report = results.read_json(options.report) or {}
    writers = {name: partial(write, report) for name, write in tables.items()}
    try:
        return write_documents(
            {options.document: lambda text: with_tables(text, writers)}, options.check, command
        )
    except ValueError as error:
        parser.error(f"--document: {options.document}: {error}")
