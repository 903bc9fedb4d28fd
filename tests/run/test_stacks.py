"""SIGUSR2 writes the stacks of every thread and the newest collectives to a file; the program goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import ctypes, sys, time
from pathlib import Path
from megatron_lite.distributed.traffic import Progress
from megatron_lite.run.ending import Stacks
from megatron_lite.run.stop_signal import StopSignal

def stuck_in_a_library():
    ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(2), 2)  # keeps Python's lock until a line comes

progress = Progress()
stacks = Stacks(3, progress)
stop = StopSignal(on_request=stacks.complete)
stacks.open(Path(sys.argv[1]))
progress.at("the step", 41)
progress.started("reduce", 1024)
print("ready", flush=True)
stuck_in_a_library()
time.sleep(0.3)
stacks.close()
"""


def test_stacks_while_a_library_keeps_pythons_lock(tmp_path: Path) -> None:
    """The signal handler writes the stacks itself, long before any thread can run Python."""
    file = tmp_path / "artifacts" / "stacks_rank_003.txt"
    command = [sys.executable, "-c", PROGRAM, str(file.parent)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None and program.stdout.readline() == "ready\n"
        time.sleep(0.2)
        os.kill(program.pid, signal.SIGUSR2)
        time.sleep(0.2)
        early = file.read_text()
        assert "in stuck_in_a_library" in early and "newest collectives" not in early
        program.communicate("a\n", timeout=20)
        assert program.returncode == 0, "it goes on"
    text = file.read_text()
    assert "\n  1 " in text and " reduce, 1,024 bytes, the step, iteration 41" in text
    assert f"rank 3, process {program.pid}, " in text


def test_a_run_that_nobody_asked_leaves_no_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "artifacts")]
    done = subprocess.run(command, cwd=ROOT, input="a\n", text=True, capture_output=True, timeout=60)
    assert done.stdout == "ready\n" and done.stderr == "" and done.returncode == 0
    assert list(tmp_path.iterdir()) == []
