"""docs/planner.md shows what dry runs print today, and names every flag of a plan."""

from __future__ import annotations

import re

import pytest

from megatron_lite.planner.command import PLANNING
from scripts.benchmarks.machine.predictions import MODELS
from scripts.docs import dry_runs
from tests.support import documents, warm_python

pytestmark = pytest.mark.guides

GUIDE = documents.read("planner")


def test_outputs_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run again, the dry runs of three documents print what stands below them, and the published speeds are ours."""
    monkeypatch.setattr(dry_runs, "PYTHON_FOLDER", warm_python.folder())
    assert dry_runs.main(["--check"]) == 0


def test_mistral_7b_gets_a_command_on_8_and_on_16_gpus() -> None:
    """Both worked outputs end with a launcher line that sets what fits."""
    outputs = [found[3] for found in dry_runs.SHOWN.finditer(GUIDE)]
    assert len(outputs) == 2
    for output, launcher in zip(outputs, ("--nproc-per-node=8", "--nnodes=2 --nproc-per-node=8"), strict=True):
        assert output.startswith("WARNING: does not fit") and "GPU-hours" in output and "a checkpoint" in output
        command = output.rpartition("run this")[2]
        assert launcher in command and "--micro_batch_size=1" in command


def test_every_flag_of_a_plan_is_explained() -> None:
    """The page names each, and its table of predictions has each model within 15 %."""
    assert not [name for name in PLANNING if f"--{name}" not in GUIDE]
    for name in MODELS:
        (ratio,) = re.findall(rf"^\| {re.escape(name)} \|[^|]*\|[^|]*\| ([\d.]+) \|", GUIDE, re.M)
        assert abs(float(ratio) - 1) <= 0.15
