"""The bar shows on a terminal, keeps log lines whole, and writes nothing anywhere else."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.monitor.logging import ProgressBar

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import time
from megatron_lite.monitor.logging import ProgressBar, start_logging
logger = start_logging(None, 0, 1, to_console=True, timestamps=False)
bar = ProgressBar(20, 5, lambda iteration: f"loss 2.5000, {20 - iteration} left")
for iteration in range(6, 21):
    bar.update(iteration)
    if iteration % 5 == 0:
        logger.info("line %d", iteration)
bar.close()
bar.close()
"""


def test_silent_without_a_terminal():
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "line 10\nline 15\nline 20\n"


def test_bar_and_whole_lines_on_a_terminal():
    pty = pytest.importorskip("pty", reason="no pseudo-terminals here")
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=theirs, stderr=theirs, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other side is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(ours)
    assert process.wait(60) == 0
    text = output.decode()
    assert "20/20" in text and ", loss 2.5000, 0 left" in text
    segments = [segment.strip() for segment in text.replace("\r", "\n").split("\n")]
    assert [segment for segment in segments if segment.startswith("line")] == ["line 10", "line 15", "line 20"]


def test_a_terminal_that_goes_away_ends_the_bar_not_the_run():
    class Dead:
        n = 0

        def set_postfix_str(self, text, refresh):
            pass

        def update(self, count):
            raise OSError("gone")

    bar = ProgressBar(20, 0, str, shown=False)
    bar._bar = Dead()
    bar.update(1)
    bar.update(2)
    bar.close()


def test_no_stderr_at_all(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    ProgressBar(10, 0, str).update(1)
