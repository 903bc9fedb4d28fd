"""The command that puts a report into docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scripts.benchmarks.results import ROOT, argument_parser, read_json
from scripts.docs.tables import with_tables, write_documents

DOCUMENT = ROOT / "docs" / "benchmarks.md"
Tables = Mapping[str, Callable[[Any], Sequence[str]]]


def render(argv: Sequence[str], about: str | None, default: Path, tables: Tables, command: str) -> int:
    """Write or compare the tables; return the exit code.

    Args:
        about: the description of the command.
        default: the report if none is named; without that file every table is of an empty report.
        tables: the writer of each table.
        command: what writes the document, for the message about a stale one.
    """
    parser = argument_parser(about)
    parser.add_argument("--report", type=Path, default=default, help=f"default docs/{default.name}")
    parser.add_argument("--document", type=Path, default=DOCUMENT, help="default docs/benchmarks.md")
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 if the document is stale")
    options = parser.parse_args(argv)
    if options.report != default and not options.report.exists():
        parser.error(f"--report: {options.report} does not exist")
    report = read_json(options.report) or {}
    writers = {name: partial(write, report) for name, write in tables.items()}
    try:
        return write_documents({options.document: lambda text: with_tables(text, writers)}, options.check, command)
    except ValueError as error:
        parser.error(f"--document: {options.document}: {error}")
