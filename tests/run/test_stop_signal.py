"""Which signals ask a run to stop, and which it leaves alone."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from megatron_lite.outputs.session import close

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import os, signal, sys, time
from megatron_lite.run.stop_signal import StopSignal

number, ignored = int(sys.argv[1]), sys.argv[2] == "nohup"
signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
stop = StopSignal()
stop.saves = True
os.kill(os.getpid(), number)
time.sleep(0.1)
print(stop.received)
stop.ignore()
time.sleep(1.1)
os.kill(os.getpid(), number)  # a second one, much later, would end the process
time.sleep(0.1)
"""


def received(number: int, shell: str = "") -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(number), shell], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done
    return int(done.stdout)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_is_a_request_until_all_is_saved(number: int) -> None:
    """A closed terminal (SIGHUP) asks to save, too. After the last save no signal changes the exit code."""
    assert received(number) == number


def test_a_run_under_nohup_survives_its_terminal() -> None:
    """SIGHUP that was ignored from the start stays ignored."""
    assert received(signal.SIGHUP, "nohup") == 0


def test_signals_are_ignored_as_soon_as_a_peer_may_end() -> None:
    """Leaving the process groups takes time; a second signal within would replace the exit code of a saved run."""
    run = MagicMock()
    close(run, 75, "stopped")
    steps = [call[0] for call in run.mock_calls]
    assert steps.index("distributed.barrier") < steps.index("stop.ignore") < steps.index("distributed.close")
