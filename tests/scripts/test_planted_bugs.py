"""Bugs that were published for other trainers are found when they are planted here."""

import shlex
from pathlib import Path

import pytest

from scripts import prove_layouts
from scripts.docs.tables import with_tables
from tests.support.mutants import fails
from tests.support.planted_bugs import BUGS, GUIDE, Bug, table

FOUND_BY_COMMAND = [bug for bug in BUGS if not bug.test]
FOUND_BY_TEST = [bug for bug in BUGS if bug.test]


def test_every_bug_has_its_place_and_the_guide_names_it() -> None:
    """`python -m tests.support.planted_bugs` writes the table."""
    assert all(bug.mutated() != bug.function().__code__ for bug in BUGS)
    text = GUIDE.read_text("utf-8")
    assert with_tables(text, {"planted": table}) == text


@pytest.mark.slow
@pytest.mark.parametrize("bug", FOUND_BY_COMMAND, ids=[bug.name for bug in FOUND_BY_COMMAND])
def test_the_command_finds_it_within_40_layouts(
    bug: Bug, capsys: pytest.CaptureFixture[str]
) -> None:
    """And without the bug, the smallest case that shows it passes."""
    words = ["--count=40", *([f"--like={bug.like}"] if bug.like else [])]
    assert prove_layouts.main(words, bug.plant) == 5
    output = capsys.readouterr()
    _, _, command = (output.out + output.err).rpartition(
        "shown again by: python scripts/prove_layouts.py "
    )
    assert prove_layouts.main(shlex.split(command)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("bug", FOUND_BY_TEST, ids=[bug.name for bug in FOUND_BY_TEST])
def test_a_default_test_finds_it(bug: Bug, tmp_path: Path) -> None:
    assert fails(bug.test, tmp_path / "checkout", bug.write_into)
