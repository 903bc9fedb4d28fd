"""Which ranks are gone: the states of real processes, and only those of the machine that looks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from megatron_lite.distributed.processes import Place, gone, process_state, stopped


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def places(pid: int, machine: str = "this") -> list[Place]:
    return [Place(0, "host", "this", os.getpid()), Place(1, "host", machine, pid)]


def test_a_killed_process_is_gone_before_and_after_its_parent_waits_for_it(child: subprocess.Popen[bytes]) -> None:
    """Alive, then a zombie (as the ranks of torchrun are for a moment), then no process at all."""
    assert gone(places(child.pid), 0, 0.1) == []
    child.kill()
    (lost,) = gone(places(child.pid), 0, 20)
    assert str(lost) == f"rank 1 (process {child.pid} on host)" and process_state(child.pid) == "Z"
    child.wait()
    assert gone(places(child.pid), 0, 0) == [lost] and process_state(child.pid) == ""


def test_a_stopped_process_is_not_gone(child: subprocess.Popen[bytes]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    wait_for(lambda: process_state(child.pid) == "T")
    assert stopped(places(child.pid), 0) == places(child.pid)[1:] and gone(places(child.pid), 0, 0) == []


def test_processes_of_other_machines_are_not_looked_for(child: subprocess.Popen[bytes]) -> None:
    """Their numbers mean other processes here."""
    child.kill()
    child.wait()
    assert gone(places(child.pid, machine="another"), 0, 0) == []
