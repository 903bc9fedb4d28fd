"""The jobs of scripts/examples and of the planner under a real Slurm: to the end, stopped,
cancelled, cut off."""

import re
from pathlib import Path

import pytest

from tests.cluster.conftest import Seen
from tests.cluster.slurm import GRACE_S, KILL_WAIT_S, TINY, Run, Slurm, until

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
MULTI = "scripts/examples/slurm_multi_node.sbatch"
PREEMPTIBLE = "scripts/examples/slurm_preemptible.sbatch"
SINGLE = "scripts/examples/slurm_single_node.sbatch"
TWO = ("--nodes=2", "--cpus-per-task=1", "--time=10")
LONG = (*TINY, "--train_iters=100000")
WHOLE = 200


@pytest.fixture(scope="module")
def whole(slurm: Slurm) -> Run:
    """A run that nothing disturbs."""
    run = slurm.run()
    job = slurm.submit(run, *TWO, MULTI, *TINY, f"--train_iters={WHOLE}")
    assert slurm.ends(job) == "COMPLETED", slurm.log(job)
    assert '"exit_code": 0' in slurm.log(job)
    return run


def test_to_the_end(whole: Run, slurm: Slurm, record_property: Seen) -> None:
    """slurm_multi_node.sbatch on two nodes trains to the end"""
    assert whole.checkpoints() == [WHOLE]
    record_property("seen", f"COMPLETED, exit.json printed ({slurm.version()})")


def test_preempted(whole: Run, slurm: Slurm, record_property: Seen) -> None:
    """slurm_preemptible.sbatch is preempted in a partition with a grace time"""
    run = slurm.run()
    job = slurm.submit(run, *TWO, "--partition=grace", PREEMPTIBLE, *TINY, f"--train_iters={WHOLE}")
    run.trains()
    slurm.preempt()
    slurm.comes_back(job)
    saved = run.checkpoints()
    assert slurm.ends(job) == "COMPLETED", slurm.log(job)
    assert run.losses() == whole.losses()
    record_property(
        "seen", f"saved {saved[0]}, requeued, resumed, all losses equal to the undisturbed run's"
    )


def test_a_save_longer_than_the_grace_time(slurm: Slurm, record_property: Seen) -> None:
    """3: slurm_preemptible.sbatch is preempted; the save ends within KillWait after GraceTime"""
    run = slurm.run()
    job = slurm.submit(run, *TWO, "--partition=grace", PREEMPTIBLE, *LONG, SLOW_FSYNC_S="5")
    run.trains()
    slurm.preempt()
    slurm.comes_back(job)
    (saved,) = run.checkpoints()
    seconds = slurm.save_s(job)
    assert seconds > GRACE_S
    run.trains(saved)
    record_property(
        "seen",
        f"saved {saved} in {seconds} s, GraceTime={GRACE_S}, KillWait={KILL_WAIT_S}, requeued, resumed",
    )


def test_time_limit(slurm: Slurm, record_property: Seen) -> None:
    """slurm_preemptible.sbatch comes near its time limit, with `--signal=TERM@60 --time=2`"""
    run = slurm.run()
    job = slurm.submit(run, *TWO, "--signal=TERM@60", "--time=2", PREEMPTIBLE, *LONG)
    slurm.comes_back(job)
    saved = run.checkpoints()
    run.trains(saved[-1])
    record_property("seen", f"saved {saved[-1]}, requeued, resumed")


def test_cancelled_is_cancelled(slurm: Slurm, record_property: Seen) -> None:
    """1: scancel of slurm_preemptible.sbatch"""
    run = slurm.run()
    job = slurm.submit(run, *TWO, PREEMPTIBLE, *LONG)
    run.trains()
    slurm.as_nobody("scancel", str(job))
    state = slurm.wait(job, "CANCELLED", "PENDING")
    assert state == "CANCELLED" and slurm.job(job)["Restarts"] == "0", slurm.job(job)
    assert run.exit()["exit_code"] == 75 and run.checkpoints()
    record_property("seen", f"saved {run.checkpoints()[-1]}, CANCELLED, not requeued")


@pytest.mark.parametrize(
    ("script", "signal"), [(SINGLE, "USR1"), (MULTI, "TERM"), (PREEMPTIBLE, "USR1")]
)
def test_the_script_alone_is_signalled(
    script: str, signal: str, slurm: Slurm, record_property: Seen
) -> None:
    """`--signal=B:...` signals the batch script alone"""
    run = slurm.run()
    nodes = "--nodes=1" if script == SINGLE else "--nodes=2"
    job = slurm.submit(run, *TWO, nodes, script, *LONG)
    run.trains()
    slurm.as_nobody("scancel", "--batch", f"--signal={signal}", str(job))
    if script == PREEMPTIBLE:
        slurm.comes_back(job)
    else:
        assert slurm.ends(job) == "FAILED", slurm.log(job)
        assert run.exit()["exit_code"] == 75, slurm.log(job)
    assert run.checkpoints(), slurm.log(job)
    record_property("seen", f"{Path(script).name}, {signal}: saved {run.checkpoints()[-1]}")


