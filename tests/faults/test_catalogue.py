"""The catalogue is whole, and every test that it names exists."""

import ast
from pathlib import Path

from tests.faults.catalogue import read_catalogue

TESTS = Path(__file__).resolve().parents[1]


def test_every_row_is_there_once() -> None:
    """All rows in order, each with a promise and tests, or with a reason."""
    rows = read_catalogue()
    assert [row.number for row in rows] == list(range(1, 104))
    assert not [
        row
        for row in rows
        if bool(row.tests) == bool(row.reason) or bool(row.tests) != bool(row.promise)
    ]


def test_every_named_test_exists() -> None:
    """Nobody renames or deletes a test without the catalogue."""
    names = sorted({name for row in read_catalogue() for name in row.tests})
    functions = {
        file: _functions(TESTS / file) for file in {name.partition("::")[0] for name in names}
    }
    assert not [
        name for name in names if name.partition("::")[2] not in functions[name.partition("::")[0]]
    ]


def _functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
