"""Ranks as forks of the process that imported torch, with or without a launcher between: the
quickest kind of start.

`tests/support/launch.py` starts single ranks for tests. Here the parent of this process adopts the
orphans of a killed launcher, so that every process of a start can be seen and ended. The launcher
stands for torchrun: it keeps the store where the ranks meet, gives them its variables, puts each
into a session of its own, and ends the others after one has failed.
"""

import contextlib
import datetime
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tests.support.launch import TORCHRUN, command_line, free_port, run_forked
from tests.support.os_calls import OsCall, intercept

Hook = Callable[[OsCall], None]


def reap() -> dict[int, int]:
    """Collect dead children; return process -> exit code, negative for a signal."""
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def processes_of_starts() -> list[int]:
    """Return the living processes below this one and the orphans that its parent has adopted,
    zombies aside.

    A process whose parent ends while they are looked for is found on the next look, below its new
    parent.
    """
    return _look() or _look() or _look()


def _look() -> list[int]:
    parents, ended = {}, set()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            state, parent = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[:2]
            # a zombie may have children until its last thread has ended
            parents[int(name)] = int(parent)
            if state in "ZX":
                ended.add(int(name))
    found: set[int] = set()
    new = {os.getppid()}
    while new := {pid for pid, parent in parents.items() if parent in new}:
        found |= new
    return sorted(found - ended - {os.getpid()})


def describe(pid: int) -> str:
    """Return what a process that should be gone is doing: state, ticks of CPU, wait channel, open
    files."""
    said = [f"process {pid}: {command_line(pid)}"]
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        said.append(f"state {words[0]}, parent {words[1]}, CPU ticks {words[11]} + {words[12]}")
        said.append(f"on CPU {words[36]}, {_times_on_cpu(pid)}")
        said.append(f"waits in {Path(f'/proc/{pid}/wchan').read_text()}")
        files = {
            number: os.readlink(f"/proc/{pid}/fd/{number}")
            for number in os.listdir(f"/proc/{pid}/fd")
        }
        said.append(str(files))
    return "; ".join(said)


def _times_on_cpu(pid: int) -> str:
    """Return how long a process has run and waited to run, in ns, and how often it ran."""
    return "ran, waited, times: " + Path(f"/proc/{pid}/schedstat").read_text().strip()


def start_torchrun(command: Sequence[str], folder: Path, world_size: int) -> int:
    """Start the real torchrun; return its process. Nothing is forked, so a start takes seconds."""
    with open(folder / "stdout_0", "wb") as stdout, open(folder / "stderr_0", "wb") as stderr:
        words = [sys.executable, *TORCHRUN, f"--nproc-per-node={world_size}", *command]
        return subprocess.Popen(words, stdout=stdout, stderr=stderr, start_new_session=True).pid


def ranks_of_torchrun(launcher: int) -> list[int]:
    """Return the processes of the ranks that torchrun has started so far, in rank order."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text("ascii").split()
        return sorted(int(pid) for pid in children)  # started in the order of ranks
    return []


def start_rank(
    command: Sequence[str],
    folder: Path,
    rank: int,
    world_size: int,
    variables: Mapping[str, str],
    hook: Hook | None,
    not_inherited: int | None = None,
) -> int:
    """Fork one rank; return its process. `folder` gets its output, and `rank_<r>.meets` and
    `.joined` as it starts.

    not_inherited: a descriptor to close in the rank.
    """
    if pid := os.fork():
        return pid
    if not_inherited is not None:
        os.close(not_inherited)
    place = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
    }
    outputs = [str(folder / f"{stream}_{rank}") for stream in ("stdout", "stderr")]
    _as_process(
        lambda: _run_rank(
            command, {**os.environ, **place, **variables}, outputs, folder, rank, hook
        )
    )


def _run_rank(
    command: Sequence[str],
    environment: dict[str, str],
    outputs: list[str],
    folder: Path,
    rank: int,
    hook: Hook | None,
) -> None:
    import torch.distributed as dist

    join = dist.init_process_group

    def marked(*args: object, **options: object) -> None:
        (folder / f"rank_{rank}.meets").touch()
        join(*args, **options)  # type: ignore[arg-type]
        (folder / f"rank_{rank}.joined").touch()

    dist.init_process_group = marked
    if hook is not None:
        intercept(hook)
    run_forked(list(command), environment, outputs)


def start_by_hand(
    command: Sequence[str], folder: Path, world_size: int, hooks: Mapping[int, Hook]
) -> list[int]:
    """Fork the ranks with nothing above them, as a shell loop or srun would."""
    variables = {"MASTER_PORT": str(free_port())}
    return [
        start_rank(command, folder, rank, world_size, variables, hooks.get(rank))
        for rank in range(world_size)
    ]


def start_launcher(
    command: Sequence[str], folder: Path, world_size: int, hooks: Mapping[int, Hook]
) -> int:
    """Fork a launcher that forks the ranks; return its process. The processes of the ranks are in
    `folder`/ranks."""
    if pid := os.fork():
        return pid
    _as_process(lambda: _launch(command, folder, world_size, hooks))


def ranks_of_launcher(folder: Path) -> list[int]:
    """Return the processes of the ranks that a launcher has started so far, in rank order."""
    with contextlib.suppress(OSError):
        return [int(word) for word in (folder / "ranks").read_text("ascii").split()]
    return []


def _launch(
    command: Sequence[str], folder: Path, world_size: int, hooks: Mapping[int, Hook]
) -> None:
    os.setsid()
    meeting = socket.create_server(("localhost", 0))
    port = meeting.getsockname()[1]
    variables = {
        "MASTER_PORT": str(port),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "stand-in",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    alive = []
    for rank in range(world_size):
        pid = start_rank(
            command, folder, rank, world_size, variables, hooks.get(rank), meeting.fileno()
        )
        alive.append(pid)
        with open(folder / "ranks", "a", encoding="ascii") as file:
            file.write(f"{pid}\n")
    import torch.distributed as dist

    store = dist.TCPStore(
        "localhost",
        port,
        world_size,
        True,
        datetime.timedelta(seconds=60),
        False,
        master_listen_fd=meeting.detach(),
    )
    failed = False
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.02)
        elif pid in alive:
            alive.remove(pid)
            if status and not failed:
                failed = True
                _end(alive)
    del store
    sys.exit(int(failed))


def _end(pids: Sequence[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)


def _as_process(action: Callable[[], None]) -> NoReturn:
    """Run an action as all that this process does, and end with its exit code."""
    code = 1
    try:
        action()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
