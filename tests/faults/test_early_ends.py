"""Signals and kills before the first iteration: see tests/faults/early_ends.py, which also runs by
itself."""

import random
import signal
from pathlib import Path

import pytest

from tests.faults.early_ends import RENDEZVOUS, Moment, draw, prepare, problems


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint."""
    return prepare(tmp_path_factory.mktemp("early"))


@pytest.mark.parametrize(
    "moment",
    [
        Moment(2, "forked", True, signal.SIGTERM, None, RENDEZVOUS, 0.0),
        Moment(3, "forked", True, signal.SIGINT, 1, "in the choice of a checkpoint", 0.0),
        Moment(2, "forked", False, signal.SIGKILL, 0, "in the loading", 0.0),
    ],
    ids=str,
)
def test_a_start_that_ends_early(moment: Moment, saved: Path, tmp_path: Path) -> None:
    """exit.json, the exit codes and the output tell one story."""
    assert not problems(moment, saved, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_early_ends(seed: int, saved: Path, tmp_path: Path) -> None:
    """300 starts of one to three ranks, some under torchrun."""
    chance = random.Random(seed)
    for _ in range(25):
        moment = draw(chance, torchrun=0.15)
        assert not (found := problems(moment, saved, tmp_path)), f"{moment}: {found}"
