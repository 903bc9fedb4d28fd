"""Mistakes in 8 bits, pipelines, hybrid shards and frozen parts are found in few of the layouts that are drawn."""

import functools

import pytest

from scripts.proof.cases import Case
from tests.support.planted_bugs import Bug
from tests.support.planted_mistakes import MISTAKES, MOST_LAYOUTS, Mistake, drawn, found_in

FOUND_BY_COMMAND = [mistake for mistake in MISTAKES if not mistake.test]
cases = functools.cache(drawn)


def test_every_mistake_has_its_place() -> None:
    """Each changes a function of the package as it is; names differ."""
    bugs = [bug for mistake in MISTAKES if isinstance(bug := getattr(mistake.plant, "__self__", None), Bug)]
    for bug in bugs:
        code, planted = bug.function().__code__, bug.mutated()
        assert planted != code and planted.co_freevars == code.co_freevars, bug.name  # else it cannot be planted
    assert len({mistake.name for mistake in MISTAKES}) == len(MISTAKES) == len(bugs) + 1


@pytest.mark.slow
@pytest.mark.parametrize("mistake", FOUND_BY_COMMAND, ids=[mistake.name for mistake in FOUND_BY_COMMAND])
def test_the_command_finds_it_in_forty_layouts(mistake: Mistake) -> None:
    """And not only where its code runs: without the mistake these layouts are equal, as another test shows."""
    some: list[Case] = cases()
    number, how = found_in(mistake, some)
    assert 0 < number <= MOST_LAYOUTS and how
