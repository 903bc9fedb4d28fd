"""Write the table of docs/reliability.md: every fault in the catalogue with its test results.

    bash scripts/run_tests.sh -m faults --junitxml=faults.xml    run the tests (add -n 4 for four processes)
    python -m scripts.docs.reliability faults.xml                write the table; later files override earlier ones
    python -m scripts.docs.reliability --check                   exit code 1 if rows differ from the catalogue

The catalogue is tests/faults/catalogue.txt. A row without a result in the files stays as it is.
Every parametrized case of a test counts.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.docs.tables import ROOT, markdown_table, with_tables, write_documents
from tests.faults.catalogue import Row, read_catalogue

TARGET = ROOT / "docs" / "reliability.md"
COMMAND = "python -m scripts.docs.reliability FILE"
Counts = Mapping[str, int]  # result -> cases


def read_results(paths: Sequence[Path]) -> dict[str, collections.Counter[str]]:
    """Return test (file::function below tests/) -> result -> cases, from pytest's JUnit files.

    The result of a case in a later file replaces that in an earlier one.
    """
    cases: dict[tuple[str, str], str] = {}
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            file = case.attrib["classname"].removeprefix("tests.").replace(".", "/") + ".py"
            kinds = {child.tag for child in case}
            failed, skipped = bool(kinds & {"failure", "error"}), "skipped" in kinds
            cases[file, case.attrib["name"]] = (
                "failed" if failed else "skipped" if skipped else "passed"
            )
    results: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for (file, name), result in cases.items():
        results[f"{file}::{name.partition('[')[0]}"][result] += 1
    return results


def outcome(row: Row, results: Mapping[str, Counts]) -> str:
    """Return the last cell of a row: the results of its tests."""
    if not row.tests:
        return f"no promise: {row.reason}"
    total: collections.Counter[str] = collections.Counter()
    for name in row.tests:
        total.update(results.get(name, {"missing": 1}))
    if total["missing"] == len(row.tests):
        return "not run"
    cases = f"{total['passed']} case{'s' * (total['passed'] != 1)}"
    rest = [f"{total[kind]} {word}" for kind, word in REST.items() if total[kind]]
    word = "FAILED" if total["failed"] else "pass" if total["passed"] else "not run"
    return f"{word} ({', '.join([cases, *rest])})"


REST = {"failed": "failed", "skipped": "skipped", "missing": "not run"}


def render(cells: Mapping[int, str]) -> list[str]:
    """Return the lines of the table, given the last cell of each row."""
    rows = read_catalogue()
    words = collections.Counter(cells[row.number].split(" ")[0].rstrip(":") for row in rows)
    tested = sum(bool(row.tests) for row in rows)
    lines = [
        f"{tested} of {len(rows)} faults have a promise and tests. In their last run, tests of {words['pass']} passed "
        f"and those of {words['FAILED']} failed."
    ]
    for group, members in itertools.groupby(rows, key=lambda row: row.group):
        cells_of = [(str(row.number), row.fault, row.promise, cells[row.number]) for row in members]
        lines += [
            "",
            f"**{group}**",
            "",
            *markdown_table(("", "fault", "promise", "tests"), cells_of),
        ]
    return lines


def written_cells(page: str) -> dict[int, str]:
    """Return the last cell of each row on the page."""
    return {
        int(number): cell
        for number, cell in re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", page, re.M)
    }


def main(argv: list[str]) -> int:
    """Write the page from result files, or check its rows; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="pytest results in JUnit format"
    )
    parser.add_argument(
        "--check", action="store_true", help="only compare the rows with the catalogue"
    )
    options = parser.parse_args(argv)
    if options.check == bool(options.files):
        parser.error("give result files, or --check")
    rows = read_catalogue()
    cells = written_cells(TARGET.read_text("utf-8"))
    if options.check:
        if list(cells) != [row.number for row in rows]:
            return 1
    else:
        results = read_results(options.files)
        for row in rows:
            if (
                row.number not in cells
                or not row.tests
                or any(name in results for name in row.tests)
            ):
                cells[row.number] = outcome(row, results)
    writers = {"faults": lambda: render(cells)}
    code = write_documents(
        {TARGET: lambda page: with_tables(page, writers)}, options.check, COMMAND
    )
    return code or int(
        any(cell.startswith("FAILED") for cell in cells.values()) and not options.check
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
