"""Start pretrain_gpt.py from a test: one process or several ranks, with a time-out, and nothing
left behind.

`forked` ranks come out of a server process that has imported torch already, which saves seconds per
start; `processes` are started as a user does; `torchrun` is the launcher of PyTorch, `warm
torchrun` the same in interpreters of `warm_python`. The ranks of the first two find each other
through RANK, WORLD_SIZE, MASTER_ADDR and a free MASTER_PORT. Every process of a start is in a
session of its own and has `MARKER` in its environment, so that whatever is left of it can be found,
and killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support import harness, warm_python
from tests.support.harness import FORKSERVER
from tests.support.os_calls import OsCall, intercept
from tests.support.threads import THREADS

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "pretrain_gpt.py"
MARKER = "MEGATRON_LITE_TEST_START"
TIMEOUT_S = 120.0
TORCHRUN = ("-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
# Variables of the surrounding session that would change what a start does.
DROPPED = re.compile(
    r"(WANDB|SLURM|TORCH|NCCL|GLOO|OMP|MASTER|LOCAL|GROUP|ROLE)_.*|RANK|WORLD_SIZE|PYTHON(WARNINGS|FAULTHANDLER)"
)

# The tiny configuration as flags, with a schedule for a hundred starts; flags given later win.
STARTED = {
    **harness.TINY,
    "train_iters": 6,
    "lr": 0.01,
    "lr_warmup": 2,
    "max_position_embeddings": 16,
    "save_retries": 0,
}
TINY = tuple(f"--{name}={value}" for name, value in STARTED.items())


@dataclass(frozen=True)
class Outcome:
    """How a start ended: exit code (negative: the signal) and output of each process, in rank
    order."""

    codes: list[int]
    stdouts: list[str]
    stderrs: list[str]
    seconds: float

    @property
    def output(self) -> str:
        """All that a user saw."""
        return "".join(self.stdouts) + "".join(self.stderrs)

    def error_lines(self) -> list[str]:
        """The lines of stderr, of all processes."""
        return [line for text in self.stderrs for line in text.splitlines() if line.strip()]


@dataclass(frozen=True)
class Fault:
    """A fault in place of the `call`-th change (from 1) that a rank makes to its checkpoints and
    exports."""

    call: int  # 0: none of its own
    error: int | None  # an errno, or None: SIGKILL
    fired: str  # a file that is made then, with name and path of the call
    lasts: bool = False  # from then on, whatever needs space fails on every rank with a fault of the same file
    records: bool = False  # nothing fails; every call is written to the file


class Start:
    """One start of the program. A context manager: at its end every process of it is killed and
    gone."""

    def __init__(
        self,
        flags: Sequence[str],
        ranks: int = 1,
        how: str = "forked",
        variables: Mapping[str, str] | None = None,
        mounts_of: int | None = None,
        faults: Mapping[int, Fault] | None = None,
        launcher: Sequence[str] = (),
        flags_of: Mapping[int, Sequence[str]] | None = None,
        per_node: int | None = None,
    ) -> None:
        """`variables` are added to the environment, `launcher` to torchrun's own flags, `flags_of`
        to those of one rank (not with torchrun); `per_node` ranks believe to be alone on a machine
        (default: all). Forked ranks only: `mounts_of`, a process whose file systems they see;
        `faults` by rank."""
        self.marker = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(prefix="megatron_lite_test_")
        self._port: socket.socket | None = None
        self._begun = time.monotonic()
        environment = {
            name: value for name, value in os.environ.items() if not DROPPED.fullmatch(name)
        }
        environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", MARKER: self.marker}
        self._environment = {**environment, "OMP_NUM_THREADS": str(THREADS), **(variables or {})}
        self.processes: list[_Process] = []
        assert how in ("forked", "processes", "torchrun", "warm torchrun"), how
        assert how == "forked" or (mounts_of is None and faults is None), how
        self._python = sys.executable
        self._mounts = None if mounts_of is None else f"/proc/{mounts_of}/ns/mnt"
        self._faults = faults or {}
        command = [str(PROGRAM), *flags]
        if how.endswith("torchrun"):
            if how == "warm torchrun":
                self._environment["PYTHON_EXEC"] = self._python = str(
                    warm_python.folder() / "python"
                )
            self._start(
                [*TORCHRUN, *launcher, f"--nproc-per-node={ranks}", *command], {}, subprocess_start
            )
            return
        self._port = reserved_port()
        port = str(self._port.getsockname()[1])
        for rank in range(ranks):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % (per_node or ranks)),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(per_node or ranks),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": port,
            }
            words = [*command, *(flags_of or {}).get(rank, ())]
            self._start(
                words,
                place if ranks > 1 else {},
                forked_start if how == "forked" else subprocess_start,
            )

    def _start(
        self, command: list[str], place: Mapping[str, str], how_to: Callable[..., _Process]
    ) -> None:
        number = len(self.processes)
        outputs = [
            str(Path(self._folder.name, f"{stream}_{number}")) for stream in ("stdout", "stderr")
        ]
        more = (
            [self._mounts, self._faults.get(number)] if how_to is forked_start else [self._python]
        )
        self.processes.append(how_to(command, {**self._environment, **place}, outputs, *more))

    def signal(self, number: int, rank: int | None = None, workers: bool = True) -> None:
        """Send a signal to one rank or to all, and to their data workers unless told not to."""
        for process in self.processes if rank is None else [self.processes[rank]]:
            if process.wait(0) is not None:
                continue  # its number may belong to another process by now
            # One that was started a moment ago may not lead a group yet.
            for send in (os.killpg, os.kill) if workers else (os.kill,):
                with contextlib.suppress(ProcessLookupError):
                    send(process.pid, number)
                    break

    def wait(self, timeout_s: float = TIMEOUT_S) -> Outcome:
        """Wait for the end of every rank; a start that takes longer is killed and fails the
        test."""
        deadline = time.monotonic() + timeout_s
        codes = [process.wait(max(0.0, deadline - time.monotonic())) for process in self.processes]
        seconds = time.monotonic() - self._begun
        if None in codes:
            self.kill()
            raise AssertionError(f"still running after {timeout_s} s: {codes}\n{self._said()}")
        ended = [code for code in codes if code is not None]
        return Outcome(ended, self._read("stdout"), self._read("stderr"), seconds)

    def running(self) -> bool:
        """Whether any rank is still there."""
        return any(process.wait(0) is None for process in self.processes)

    def wait_until(
        self, condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S
    ) -> bool:
        """Poll until the condition holds (True) or the start has ended by itself (False)."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if not self.running():
                return condition()
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"{what}: not after {timeout_s} s\n{self._said()}")
            time.sleep(0.002)
        return True

    def left_over(self) -> list[int]:
        """Processes of this start that are still there, zombies aside."""
        return [
            pid for pid in find_marked(self.marker, [process.pid for process in self.processes])
        ]

    def assert_nothing_left(self, within_s: float = 5.0) -> None:
        """Fails if a process of this start outlives it."""
        deadline = time.monotonic() + within_s
        while left := self.left_over():
            assert time.monotonic() < deadline, (
                f"left behind: {[(pid, command_line(pid)) for pid in left]}"
            )
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL for everything that belongs to this start."""
        for pid in self.left_over():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.wait(10)

    def _read(self, stream: str) -> list[str]:
        paths = [
            Path(self._folder.name, f"{stream}_{number}") for number in range(len(self.processes))
        ]
        return [
            path.read_text("utf-8", errors="replace") if path.exists() else "" for path in paths
        ]

    def _said(self) -> str:
        return "".join([*self._read("stdout"), *self._read("stderr")])[-5000:]

    def __enter__(self) -> Start:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        if self._port is not None:
            self._port.close()
        self._folder.cleanup()


def run(
    flags: Sequence[str],
    ranks: int = 1,
    how: str = "forked",
    variables: Mapping[str, str] | None = None,
    mounts_of: int | None = None,
    faults: Mapping[int, Fault] | None = None,
    timeout_s: float = TIMEOUT_S,
    flags_of: Mapping[int, Sequence[str]] | None = None,
    per_node: int | None = None,
) -> Outcome:
    """Start, wait for the end, and see that nothing is left behind."""
    with Start(
        flags, ranks, how, variables, mounts_of, faults, flags_of=flags_of, per_node=per_node
    ) as start:
        outcome = start.wait(timeout_s)
        start.assert_nothing_left()
        return outcome


def succeed(flags: Sequence[str], ranks: int = 1, **more: Any) -> Outcome:
    """Run to exit code 0 on every rank; see `run`."""
    outcome = run(flags, ranks, **more)
    assert set(outcome.codes) == {0}, outcome.output
    return outcome


class _Process:
    """A process that leads its own session; `wait` gives None where it goes on."""

    def __init__(self, process: subprocess.Popen[bytes] | BaseProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid = process.pid

    def wait(self, timeout_s: float) -> int | None:
        if isinstance(self._process, subprocess.Popen):
            try:
                return self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None
        self._process.join(timeout_s)
        return self._process.exitcode


def pretrain_after(code: str, flags: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run pretrain_gpt.py as one rank in a process that runs a line of Python first, which changes
    its surroundings."""
    start = f"{code}; import sys, pretrain_gpt; sys.exit(pretrain_gpt.main(sys.argv[1:]))"
    command = [str(warm_python.folder() / "python"), "-c", start, *flags]
    environment = warm_python.environment()
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def subprocess_start(
    command: list[str], environment: dict[str, str], outputs: list[str], python: str
) -> _Process:
    """A new interpreter, or the one of `warm_python`."""
    with open(outputs[0], "wb") as stdout, open(outputs[1], "wb") as stderr:
        process = subprocess.Popen(
            [python, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    return _Process(process)


def forked_start(
    command: list[str],
    environment: dict[str, str],
    outputs: list[str],
    mounts: str | None,
    fault: Fault | None,
) -> _Process:
    """A process that need not import torch."""
    process = FORKSERVER.Process(
        target=_run_forked, args=(command, environment, outputs, mounts, fault)
    )
    process.start()
    return _Process(process)


def _run_forked(
    command: list[str],
    environment: dict[str, str],
    outputs: list[str],
    mounts: str | None,
    fault: Fault | None,
) -> None:
    """Run a rank that may see other file systems, or have a fault."""
    if mounts is not None:
        with open(mounts, "rb") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
        os.chdir("/")
    if fault is not None:
        _inject(fault)
    run_forked(command, environment, outputs)


def run_forked(command: list[str], environment: dict[str, str], outputs: list[str]) -> None:
    """Become what `python <command>` with this environment would be, in a session of its own, then
    run it."""
    os.setsid()
    # The fork server may have been started by a test that held signals back, and hands that on.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    sys.stdin = open(os.devnull, encoding="utf-8")
    os.dup2(sys.stdin.fileno(), 0)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding=environment.get("PYTHONIOENCODING", "utf-8"))  # type: ignore[union-attr]
    for path, descriptor in zip(outputs, (1, 2), strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = list(command)
    runpy.run_path(command[0], run_name="__main__")


def _inject(fault: Fault) -> None:
    """Let one change of a checkpoint or export fail in this process, or every one that needs space
    from then on."""
    calls = 0

    def before(call: OsCall) -> None:
        nonlocal calls
        calls += 1
        if fault.records:
            with open(fault.fired, "a", encoding="utf-8") as file:
                file.write(f"{call.name} {call.path}\n")
            return
        if calls == fault.call:
            Path(fault.fired).write_text(f"{call.name} {call.path}", "utf-8")
            if fault.error is None:
                os.kill(os.getpid(), signal.SIGKILL)
        elif not (fault.lasts and call.needs_space() and os.path.exists(fault.fired)):
            return
        raise OSError(fault.error, os.strerror(fault.error or 0), call.path)

    intercept(before)


def reserved_port() -> socket.socket:
    """A socket whose TCP port nobody gets by chance while it is open: neither another start nor any
    connection.

    Without that, rank 0 would now and then find its port in use, and the others would wait for it.
    A store that also sets SO_REUSEADDR can listen at the port, because this socket does not.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("localhost", 0))
    return holder


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with reserved_port() as holder:
        return int(holder.getsockname()[1])


def ended_process() -> int:
    """The number of a process that has ended a moment ago."""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as process:
        process.wait()
    return process.pid


def find_marked(marker: str, sessions: Sequence[int] = ()) -> list[int]:
    """Living processes with this marker in their environment, or of one of these sessions (a fork
    keeps the environment that its server was started with)."""
    found: list[int] = []
    for path in Path("/proc").iterdir() if os.path.isdir("/proc") else ():
        if not path.name.isdecimal():
            continue
        with contextlib.suppress(OSError):
            state, _, _, session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            if state in "ZX":
                continue
            if (
                int(session) in sessions
                or f"{MARKER}={marker}".encode() in (path / "environ").read_bytes()
            ):
                found.append(int(path.name))
    return found


def listening_at(process: int) -> list[tuple[str, int]]:
    """Return address, as in /proc/net/tcp, and port of the sockets on which a process waits for
    connections."""
    own = set()
    for path in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(os.readlink(path).removeprefix("socket:[").removesuffix("]"))
    tables = (Path(f"/proc/{process}/net/{kind}").read_text() for kind in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table.splitlines()]
    places = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in own]
    return [(address, int(port, 16)) for address, port in places]


def listening(process: int) -> list[str]:
    """Return the addresses of `listening_at`."""
    return [address for address, _ in listening_at(process)]


def is_loopback(address: str) -> bool:
    """Whether an address is 127.0.0.0/8 or ::1, also when it is written for IPv6; words are in the
    order of bytes."""
    return address[-2:] == "7F" or address == "0" * 24 + "01000000"


def command_line(pid: int) -> str:
    """For messages."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return "(gone)"


def read_exit(experiment: Path) -> dict[str, Any]:
    """exit.json."""
    content: dict[str, Any] = json.loads((experiment / "exit.json").read_text("utf-8"))
    return content


def trains(experiment: Path) -> bool:
    """Whether the set-up of the newest start is over."""
    return (experiment / "exit.json").exists() and read_exit(experiment)["status"] == "running"


def python_warnings(output: str) -> list[str]:
    """Return the lines of Python's warnings: `file.py:12: UserWarning: ...`.

    Lines of C++ libraries (`[W1122 10:11:12.345 Context.cpp:67] Warning: ...`) and of our log are
    none of them.
    """
    return re.findall(r"^.+:\d+: [\w.]*Warning: .*$", output, re.M)
