"""Tasks of an srun without torchrun are ranks of one run; nothing else inside of a Slurm job is
taken for one."""

import os
from pathlib import Path

import pytest

from megatron_lite.errors import LauncherError
from megatron_lite.run.launch import slurm_variables
from tests.support.launch import TINY, Start, free_port, read_exit

# What srun sets for the sixth of seven tasks, on the third of three nodes (srun(1), output
# environment variables).
TASK = {
    "SLURM_JOB_ID": "81234",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
    "SLURM_STEP_NODELIST": "gpu[03-04,9],big7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
RANK = {
    "RANK": "5",
    "WORLD_SIZE": "7",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
    "MASTER_ADDR": "gpu03",
    "MASTER_PORT": str(61440 + (81234 + 2) % 4096),
}
BATCH_SCRIPT = {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "7",
    "SLURM_JOB_ID": "81234",
}


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda descriptor: False)


def test_a_task_becomes_a_rank() -> None:
    assert slurm_variables(TASK) == RANK
    given = {"MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    assert slurm_variables({**TASK, **given}) == {**RANK, **given}


def test_a_host_file_needs_the_address_of_rank_0() -> None:
    """Slurm sorts the list of nodes, so that its first one need not be that of rank 0."""
    with pytest.raises(
        LauncherError,
        match=r"^SLURM_DISTRIBUTION=arbitrary \(a host file\): .* set MASTER_ADDR to it",
    ):
        slurm_variables({**TASK, "SLURM_DISTRIBUTION": "arbitrary"})
    given = {"SLURM_DISTRIBUTION": "arbitrary", "MASTER_ADDR": "big7"}
    assert slurm_variables({**TASK, **given}) == {**RANK, "MASTER_ADDR": "big7"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a1,b2", "a1"),
        ("n[7,9]", "n7"),
        ("n[08-11]-ib,x", "n08-ib"),
        ("r[0-1]n[2-3]", "r0n2"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert slurm_variables({**TASK, "SLURM_STEP_NODELIST": nodes})["MASTER_ADDR"] == first


def test_ranks_of_one_node_meet_without_the_network() -> None:
    assert (
        slurm_variables({**TASK, "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"})[
            "MASTER_ADDR"
        ]
        == "127.0.0.1"
    )


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH_SCRIPT,
        {**TASK, "SLURM_STEP_NUM_TASKS": "1"},
        {**TASK, **RANK},  # a torchrun in each task
        {**TASK, "WORLD_SIZE": "1"},  # the way to train alone
    ],
)
def test_any_other_process_stays_as_it_is(environment: dict[str, str]) -> None:
    assert slurm_variables(environment) == {}


def test_a_shell_of_srun_is_not_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun --ntasks=7 --pty bash`: the user types in one shell, and the others have ended."""
    monkeypatch.setattr(os, "isatty", lambda descriptor: descriptor == 0)
    assert slurm_variables(TASK) == {}


def test_what_is_missing_is_named() -> None:
    with pytest.raises(
        LauncherError, match=r"SLURM_STEP_NUM_TASKS=7, but SLURM_NODEID not set .* WORLD_SIZE=1"
    ):
        slurm_variables({name: value for name, value in TASK.items() if name != "SLURM_NODEID"})


def test_two_tasks_of_srun_train_together(tmp_path: Path) -> None:
    """Without torchrun, as `srun --ntasks=2 python pretrain_gpt.py ...` starts them: one run of two
    ranks."""
    step = {
        **TASK,
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    }
    step |= {"SLURM_STEP_NODELIST": "here", "MASTER_PORT": str(free_port())}
    flags = [*TINY, f"--experiment_dir={tmp_path / 'run'}"]
    tasks = [{**step, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(2)]
    with Start(flags, variables=tasks[0]) as first, Start(flags, variables=tasks[1]) as second:
        outcomes = [first.wait(), second.wait()]
    assert [outcome.codes for outcome in outcomes] == [[0], [0]], outcomes
    assert "  ranks ........................................... 2\n" in outcomes[0].output
    assert outcomes[1].output == "" and read_exit(tmp_path / "run")["exit_code"] == 0