def test_a_start_before_python(slurm: Slurm, record_property: Seen) -> None:
    """8: torchrun cannot start, and exit.json is that of a start with a data error"""
    run = slurm.run()
    run.folder.mkdir(mode=0o777)
    run.folder.chmod(0o777)
    (run.folder / "exit.json").write_text('{\n  "exit_code": 3,\n  "status": "failed"\n}\n')
    job = slurm.submit(run, *TWO, PREEMPTIBLE, *LONG, BROKEN_DRIVER="1")
    until(lambda: slurm.job(job)["Restarts"] == "1" or slurm.job(job)["JobState"] == "FAILED")
    assert "would come back" not in slurm.log(job), slurm.log(job)
    record_property("seen", "requeued: exit.json of the start before does not count")


def test_data_missing_on_one_node(slurm: Slurm, record_property: Seen) -> None:
    """the data are missing on the second node"""
    run = slurm.run()
    folder = str(slurm.folder / "data")
    slurm.nodes["mlc02"].call("mount", "-t", "tmpfs", "none", folder)
    try:
        job = slurm.submit(run, *TWO, "--nodelist=mlc01,mlc02", PREEMPTIBLE, *LONG)
        assert slurm.ends(job) == "FAILED", slurm.log(job)
    finally:
        slurm.nodes["mlc02"].call("umount", folder)
    assert slurm.job(job)["ExitCode"] == "3:0" and "exit code 3 would come back" in slurm.log(job)
    record_property("seen", "exit.json 3, job FAILED 3:0, not requeued")


def test_cable_pulled(slurm: Slurm, record_property: Seen) -> None:
    """the cable of a node is pulled, `--distributed_timeout=20`"""
    run = slurm.run()
    flags = ("--distributed_timeout=20", "--checkpoint_interval=20")
    job = slurm.submit(run, *TWO, "--nodelist=mlc01,mlc02", PREEMPTIBLE, *LONG, *flags)
    until(lambda: run.checkpoints())
    node = slurm.nodes["mlc02"]
    node.plug("down")
    seconds = until(
        lambda: (
            not node.processes("pretrain_gpt")
            and not slurm.nodes["mlc01"].processes("pretrain_gpt")
        )
    )
    saved = run.checkpoints()
    node.plug("up")
    until(lambda: slurm.job(job)["Restarts"] != "0", lambda: slurm.log(job))
    run.trains(saved[-1])
    record_property("seen", f"no process after {seconds:.0f} s, requeued, resumed from {saved[-1]}")


def test_export_list(slurm: Slurm, record_property: Seen) -> None:
    """5: slurm_multi_node.sbatch with `sbatch --export=DATA_PATH,EXP_BASE_DIR,VENV`"""
    run = slurm.run()
    job = slurm.submit(
        run, *TWO, "--export=DATA_PATH,EXP_BASE_DIR,VENV", MULTI, *TINY, "--train_iters=3"
    )
    assert slurm.ends(job) == "COMPLETED", slurm.log(job)
    record_property("seen", "COMPLETED")


def planned_job(slurm: Slurm, run: Run, *flags: str) -> str:
    """Let the planner write a job; return its name."""
    name = f"{run.folder}.sbatch"
    (slurm.checkout / ".venv").unlink(missing_ok=True)
    (slurm.checkout / ".venv").symlink_to(slurm.venv)
    tiny = [word for word in TINY if word not in ("--device=cpu", "--batch_size=4")]
    paths = [
        f"--data_path={slurm.folder / 'data' / 'corpus'}",
        f"--experiment_dir={run.folder}",
        "--batch_size=16",
    ]
    words = [*tiny, *paths, "--dry_run=1", "--gpu=h100", f"--write_sbatch={name}", *flags]
    command = f'. {slurm.venv}/bin/activate; exec python pretrain_gpt.py "$@"'
    slurm.as_nobody("bash", "-c", command, "-", *words)
    text, changed = re.subn(r"--cpus-per-task=[0-9]+", "--cpus-per-task=2", Path(name).read_text())
    assert changed == 2
    Path(name).write_text(text)
    return name


