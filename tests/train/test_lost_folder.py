"""A run whose experiment directory is moved or removed ends with exit 8, and leaves the next run's
files alone."""

import shutil
from pathlib import Path

import pytest

from tests.support.launch import TINY, Start, read_exit, run
from tests.support.metrics import read_metrics
from tests.support.results import digests

ENDLESS = (
    *TINY,
    "--train_iters=100000",
    "--log_interval=10",
    "--checkpoint_interval=20",
    "--max_checkpoints=2",
)


@pytest.mark.parametrize("what", ["another run has its place", "removed"])
def test_a_run_ends_when_its_folder_is_gone(what: str, tmp_path: Path) -> None:
    """Exit 8 on all ranks within seconds, said once; the other run resumes nothing and is not
    written to."""
    experiment, moved = tmp_path / "run", tmp_path / "moved"
    with Start([*ENDLESS, f"--experiment_dir={experiment}"], ranks=2) as first:
        first.wait_until((experiment / "checkpoints" / "20").exists, "the first checkpoint")
        before: dict[str, str] = {}
        if what == "removed":
            experiment.rename(moved)  # at once; a deletion file by file would race with a save
            shutil.rmtree(moved)
        else:
            experiment.rename(moved)
            other = run(
                [
                    *TINY,
                    "--train_iters=3",
                    "--checkpoint_interval=1",
                    f"--experiment_dir={experiment}",
                ]
            )
            assert other.codes == [0] and "resumed" not in other.output, other.output
            before = digests(experiment)
        outcome = first.wait(10)
    assert outcome.codes == [8, 8], outcome.output
    (line,) = outcome.error_lines()
    assert line.startswith(
        f"ERROR: --experiment_dir={experiment} was moved or removed while the run used it"
    ), line
    if what == "removed":
        assert not experiment.exists() and not moved.exists(), "no folder is made again"
    else:
        assert digests(experiment) == before
        assert [record["iteration"] for record in read_metrics(experiment / "metrics.jsonl")] == [
            1,
            2,
            3,
        ]
        assert read_exit(experiment)["exit_code"] == 0 and read_exit(moved)["status"] == "running"
