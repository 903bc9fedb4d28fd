"""Tasks of srun without torchrun under a real Slurm: ranks of one run, their signals, their
limits."""

import re
import time

import pytest

from tests.cluster.conftest import Seen
from tests.cluster.slurm import GRACE_S, KILL_WAIT_S, TINY, Run, Slurm, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
TWO = "--nodes=2 --ntasks-per-node=1 --time=10"


def test_a_rank_is_killed(slurm: Slurm, record_property: Seen) -> None:
    """srun for each rank: SIGKILL of one rank"""
    run = slurm.run()
    job = slurm.submit_tasks(run, f"{TWO} --nodelist=mlc01,mlc02 srun", "--train_iters=100000")
    run.trains()
    slurm.nodes["mlc02"].call("pkill", "-KILL", "-f", "python pretrain_gpt")
    seconds = until(lambda: not slurm.nodes["mlc01"].processes("python pretrain_gpt"))
    assert slurm.ends(job) == "FAILED" and run.exit()["exit_code"] == 6, slurm.log(job)
    record_property("seen", f"the other ended after {seconds:.0f} s with 6")


@pytest.mark.parametrize("fsync_s", [1, 5], ids=["short", "long"])
def test_preempted(fsync_s: int, slurm: Slurm, record_property: Seen) -> None:
    """3: srun for each rank: preempted; the save ends within GraceTime, or within KillWait after it"""
    run = slurm.run()
    options = f"{TWO} --partition=grace --requeue srun"
    job = slurm.submit_tasks(run, options, "--train_iters=100000", SLOW_FSYNC_S=str(fsync_s))
    run.trains()
    slurm.preempt()
    until(lambda: run.exit().get("exit_code"), lambda: slurm.log(job))
    assert run.exit()["exit_code"] == 75 and run.checkpoints(), slurm.log(job)
    seconds = slurm.save_s(job)
    assert (seconds > GRACE_S) == (fsync_s == 5), seconds
    state = slurm.wait(job, "FAILED", "PENDING")
    record_property(
        "seen",
        f"a save of {seconds} s, GraceTime={GRACE_S}, KillWait={KILL_WAIT_S}: saved, 75, job {state}",
    )


def test_arbitrary_distribution(slurm: Slurm, record_property: Seen) -> None:
    """7: srun -m arbitrary with a host file"""
    run = slurm.run()
    hosts = slurm.folder / "runs" / "hosts"
    hosts.write_text("mlc05\nmlc02\n")
    job = slurm.submit_tasks(
        run,
        "--nodes=2 --nodelist=mlc02,mlc05 --time=10 srun -N2 --ntasks-per-node=1 -m arbitrary",
        "--train_iters=3 --startup_timeout=20",
        SLURM_HOSTFILE=str(hosts),
    )
    assert slurm.ends(job) == "FAILED"
    log = slurm.log(job)
    assert "SLURM_DISTRIBUTION=arbitrary" in log and "MASTER_ADDR" in log, log
    record_property("seen", "refused in a line that asks for MASTER_ADDR")


def test_stop_before_the_end(slurm: Slurm, record_property: Seen) -> None:
    """6: `--time=2 --stop_before_end_s=80`"""
    run = slurm.run()
    job = slurm.submit_tasks(
        run, f"{TWO} --time=2 srun", "--train_iters=100000 --stop_before_end_s=80"
    )
    slurm.ends(job)
    assert run.exit()["exit_code"] == 75 and "--stop_before_end_s" in str(run.exit()["message"]), (
        slurm.log(job)
    )
    record_property("seen", f"{slurm.job(job)['RunTime']} of 00:02:00: {run.exit()['message']}")


def test_another_time_limit(slurm: Slurm, record_property: Seen) -> None:
    """`scontrol update TimeLimit` from 2 to 3 minutes, `--stop_before_end_s=80`"""
    run = slurm.run()
    job = slurm.submit_tasks(
        run, f"{TWO} --time=2 srun", "--train_iters=100000 --stop_before_end_s=80"
    )
    run.trains()
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=3")
    slurm.ends(job)
    assert run.exit()["exit_code"] == 75 and slurm.job(job)["RunTime"] > "00:01:30", slurm.log(job)
    record_property("seen", f"{slurm.job(job)['RunTime']} of 00:03:00: {run.exit()['message']}")