def test_planned_job(slurm: Slurm, record_property: Seen) -> None:
    """4 and 5: the planner's job for two GPUs with `sbatch --export=NONE`, and cores as the nodes have"""
    run = slurm.run()
    name = planned_job(slurm, run, "--train_iters=3", "--world_size=2")
    job = slurm.submit(run, "--export=NONE", "--time=10", name)
    given = slurm.job(job)["TRES"]
    assert slurm.ends(job) == "COMPLETED", slurm.log(job)
    record_property("seen", f"COMPLETED, {given}")
    assert "cpu=2,mem=200000M,node=1" in given


def test_planned_job_preempted(slurm: Slurm, record_property: Seen) -> None:
    """the planner's job on two nodes is preempted; the save ends within KillWait after GraceTime"""
    run = slurm.run()
    name = planned_job(slurm, run, "--train_iters=100000", "--world_size=16")
    options = ("--partition=grace", "--time=10")
    job = slurm.submit(run, *options, name, SLOW_FSYNC_S="5")
    run.trains()
    slurm.preempt()
    until(lambda: run.exit().get("exit_code"), lambda: slurm.log(job))
    assert run.exit()["exit_code"] == 75 and run.checkpoints(), slurm.log(job)
    seconds = slurm.save_s(job)
    assert seconds > GRACE_S
    state = slurm.wait(job, "FAILED", "PENDING")
    record_property("seen", f"saved {run.checkpoints()[-1]} in {seconds} s, 75, job {state}")


def test_array(slurm: Slurm, record_property: Seen) -> None:
    """`--array=1-2` with `EXP_BASE_DIR=.../%a`: a folder and a seed for each task"""
    run = slurm.run()
    folders = Run(run.folder.with_name(run.folder.name + "-%a"))
    options = ("--array=1-2", "--nodes=1", "--cpus-per-task=1", "--time=10")
    job = slurm.submit(
        folders,
        *options,
        PREEMPTIBLE,
        *TINY,
        "--train_iters=3",
        "--seed=%a",
        EXP_BASE_DIR=str(folders.folder),
    )
    until(lambda: not slurm.call("squeue", "-h", "-j", str(job)))
    tasks = [Run(run.folder.with_name(f"{run.folder.name}-{task}")) for task in (1, 2)]
    assert [task.checkpoints() for task in tasks] == [[3], [3]]
    assert tasks[0].losses() != tasks[1].losses()
    record_property("seen", "two runs, complete, with other losses")


def test_one_task_of_an_array(slurm: Slurm, record_property: Seen) -> None:
    """`scancel --signal=TERM` to the task of an array of slurm_preemptible.sbatch that has the id
    of the whole array"""
    run = slurm.run()
    folders = Run(run.folder.with_name(f"{run.folder.name}-%a"))
    options = ("--array=1-2", "--nodes=1", "--cpus-per-task=1", "--time=10")
    job = slurm.submit(folders, *options, PREEMPTIBLE, *LONG)
    tasks = [Run(run.folder.with_name(f"{run.folder.name}-{task}")) for task in (1, 2)]
    for task in tasks:
        task.trains()
    numbers = [
        int(number) for number in slurm.call("squeue", "-h", "-j", str(job), "-o", "%A").split()
    ]
    (other,) = set(numbers) - {job}
    slurm.as_nobody("scancel", "--signal=TERM", f"{job}_2")
    until(lambda: tasks[1].exit().get("exit_code"))
    saved = tasks[1].exit()["exit_code"], tasks[1].checkpoints()[-1]
    tasks[1].trains(saved[1])
    assert saved[0] == 75 and slurm.job(other)["Restarts"] == "0" and not tasks[0].checkpoints()
    record_property("seen", f"saved {saved[1]}, requeued, resumed; the other task went on")


def test_slurmd_dies(slurm: Slurm, record_property: Seen) -> None:
    """SIGKILL of slurmd on one node, whose steps go on; the node is DOWN after SlurmdTimeout"""
    run = slurm.run()
    job = slurm.submit(
        run, *TWO, "--nodelist=mlc01,mlc02", PREEMPTIBLE, *LONG, "--checkpoint_interval=20"
    )
    until(lambda: run.checkpoints())
    slurm.nodes["mlc02"].kill_slurmd()
    begin = run.iteration()
    until(lambda: slurm.job(job)["Restarts"] != "0", lambda: f"{slurm.job(job)}\n{slurm.log(job)}")
    went_on = run.iteration() - begin
    seconds = until(lambda: not slurm.nodes["mlc02"].processes("pretrain_gpt"))
    slurm.nodes["mlc02"].start_slurmd()
    slurm.wait(job, "RUNNING")
    newest = run.checkpoints()[-1]
    run.trains(newest)
    assert f"resumed from {run.folder}/checkpoints" in slurm.log(job)
    record_property(
        "seen",
        f"{went_on} more iterations, requeued, old ranks gone after {seconds:.0f} s, resumed",
    )
