"""The pipeline of all benchmarks: contestants take turns, turns become rows, rows become JSON, JSON
becomes tables. Imports no torch.

A contestant is a name. `measure(name, round)` gives it one turn and returns the figures of that
turn; names of figures end with their unit. Every contestant has one turn in a round, in rotating
order, so that other load on the machine affects all of them alike, and a ratio compares two turns
of the same round.

A result is a JSON object with these keys:

- `environment`: `command` as typed, `date`, `commit` of this checkout (with "+" if files are
  changed), `machine` (device, cores, and more where it matters), `versions` of python and of the
  installed packages that compute
- `settings`: every option
- `rows`: one entry per contestant, which holds its figures: numbers, and spreads of numbers over
  the turns (`median`, `quartiles`, `values`). `ratios` in it are spreads of its time over that of
  another row, turn by turn, by the other's name
- `missing`: contestants that cannot run here, each with the reason
- `failures`: contestants that failed, each with the error

Each benchmark's module describes further keys.
"""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import megatron_lite
from megatron_lite.run.durable_files import replace_file
from scripts.benchmarks import processor
from scripts.benchmarks.commands import argument_parser
from scripts.docs.tables import ROOT, markdown_table, with_tables, write_documents

MIB, GIB = 2**20, 2**30
REPEATS = 6  # rounds at most, in multiples of the wanted ones, if few turns count
DOCUMENT = ROOT / "docs" / "benchmarks.md"
NOT_MEASURED = "not yet measured"
Figures = dict[str, Any]
Result = dict[str, Any]
Rows = Mapping[str, Mapping[str, Any]]
Spread = dict[str, Any]


# -- turns


class Turns:
    """Rounds in which every contestant has one turn, until enough turns count.

    Args:
        names: the contestants, in table order.
        measure: measures one turn, given a name and the number of the round; returns figures.
        turns: number of counted turns wanted per contestant.
        main: the figure to print and to take ratios of.
        warm_up: number of first rounds that do not count.
        max_others: count only turns whose figure `others`, the share of the cores used by other
            programs, is at most this.
        expected: errors that end one contestant; the others continue.
        prints: whether this process prints the progress.
    """

    def __init__(
        self,
        names: Iterable[str],
        measure: Callable[[str, int], Figures],
        turns: int,
        *,
        main: str = "seconds",
        warm_up: int = 0,
        max_others: float | None = None,
        expected: tuple[type[Exception], ...] = (),
        prints: bool = True,
    ) -> None:
        # By round; None: the turn does not count, or the contestant has failed.
        self.counted: dict[str, list[Figures | None]] = {name: [] for name in names}
        self.failures: dict[str, str] = {}
        self._measure = measure
        self._turns = turns
        self._main = main
        self._warm_up = warm_up
        self._max_others = max_others
        self._expected = expected
        self._prints = prints

    def run(self) -> Iterator[None]:
        """Measure, yielding after every round."""
        names = list(self.counted)
        for number in range(
            self._warm_up + self._turns * (REPEATS if self._max_others is not None else 1)
        ):
            first = number % len(names)  # rotates, so that no contestant follows the same one
            shown = {name: self._turn(name, number) for name in names[first:] + names[:first]}
            counts = [sum(map(bool, self.counted[name])) for name in self.sound()]
            if self._prints:
                times = [f"{name} {shown[name]:.4g}" for name in self.sound()]
                line = f"turn {number + 1}: {', '.join(times)} ({self._main})"
                print(f"benchmark: {line}; {min(counts, default=0)} count", file=sys.stderr)
            yield
            if min(counts, default=self._turns) >= self._turns:
                return

    def _turn(self, name: str, number: int) -> float | None:
        figures: Figures | None = None
        if name not in self.failures:
            try:
                figures = self._measure(name, number)
            except self._expected as error:
                self.fail(name, error)
        quiet = self._max_others is None or (figures or {}).get("others", 0.0) <= self._max_others
        self.counted[name].append(figures if number >= self._warm_up and quiet else None)
        return None if figures is None else figures[self._main]

    def fail(self, name: str, error: Exception) -> None:
        """Record a contestant's failure; it gets no more turns."""
        self.failures[name] = reason_of(error)
        print(f"benchmark: {name}: {self.failures[name]}", file=sys.stderr, flush=True)

    def sound(self) -> list[str]:
        """Return the contestants that have not failed."""
        return [name for name in self.counted if name not in self.failures]

    def values(self, name: str, figure: str) -> list[Any]:
        """Return a figure by round, None where the turn does not count."""
        return [turn and turn[figure] for turn in self.counted[name]]

    def spread(self, name: str, figure: str) -> Spread | None:
        """Return the spread of a figure over the turns that count, or None if none does."""
        return spread_of([value for value in self.values(name, figure) if value is not None])

    def ratio(self, own: str, other: str, figure: str = "", of_other: str = "") -> Spread | None:
        """Return the spread of a figure's ratio to another row's, over the rounds in which both
        count."""
        figure = figure or self._main
        pairs = zip(self.values(own, figure), self.values(other, of_other or figure), strict=True)
        return spread_of([a / b for a, b in pairs if a is not None and b is not None])

    def rows(
        self, *figures: str, others: Callable[[str], Iterable[str]]
    ) -> dict[str, dict[str, Any]]:
        """Return the spreads of figures by contestant, and the ratios to the rows that `others`
        names."""
        return {
            name: {figure: self.spread(name, figure) for figure in figures}
            | {"ratios": {other: self.ratio(name, other) for other in others(name)}}
            for name in self.counted
        }