def wrapped(slurm: Slurm, run: Run, start: str, *options: str) -> int:
    """Submit one command, without a script and without srun; return the job's id. start: what comes
    before python."""
    flags = f"{' '.join(TINY)} --train_iters=100000 --data_path=$DATA_PATH --experiment_dir=$EXP_BASE_DIR"
    return slurm.submit(
        run, *options, f"--wrap=. $VENV/bin/activate; {start} python pretrain_gpt.py {flags}"
    )


def test_wrapped_without_srun(slurm: Slurm, record_property: Seen) -> None:
    """`sbatch --wrap='python pretrain_gpt.py ...'`, without srun: `scancel --signal=TERM`, then
    `scancel`"""
    run = slurm.run()
    job = wrapped(slurm, run, "", "--time=10")
    run.trains()
    slurm.as_nobody("scancel", "--signal=TERM", str(job))
    time.sleep(5)
    first = slurm.job(job)["JobState"]
    slurm.as_nobody("scancel", str(job))
    slurm.ends(job)
    until(lambda: not slurm.nodes["mlc01"].processes("pretrain_gpt"))
    assert first == "RUNNING" and not run.checkpoints()
    record_property(
        "seen",
        f"no signal reaches it; killed at once, nothing saved, exit.json {run.exit()['status']}",
    )


@pytest.mark.parametrize(
    ("start", "signal"), [("exec", "--signal=B:TERM@60"), ("srun", "--signal=TERM@60")]
)
def test_wrapped(start: str, signal: str, slurm: Slurm, record_property: Seen) -> None:
    """`sbatch --time=2 --wrap=...` of `exec python` with --signal=B:TERM@60, or `srun python` with
    --signal=TERM@60"""
    run = slurm.run()
    job = wrapped(slurm, run, start, "--time=2", signal)
    until(lambda: run.exit().get("exit_code"), lambda: slurm.log(job))
    assert run.exit()["exit_code"] == 75 and run.checkpoints(), slurm.log(job)
    state = slurm.ends(job)
    seconds = slurm.job(job)["RunTime"]
    record_property("seen", f"{start}: saved {run.checkpoints()[-1]} after {seconds}, 75, {state}")


@pytest.mark.parametrize("start", ["exec", "srun"])
def test_wrapped_and_cancelled(start: str, slurm: Slurm, record_property: Seen) -> None:
    """`sbatch --wrap='exec python ...'` or `srun python ...`, then `scancel`"""
    run = slurm.run()
    job = wrapped(slurm, run, start, "--time=10")
    run.trains()
    slurm.as_nobody("scancel", str(job))
    assert slurm.ends(job) == "CANCELLED" and run.exit()["exit_code"] == 75, slurm.log(job)
    record_property("seen", f"{start}: saved {run.checkpoints()[-1]}, 75, CANCELLED")


def ranks(slurm: Slurm, job: int) -> str:
    """Return the numbers of ranks that runs of the job have shown."""
    return " and ".join(re.findall(r"  ranks \.+ (\d+)", slurm.log(job)))


def test_unequal_nodes(slurm: Slurm, record_property: Seen) -> None:
    """five tasks on nodes of two and of four cores"""
    run = slurm.run()
    options = "--nodes=2 --nodelist=mlc02,mlc05 --ntasks=5 --cpus-per-task=1 --time=10 srun"
    job = slurm.submit_tasks(run, options, "--train_iters=3 --batch_size=5")
    assert slurm.ends(job) == "COMPLETED" and ranks(slurm, job) == "5", slurm.log(job)
    record_property("seen", "COMPLETED, 5 ranks")


def test_heterogeneous_job(slurm: Slurm, record_property: Seen) -> None:
    """a heterogeneous job of one and two tasks, `srun --het-group=0,1`"""
    run = slurm.run()
    options = (
        "--nodelist=mlc02 --ntasks=1 --time=10 : --nodelist=mlc05 --ntasks=2 srun --het-group=0,1"
    )
    job = slurm.submit_tasks(run, options, "--train_iters=3 --batch_size=6 --startup_timeout=30")
    assert slurm.ends(job) == "COMPLETED" and ranks(slurm, job) == "3", slurm.log(job)
    record_property("seen", "COMPLETED, 3 ranks")
