"""SIGKILL at random moments to ranks and launchers: see tests/faults/kills.py, which also runs by
itself."""

import subprocess
from pathlib import Path

import pytest

from tests.support import warm_python

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow  # by default tests/train/test_resume.py kills ranks, and tests/run/test_launcher_watch.py a launcher
@pytest.mark.parametrize(
    "more",
    [
        "--kills=1 --seed=4 --iterations=8",  # of the launcher, and a start beside the ranks that it leaves
        "--kills=150",
        "--kills=8 --torchrun",
    ],
)
def test_random_kills(more: str) -> None:
    """Nothing published is lost or damaged, the end has the bits of an undisturbed run, and nothing
    is left over."""
    command = [str(warm_python.folder() / "python"), "-m", "tests.faults", *more.split()]
    environment = warm_python.environment()
    outcome = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200
    )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert " 0 bad outcomes" in outcome.stdout, outcome.stdout
