"""A rank ends soon after torchrun, whatever it does; a rank of another launcher does not. Launchers
are stand-ins."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lite.distributed import processes
from megatron_lite.run import launcher_watch
from tests.support.launch import ROOT

# "stuck" holds Python's lock in a C function, as a library may that waits for a file system.
RANK = """
import ctypes, os, signal, sys, time
time.sleep(float(sys.argv[2]))
from megatron_lite.run import launcher_watch
from tests.support.launch import ROOT
if sys.argv[1] == "stuck":
    launcher_watch.DEATH_SIGNAL = signal.SIGHUP  # 1: four seconds earlier
watch = launcher_watch.LauncherWatch()
print(os.getpid(), flush=True)
if sys.argv[1] == "stuck":
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
while True:
    if sys.argv[1] == "waits":
        time.sleep(60)
"""
# torchrun is known by its command line, and starts each rank in a session of its own.
TORCHRUN = """
import subprocess, sys, time
subprocess.Popen(sys.argv[2:], start_new_session=sys.argv[1] == "torchrun")
print("started", flush=True)
time.sleep(60)
"""
MARKS = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "MASTER_PORT": "1"}


class Launched:
    """A launcher with one rank."""

    def __init__(
        self,
        does: str,
        name: str = "torchrun",
        delay_s: float = 0.0,
        marks: dict[str, str] = MARKS,
        script: bool = False,
        program: list[str] | None = None,
    ) -> None:
        """program: in place of the stand-in for a rank, a program of this repository with its
        arguments."""
        rank = [sys.executable, *(program or ["-c", RANK, does, str(delay_s)])]
        command = ["bash", "-c", '"$@"; true', "script", *rank] if script else rank
        self._early = delay_s > 0 or program is not None
        # env: the launcher itself has no marks.
        environment = ["env", *(f"{key}={value}" for key, value in marks.items())]
        self.launcher = subprocess.Popen(
            [sys.executable, "-c", TORCHRUN, name, *environment, *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.rank = 0

    def kill_launcher(self) -> None:
        assert self.launcher.stdout is not None
        words = [self.launcher.stdout.readline().strip() for _ in range(1 if self._early else 2)]
        self.rank = next((int(word) for word in words if word != b"started"), 0)
        self.launcher.kill()
        self.launcher.wait()
        self.killed_s = time.monotonic()

    def rank_ends(self, within_s: float) -> bool:
        """Whether nobody holds the rank's standard error any more."""
        assert self.launcher.stderr is not None
        os.set_blocking(self.launcher.stderr.fileno(), False)
        self.said = getattr(self, "said", b"")
        while time.monotonic() < self.killed_s + within_s:
            chunk = self.launcher.stderr.read(10000)
            if chunk == b"":
                return True
            self.said += chunk or b""
            time.sleep(0.02)
        return False

    def clean_up(self) -> None:
        for pid in (self.launcher.pid, self.rank):
            if pid:
                subprocess.run(["kill", "-9", str(pid)], stderr=subprocess.DEVNULL)
        self.launcher.wait()


@pytest.fixture
def launched() -> Iterator[list[Launched]]:
    every: list[Launched] = []
    yield every
    for one in every:
        one.clean_up()


def test_a_rank_ends_soon_after_torchrun(launched: list[Launched]) -> None:
    """In a system call, in Python, behind a script, and when torchrun was dead before the rank
    looked: at once, with a line that names torchrun. In a C function that keeps Python's lock: the
    kernel ends the rank after as many seconds as the number of a signal, five."""
    assert launcher_watch.DEATH_SIGNAL == 5
    launched += [
        Launched("waits"),
        Launched("works"),
        Launched("waits", script=True),
        Launched("waits", delay_s=0.7),
    ]
    launched.append(Launched("stuck"))
    for one in launched:
        one.kill_launcher()
    for one in launched[:4]:
        assert one.rank_ends(within_s=4.0), one.said
        assert (
            one.said.startswith(b"ERROR: torchrun")
            and b"is gone" in one.said
            and one.said.count(b"\n") == 1
        )
    assert not launched[4].rank_ends(within_s=0.9), "the thread does not get Python's lock"
    assert launched[4].rank_ends(within_s=4.0) and launched[4].said == b""


def test_every_program_for_several_ranks_watches_torchrun(launched: list[Launched]) -> None:
    """Those that read a model or repeat a step, too: they say why they end, before they look at
    their arguments."""
    programs = [
        ["generate.py", "--model=none", "--prompt=x"],
        ["evaluate.py", "--model=none", "--text=x"],
    ]
    for name, *arguments in [*programs, ["replay_step.py", "none"]]:
        launched.append(Launched("", program=[f"scripts/{name}", *arguments]))
    for one in launched:
        one.kill_launcher()
    for one in launched:
        assert one.rank_ends(within_s=4.0), one.said
        assert one.said.startswith(b"ERROR: torchrun") and one.said.count(b"\n") == 1, one.said


@pytest.mark.skipif(
    not Path("/proc").is_dir(), reason="other systems do not show who started a process"
)
def test_a_rank_that_torchrun_did_not_start_outlives_its_parent(launched: list[Launched]) -> None:
    """Started by srun or by hand, without torchrun's variables; or with old ones, in the session of
    a shell."""
    launched += [
        Launched("waits", name="srun", marks={"RANK": "0"}),
        Launched("waits", name="shell"),
    ]
    for one in launched:
        one.kill_launcher()
    for one in launched:
        assert not one.rank_ends(within_s=1.0), one.said
        os.kill(one.rank, signal.SIGKILL)
        assert one.rank_ends(within_s=10)


@pytest.mark.skipif(
    not Path("/proc").is_dir(), reason="other systems do not show who started a process"
)
def test_torchrun_that_ends_while_a_rank_looks_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends gives back its memory first: for a moment it is the parent, and nothing
    says what it was."""
    (tmp_path / "100").mkdir()
    (tmp_path / "100" / "stat").write_text("100 (python3.11) R 1 100 100 0 -1 4194308 0 0")
    (tmp_path / "100" / "environ").touch()
    parents = iter([100, 100, 1, 1, 1, 1])
    monkeypatch.setattr(processes, "PROC", tmp_path)
    monkeypatch.setattr(launcher_watch.os, "getppid", lambda: next(parents))
    # torchrun gives each rank a session of its own
    monkeypatch.setattr(launcher_watch.os, "getsid", lambda pid: pid)
    assert launcher_watch.launcher_of(MARKS) == launcher_watch.GONE
