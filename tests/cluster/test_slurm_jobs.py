"""The jobs of scripts/examples under a real Slurm: to the end, preempted, at their time limit, cancelled."""

from collections.abc import Callable

import pytest

from tests.cluster.slurm import TINY, Slurm, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
MULTI, PREEMPTIBLE = "scripts/examples/slurm_multi_node.sbatch", "scripts/examples/slurm_preemptible.sbatch"
TWO = ("--nodes=2", "--cpus-per-task=1", "--time=10")
LONG = (*TINY, "--train_iters=100000")
Seen = Callable[[str, object], None]


def test_to_the_end(slurm: Slurm, record_property: Seen) -> None:
    """slurm_multi_node.sbatch on two nodes ends as COMPLETED and prints exit.json."""
    run = slurm.run()
    job = slurm.submit(run, *TWO, MULTI, *TINY, "--train_iters=20")
    assert slurm.ends(job) == "COMPLETED", slurm.log(job)
    assert '"exit_code": 0' in slurm.log(job) and run.checkpoints() == [20]
    record_property("seen", slurm.version())


def test_cancelled_is_cancelled(slurm: Slurm, record_property: Seen) -> None:
    """scancel of slurm_preemptible.sbatch: saved, and not put back into the queue."""
    run = slurm.run()
    job = slurm.submit(run, *TWO, PREEMPTIBLE, *LONG)
    run.trains()
    slurm.as_nobody("scancel", str(job))
    until(lambda: slurm.job(job)["JobState"] not in ("RUNNING", "COMPLETING"))
    until(lambda: slurm.job(job)["JobState"] in ("CANCELLED", "PENDING"))
    assert slurm.job(job)["JobState"] == "CANCELLED", slurm.job(job)
    assert run.exit()["exit_code"] == 75 and run.checkpoints()
    record_property("seen", f"saved {run.checkpoints()}, CANCELLED, restarts {slurm.job(job)['Restarts']}")
