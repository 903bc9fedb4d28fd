"""Which ranks are gone: the states of real processes, and only those of the machine that looks."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from megatron_lite.distributed.processes import Place, gone, neighbors, process_state, stopped


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


def near(pid: int, machine: str = "this") -> list[Place]:
    own = Place(0, "host", "this", os.getpid())
    return neighbors([own, Place(1, "host", machine, pid)], own)


def test_a_killed_process_is_gone_before_and_after_its_parent_waits_for_it(
    child: subprocess.Popen[bytes],
) -> None:
    """Alive, then a zombie (as the ranks of torchrun are for a moment), then no process at all."""
    assert gone(near(child.pid), 0.1) == []
    child.kill()
    (lost,) = gone(near(child.pid), 20)
    assert str(lost) == f"rank 1 (process {child.pid} on host)" and process_state(child.pid) == "Z"
    child.wait()
    assert gone(near(child.pid)) == [lost] and process_state(child.pid) == ""


def test_a_stopped_process_is_not_gone(child: subprocess.Popen[bytes]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    wait_for(lambda: process_state(child.pid) == "T")
    assert stopped(near(child.pid)) == near(child.pid) != [] and gone(near(child.pid)) == []


def test_processes_of_other_machines_are_not_looked_for(child: subprocess.Popen[bytes]) -> None:
    """Their numbers mean other processes here."""
    child.kill()
    child.wait()
    assert near(child.pid, machine="another") == []
