"""The progress of a script: one updated line on a terminal, few whole lines elsewhere."""

import itertools
import time

import pytest

from megatron_lite.run.progress_line import ProgressLine


def lines_after(seconds: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What a script prints that reports every second for so long."""
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    line = ProgressLine()
    for _ in range(seconds):
        line.update(lambda elapsed_s: f"after {elapsed_s:.0f} s")
    line.close()
    return capsys.readouterr().err


def test_lines_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every ten seconds at first, then ever rarer: a day of work is a page of lines."""
    assert lines_after(40, monkeypatch, capsys).splitlines() == [f"after {s} s" for s in (10, 20, 30, 40)]
    assert len(lines_after(86_400, monkeypatch, capsys).splitlines()) < 150


def test_one_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The line is updated in place and erased at the end."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    printed = lines_after(3, monkeypatch, capsys)
    assert printed == "\r\x1b[Kafter 1 s\r\x1b[Kafter 2 s\r\x1b[Kafter 3 s\r\x1b[K"
