"""The first screen of the README: its command prints what is shown, and goes on after Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import documents, warm_python

pytestmark = pytest.mark.guides

SCREEN = documents.blocks((documents.ROOT / "README.md").read_text("utf-8"), "console")[0]
NUMBER = re.compile(r"\d[\d,.:]*(?:e[+-]\d+)?")


def shape(line: str) -> str:
    """Return a printed line without its numbers, folders and spaces that align."""
    line = re.sub(r"\S*/(?=run/)", "", re.sub(r" \| data wait.*", "", line))
    return re.sub(r"\s+", " ", NUMBER.sub("#", line)).strip()


def test_the_first_screen(tmp_path: Path) -> None:
    """The command is interrupted at its fourth line of training, and repeated to its end."""
    shown = SCREEN.replace("\\\n", "")
    command, *lines = [line for line in shown.splitlines() if line not in ("^C", "...")]
    again = "$ python pretrain_gpt.py ... --experiment_dir=run"
    assert command.startswith("$ python ") and lines.count(again) == 1 and "^C" in SCREEN
    lines.remove(again)
    folder = documents.make_checkout(tmp_path)
    (folder / "docs").symlink_to(documents.ROOT / "docs")
    words = command.removeprefix("$ python ").replace("--train_iters=400", "--train_iters=9")
    typed = ["bash", "-c", f"exec {sys.executable} {words}"]
    with subprocess.Popen(
        typed,
        cwd=folder,
        env=warm_python.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as started:
        assert started.stdout is not None
        printed = []
        for line in started.stdout:
            printed.append(line)
            if sum(line.startswith("iteration") for line in printed) == 4:
                os.kill(started.pid, signal.SIGINT)
                break
        printed += started.stdout
    assert started.returncode == 75, printed
    printed += documents.run(f"python {words}", folder).splitlines()
    shapes = iter(map(shape, printed))
    for line in lines:
        assert any(shape(line) == found for found in shapes), "\n".join([line, *printed])
