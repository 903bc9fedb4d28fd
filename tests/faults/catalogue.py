"""What goes wrong in training runs, what this program does then, and the tests that prove it:
catalogue.txt, read.

A row has a promise and tests, as file::function below tests/, or the reason (`none:`) why there is
no promise. `python -m scripts.docs.reliability` writes the rows, with the results of a test run,
into docs/reliability.md.
"""

import re
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """A fault of the catalogue."""

    number: int
    group: str
    fault: str
    promise: str
    tests: tuple[str, ...]
    reason: str  # why there is no test


def read_catalogue() -> list[Row]:
    """Return the rows in order.

    Raises:
        ValueError: for a line that is not of the format.
    """
    path = Path(__file__).with_name("catalogue.txt")
    rows: list[Row] = []
    group = ""
    for line in filter(str.strip, path.read_text("utf-8").splitlines()):
        if found := re.fullmatch(r"# (.+)", line):
            group = found[1]
        elif found := re.fullmatch(r"(\d+)\. (.+)", line):
            rows.append(Row(int(found[1]), group, found[2], "", (), ""))
        elif rows and (found := re.fullmatch(r" +(promise|test|none): (.+)", line)):
            kind, text = found.groups()
            last = rows[-1]
            if kind == "test":
                rows[-1] = last._replace(tests=(*last.tests, text))
            else:
                rows[-1] = (
                    last._replace(promise=text) if kind == "promise" else last._replace(reason=text)
                )
        else:
            raise ValueError(f"{path}: {line!r}")
    return rows
