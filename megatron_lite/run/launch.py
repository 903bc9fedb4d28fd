"""Validate the launcher's environment: rank, number of processes, threads, end of the job."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_lite.config.values import shown
from megatron_lite.distributed.processes import proc_file
from megatron_lite.errors import LauncherError

_WHOLE_NUMBER = re.compile(r"[0-9]{1,9}")
# Limit on the threads of one process, unless the machine has more cores: with 4,096, GNU's OpenMP
# crashed silently.
MOST_THREADS = 1024
_SLURM_TASK = (
    "PROCID STEP_NUM_TASKS LOCALID NODEID STEP_TASKS_PER_NODE STEP_NODELIST JOB_ID STEP_ID".split()
)
SQUEUE_S = 10.0  # limit on asking for the end of a job
_SLURM_PORTS = range(61440, 65536)  # above the ports that Linux gives to connections


def launch_rank() -> int:
    """Return the rank that torchrun gave this process; 0 without torchrun.

    Never raises, because the rank decides which process prints an error.
    """
    text = os.environ.get("RANK", "")
    return int(text) if _WHOLE_NUMBER.fullmatch(text) else 0


def is_first_on_machine() -> bool:
    """Return whether this is its machine's first rank, which prints command-line errors: machines
    may differ."""
    return (os.environ.get("LOCAL_RANK") or str(launch_rank())) == "0"


def slurm_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return torchrun's variables for a task of an `srun` that starts the ranks itself; empty for
    any other process.

    A batch script and a shell inside a job see some of Slurm's variables too, but no step's, or
    those of a one-task step. A terminal belongs to a shell of `srun --pty`, whose other tasks may
    have ended.
    """
    step = {name: environment.get(f"SLURM_{name}", "") for name in _SLURM_TASK}
    if (
        environment.keys() & {"RANK", "WORLD_SIZE"}
        or step["STEP_NUM_TASKS"] in ("", "1")
        or os.isatty(0)
    ):
        return {}
    if missing := [f"SLURM_{name}" for name, value in step.items() if not value]:
        raise LauncherError(
            f"SLURM_STEP_NUM_TASKS={step['STEP_NUM_TASKS']}, but {' and '.join(missing)} not set in the environment: "
            "start one torchrun on each node with srun (docs/slurm.md), or set WORLD_SIZE=1 for tasks that train alone"
        )
    if environment.get("SLURM_DISTRIBUTION") == "arbitrary" and "MASTER_ADDR" not in environment:
        raise LauncherError(
            "SLURM_DISTRIBUTION=arbitrary (a host file): Slurm does not name the node of rank 0; set MASTER_ADDR to "
            "it, the first line of the file"
        )
    # 4(x2),3: 4, 4 and 3
    groups = re.findall(r"([0-9]+)(?:\(x([0-9]+)\))?", step["STEP_TASKS_PER_NODE"])
    tasks = [count for count, times in groups for _ in range(int(times or 1))][int(step["NODEID"])]
    # node[03-05,9],other: node03,other
    listed = re.sub(r"\[([0-9]+)[^]]*\]", r"\1", step["STEP_NODELIST"])
    host = "127.0.0.1" if tasks == step["STEP_NUM_TASKS"] else listed.partition(",")[0]
    port = str(
        _SLURM_PORTS.start + (int(step["JOB_ID"]) + int(step["STEP_ID"])) % len(_SLURM_PORTS)
    )
    return {
        "RANK": step["PROCID"],
        "WORLD_SIZE": step["STEP_NUM_TASKS"],
        "LOCAL_RANK": step["LOCALID"],
        "LOCAL_WORLD_SIZE": tasks,
        "MASTER_ADDR": environment.get("MASTER_ADDR", host),
        "MASTER_PORT": environment.get("MASTER_PORT", port),
    }


