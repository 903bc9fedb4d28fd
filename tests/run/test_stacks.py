"""SIGUSR2 writes the stacks of every thread and the newest collectives to a file; the program goes
on."""

import ctypes
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from megatron_lite.distributed.traffic import Progress
from megatron_lite.run.ending import Stacks
from megatron_lite.run.stop_signal import StopSignal
from tests.support.harness import FORKSERVER


def stuck_in_a_library(line: Connection) -> None:
    """Keep Python's lock until a byte comes."""
    ctypes.PyDLL(None).read(line.fileno(), ctypes.create_string_buffer(1), 1)


def program(folder: Path, ready: Connection, line: Connection) -> None:
    """Rank 3 in its step."""
    os.dup2(os.open(folder.with_name("stderr"), os.O_WRONLY | os.O_CREAT), 2)
    progress = Progress()
    stacks = Stacks(3, progress)
    StopSignal(on_request=stacks.complete)
    stacks.open(folder)
    progress.at("the step", 41)
    progress.started("reduce", 1024)
    ready.send("ready")
    stuck_in_a_library(line)
    time.sleep(0.3)
    stacks.close()


@pytest.mark.parametrize("asked", [True, False])
def test_stacks_while_a_library_keeps_pythons_lock(asked: bool, tmp_path: Path) -> None:
    """The signal handler writes the stacks itself, long before any thread can run Python. A run
    that nobody asked leaves no file."""
    file = tmp_path / "artifacts" / "stacks_rank_003.txt"
    (ready, is_ready), (line, sender) = FORKSERVER.Pipe(duplex=False), FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=program, args=(file.parent, is_ready, line))
    process.start()
    assert ready.poll(20) and process.pid is not None
    if asked:
        time.sleep(0.2)
        os.kill(process.pid, signal.SIGUSR2)
        time.sleep(0.2)
        early = file.read_text()
        assert "in stuck_in_a_library" in early and "newest collectives" not in early
    os.write(sender.fileno(), b"a")
    process.join(20)
    assert process.exitcode == 0, "it goes on"
    if not asked:
        assert (
            list(tmp_path.iterdir()) == [tmp_path / "stderr"]
            and not (tmp_path / "stderr").read_text()
        )
        return
    text = file.read_text()
    assert "\n  1 " in text and " reduce, 1,024 bytes, the step, iteration 41" in text
    assert f"rank 3, process {process.pid}, " in text