def reason_of(error: Exception) -> str:
    """Describe an error in one line of at most 300 characters."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def spread_of(values: Sequence[float]) -> Spread | None:
    """Return median, quartiles and values of some numbers; None without a number."""
    if not values:
        return None
    low, median, high = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else list(values) * 3
    )
    return {"median": median, "quartiles": [low, high], "values": list(values)}


def median(found: Spread | float | None) -> float | None:
    """Return the median of a spread, or a number itself."""
    return found["median"] if isinstance(found, dict) else found


def ratio(rows: Rows, own: str, other: str) -> Spread | None:
    """Return the ratio of two rows' times, which a result may only hold in the other direction."""
    direct, reverse = (
        rows.get(a, {}).get("ratios", {}).get(b) for a, b in ((own, other), (other, own))
    )
    if direct is not None or reverse is None:
        return direct
    low, high = reverse["quartiles"]
    return {"median": 1 / reverse["median"], "quartiles": [1 / high, 1 / low]}


def compared_with(rows: Rows, name: str) -> Spread | None:
    """Return the time of the first row that is compared with `name`, over that of `name`."""
    return next(
        (row["ratios"][name] for row in rows.values() if name in row.get("ratios", {})), None
    )


# -- JSON

_VERSIONS = """
import importlib.metadata, json, platform
known = {"python": platform.python_version()}
for name in ("torch", "triton", "transformers", "accelerate", "litgpt"):
    try:
        known[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(known))
"""


def describe(
    command: str,
    argv: Sequence[str],
    settings: Mapping[str, Any],
    machine: Mapping[str, Any] | None = None,
    python: str = sys.executable,
) -> Result:
    """Return a result without rows.

    Args:
        command: the command without its arguments `argv`.
        settings: the options; `output` is left out.
        machine: further facts about the machine; `device` replaces the processor.
        python: the interpreter whose packages are measured.
    """
    versions = subprocess.run(
        [python, "-c", _VERSIONS], capture_output=True, text=True, check=True
    ).stdout
    environment = {
        "command": f"{command} {' '.join(argv)}".strip(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "machine": {"device": processor.name(), "cores": len(processor.cores()), **(machine or {})},
        "versions": {**json.loads(versions), "megatron_lite": megatron_lite.__version__},
    }
    return {
        "environment": environment,
        "settings": {name: value for name, value in settings.items() if name != "output"},
        "missing": {},
        "failures": {},
    }


def commit() -> str:
    """Return the commit of this checkout, with "+" if files are changed, or "unknown"."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+", "--abbrev=7"]
    try:
        return subprocess.run(
            [*words, "--exclude=*"], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_json(path: Path | None, result: Result) -> None:
    """Write a result atomically, and its folder; without a path do nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (json.dumps(result, indent=1, default=str) + "\n").encode())