def launch_world_size() -> int:
    """Return the number of processes that torchrun started; 1 without torchrun.

    Raises:
        LauncherError: if the launcher's variables contradict each other or lack the address of the
        peers.
    """
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"):
        text = os.environ.get(name) or "0"
        if not _WHOLE_NUMBER.fullmatch(text):
            raise LauncherError(
                f"the environment variable {name}={shown(text)} is not a whole number; unset it, or use torchrun"
            )
    world_size = int(os.environ.get("WORLD_SIZE") or "1")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if world_size > 1 and missing:
        raise LauncherError(
            f"WORLD_SIZE={world_size}, but {' and '.join(missing)} not set in the environment: the ranks cannot find "
            "each other; start with torchrun, or unset WORLD_SIZE and RANK"
        )
    if launch_rank() >= world_size:
        raise LauncherError(
            f"the environment variables RANK={launch_rank()} and WORLD_SIZE={world_size} contradict each other; "
            "unset both, or use torchrun"
        )
    return world_size


def job_end_s() -> float | None:
    """Return this Slurm job's end in seconds since 1970; None if unknown or outside Slurm.

    Before 23.02 Slurm sets no variable; then squeue is asked.
    """
    text = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(text) if re.fullmatch(r"[0-9]{9,11}", text) else asked_job_end_s()


def asked_job_end_s() -> float | None:
    """Return this Slurm job's end according to squeue; None outside Slurm, or if it names no
    end."""
    job, array = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_ARRAY_JOB_ID")
    if array:  # whose own number is also one of its tasks'
        job = f"{array}_{os.environ.get('SLURM_ARRAY_TASK_ID')}"
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        if job:
            command = ["squeue", "--noheader", f"--jobs={job}", "--format=%e"]
            answer = subprocess.run(
                command, capture_output=True, text=True, timeout=SQUEUE_S, check=True
            ).stdout
            return datetime.datetime.fromisoformat(answer.strip()).timestamp()
    return None


def in_slurm_step() -> bool:
    """Return whether Slurm started this process, or its torchrun, as a task: Slurm then ends it,
    too."""
    return "SLURM_STEP_ID" in os.environ


def tell_torchrun(message: str) -> bool:
    """Make torchrun's final report show why this rank failed; return False without torchrun.

    Source: the error file of torch.distributed.elastic.multiprocessing.errors.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        reply = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps(reply), encoding="utf-8")
    return bool(path)


def requested_threads() -> int | None:
    """Return the user's OMP_NUM_THREADS (the first number of a list); None if unset or not a
    number.

    torchrun sets 1 for several processes if the user sets nothing; only torchrun's own environment
    distinguishes the two.

    Raises:
        LauncherError: if the number is too large.
    """
    text = os.environ.get("OMP_NUM_THREADS", "")
    number = _first_number(text)
    if number is None:
        return None
    cores = os.cpu_count() or 1
    if number > max(MOST_THREADS, cores):
        raise LauncherError(
            f"the environment variable OMP_NUM_THREADS={shown(text)} is too large for {cores} cores; write the "
            "number of threads of each rank, or unset it"
        )
    if (
        text == "1"
        and "TORCHELASTIC_RUN_ID" in os.environ
        and (os.environ.get("LOCAL_WORLD_SIZE") or "1") != "1"
    ):
        # empty if not on Linux: believe the variable
        environment = proc_file(os.getppid(), "environ")
        given = any(line.startswith(b"OMP_NUM_THREADS=") for line in environment.split(b"\0"))
        return 1 if given or not environment else None
    return number


def thread_limit() -> int | None:
    """Return the user's OMP_THREAD_LIMIT; oneDNN results are wrong if OpenMP gives fewer threads
    than requested."""
    return _first_number(os.environ.get("OMP_THREAD_LIMIT", ""))


def _first_number(text: str) -> int | None:
    """Return the first number of an OpenMP list, such as " 4 " or "4,2"; None unless it is
    positive."""
    found = re.fullmatch(r"\+?([0-9]{1,300})", text.partition(",")[0].strip())
    return (int(found[1]) or None) if found else None


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment plus `variables`, for a child process."""
    return {**os.environ, **variables}
