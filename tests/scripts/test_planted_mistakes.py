"""Mistakes in 8 bits, pipelines, hybrid shards and frozen parts are found in few of the layouts
that are drawn."""

import functools
from pathlib import Path

import pytest

from scripts.proof.cases import Case
from tests.support.mutants import fails
from tests.support.planted_bugs import Bug
from tests.support.planted_mistakes import MISTAKES, MOST_LAYOUTS, Mistake, drawn, found_in

FOUND_BY_COMMAND = [mistake for mistake in MISTAKES if not mistake.test]
FOUND_BY_TEST = [mistake for mistake in MISTAKES if mistake.test]
cases = functools.cache(drawn)


def bug_of(mistake: Mistake) -> Bug | None:
    bug = getattr(mistake.plant, "__self__", None)
    return bug if isinstance(bug, Bug) else None


def test_every_mistake_has_its_place() -> None:
    """Each changes a function of the package as it is; names differ."""
    bugs = [bug for mistake in MISTAKES if (bug := bug_of(mistake)) is not None]
    for bug in bugs:
        code, planted = bug.function().__code__, bug.mutated()
        # else it cannot be planted
        assert planted != code and planted.co_freevars == code.co_freevars, bug.name
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) == len(bugs) + 1
    assert len(FOUND_BY_TEST) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", FOUND_BY_COMMAND, ids=[mistake.name for mistake in FOUND_BY_COMMAND]
)
def test_the_command_finds_it_in_forty_layouts(mistake: Mistake) -> None:
    """And not only where its code runs: without the mistake these layouts are equal, as another
    test shows."""
    some: list[Case] = cases()
    number, how = found_in(mistake, some)
    assert 0 < number <= MOST_LAYOUTS and how


@pytest.mark.slow
@pytest.mark.parametrize("mistake", FOUND_BY_TEST, ids=[mistake.name for mistake in FOUND_BY_TEST])
def test_a_default_test_finds_it(mistake: Mistake, tmp_path: Path) -> None:
    """In a copy of the checkout with the mistake."""
    bug = bug_of(mistake)
    assert bug is not None
    assert fails(mistake.test, tmp_path / "checkout", bug.write_into)