def read_json(path: Path) -> Any:
    """Return the content of a JSON file, or None if it does not exist."""
    return json.loads(path.read_text("utf-8")) if path.exists() else None


# -- tables


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


def number(title: str, figure: str, form: str, factor: float = 1.0) -> Column:
    """Return the column of a figure or its median, scaled by `factor`; empty if missing or 0."""

    def cell(rows: Rows, name: str) -> str:
        found = median(rows[name].get(figure))
        return format(found * factor, form) if found else ""

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


def compared(title: str) -> Column:
    """Return the column of the time of the row that is compared with each row, over that row's
    own."""
    return Column(title, lambda rows, name: spread_cell(compared_with(rows, name), 2))


def table(rows: Rows, columns: Iterable[Column], first: str = "") -> list[str]:
    """Return a Markdown table with a line per row, without empty columns."""
    cells = {column.title: [column.cell(rows, name) for name in rows] for column in columns}
    shown = {title: texts for title, texts in cells.items() if any(texts)}
    return markdown_table(
        [first, *shown], [list(line) for line in zip(rows, *shown.values(), strict=True)]
    )


def profile_table(rows: Rows) -> list[str]:
    """Return the lines of a table of ms by kind of operation; empty if no row has a profile."""
    profiled = {name: row["profile_s"] for name, row in rows.items() if "profile_s" in row}
    kinds = list(
        dict.fromkeys(kind for parts in profiled.values() for kind in parts if parts[kind])
    )
    lines = [
        [
            name,
            f"{1000 * sum(parts.values()):.0f}",
            *(f"{1000 * parts.get(kind, 0):.1f}" for kind in kinds),
        ]
        for name, parts in profiled.items()
    ]
    return markdown_table(("", "profiled step, ms", *kinds), lines) if lines else []


def publish(
    result: Result, output: Path | None, about: str, *tables: Sequence[str], note: str = ""
) -> None:
    """Write a result and print it.

    Args:
        about: description of the measured setting, for the first line.
        tables: lines of the tables.
        note: a line below the tables.
    """
    write_json(output, result)
    lines = [f"{about}{surroundings(result['environment'])}."]
    lines += [line for one in tables for line in ("", *one)]
    print("\n".join([*lines, "", *filter(None, [note]), *remarks(result)]), flush=True)


def remarks(result: Result) -> Iterator[str]:
    """Yield a line per contestant that failed or cannot run."""
    yield from (f"failed: {name}: {reason}" for name, reason in result["failures"].items())
    yield from (f"not run: {name}: {reason}" for name, reason in result["missing"].items())


def surroundings(environment: Mapping[str, Any]) -> str:
    """Format machine, versions, commit and date as one line."""
    machine = environment["machine"]
    parts = [f"{machine['device']}, {machine['cores']} cores"]
    parts += [f"{name}: {isa}" for name, isa in machine.get("instruction_sets", {}).items()]
    versions = [
        f"{name} {version}"
        for name, version in environment["versions"].items()
        if version and name != "megatron_lite"
    ]
    parts.append(", ".join(versions))
    return "; ".join([*parts, f"commit {environment['commit']}, {environment['date']}"])


Tables = Mapping[str, Callable[[Any], Sequence[str]]]


def render(
    argv: Sequence[str], about: str | None, default: Path, tables: Tables, command: str
) -> int:
    """Write a report's tables into the document, or compare them; return the exit code.

    Args:
        about: the command's description.
        default: the default report; if the file is missing, the tables are those of an empty
            report.
        tables: the writer of each table.
        command: regenerates the document; named in the message about a stale one.
    """
    parser = argument_parser(about)
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
    report = read_json(options.report) or {}
    writers = {name: partial(write, report) for name, write in tables.items()}
    try:
        return write_documents(
            {options.document: lambda text: with_tables(text, writers)}, options.check, command
        )
    except ValueError as error:
        parser.error(f"--document: {options.document}: {error}")
