"""SIGKILL at random moments to ranks and launchers: see tests/faults/kills.py, which also runs by itself."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "more",
    [
        "--kills=1 --seed=4 --iterations=8",  # of the launcher, and a start beside the ranks that it leaves
        pytest.param("--kills=150", marks=pytest.mark.slow),
        pytest.param("--kills=8 --torchrun", marks=pytest.mark.slow),
    ],
)
def test_random_kills(more: str) -> None:
    """Nothing published is lost or damaged, the end has the bits of an undisturbed run, and nothing is left over."""
    command = [sys.executable, "-m", "tests.faults", *more.split()]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert " 0 bad outcomes" in outcome.stdout, outcome.stdout
