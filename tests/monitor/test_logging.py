"""Console and log files: lines appear at once, never twice, and no dead console or full disk ends a
run.

The progress bar shows on a terminal, keeps log lines whole, and writes nothing anywhere else.
"""

import errno
import logging
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megatron_lite.errors import StorageError
from megatron_lite.monitor import logging as our_logging
from megatron_lite.monitor.logging import ProgressBar, log_both, start_logging, stop_logging

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def handlers_removed():
    yield
    stop_logging()


SETUP = """
import sys
from pathlib import Path
from megatron_lite.monitor.logging import start_logging
logger = start_logging(Path("log.txt"), to_console=True)
"""


def run_python(code, folder, **options):
    """Start a program in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    code = textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment,
        text=True,
        encoding="utf-8",
        **options,
    )


def test_lines_reach_console_and_file_once_even_when_set_up_twice(tmp_path, capsys):
    file = tmp_path / "runs/0/logs/logs_rank_000.txt"
    start_logging(file, to_console=True)
    logger = start_logging(file, to_console=True)
    logger.info("loss %.1f", 2.0)
    logger.warning("careful")
    assert capsys.readouterr().out == "loss 2.0\nWARNING: careful\n"
    # without closing: each line is written at once
    assert file.read_text() == "loss 2.0\nWARNING: careful\n"


def test_console_and_file_may_say_different_things(tmp_path, capsys):
    """`log_both`: a text for each, and an empty one is left out."""
    file = tmp_path / "log.txt"
    logger = start_logging(file, to_console=True)
    log_both(logger, console="short 100%", file="long\nand longer")
    log_both(logger, console="", file="only in the file")
    log_both(logger, console="only on the console", file="")
    logger.info("")
    assert capsys.readouterr().out == "short 100%\nonly on the console\n\n"
    assert file.read_text() == "long\nand longer\nonly in the file\n\n"


def test_a_later_start_appends_to_the_file_and_a_quiet_rank_writes_nothing_else(tmp_path, capsys):
    file = tmp_path / "log.txt"
    for text in ("first", "second"):
        start_logging(file, to_console=False).info(text)
    assert file.read_text() == "first\nsecond\n" and capsys.readouterr().out == ""


def test_tracebacks(tmp_path):
    logger = start_logging(tmp_path / "log.txt", to_console=False)
    try:
        raise KeyError("x")
    except KeyError:
        logger.exception("failed")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert lines[0] == "ERROR: failed" and lines[-1].endswith("KeyError: 'x'")


def test_nothing_goes_to_the_root_logger(capsys):
    """A library that configures the root logger must not print our lines again."""
    root = logging.StreamHandler(sys.stdout)
    logging.getLogger().addHandler(root)
    try:
        start_logging(None, to_console=True).info("once")
    finally:
        logging.getLogger().removeHandler(root)
    assert capsys.readouterr().out == "once\n"


def test_a_log_file_that_cannot_be_opened_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="log.txt"):
        start_logging(tmp_path / "file/log.txt", to_console=False)


def test_a_full_disk_costs_lines_not_the_run_and_is_reported_once(tmp_path, capsys, monkeypatch):
    logger = start_logging(tmp_path / "log.txt", to_console=True)
    logger.info("before")
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(our_logging.os, "write", lambda fd, data: write(fd, data[:3]))
        for index in range(3):
            logger.info("lost %d", index)
    logger.info("after")
    out = capsys.readouterr().out
    assert (
        out.count("WARNING: cannot write") == 1
        and "log.txt" in out
        and os.strerror(errno.ENOSPC) in out
    )
    assert (
        tmp_path / "log.txt"
    ).read_text() == "before\nafter\n"  # no halves of lines, and room is used again


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path):
    """As with `| head -1`: later lines go to the file only, the exit code is the program's, stderr
    stays empty."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    code = 'logger.info("first"); sys.stdin.readline(); [logger.info("line %d", at) for at in range(1000)]'
    process = run_python(SETUP + code, tmp_path, **pipes)
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    _, errors = process.stdin.write("go\n"), process.stdin.close()
    errors = process.stderr.read()
    assert process.wait(30) == 0 and errors == ""
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 1001


def test_no_stdout_at_all(tmp_path):
    """`>&-`: Python has no sys.stdout then."""
    code = f'import sys; sys.stdout = None\n{SETUP}logger.info("kept")'
    process = run_python(code, tmp_path, stderr=subprocess.PIPE)
    assert process.communicate(timeout=30)[1] == "" and process.returncode == 0
    assert (tmp_path / "log.txt").read_text() == "kept\n"


def test_text_that_the_terminal_cannot_spell_is_escaped(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    process = run_python(f'{SETUP}logger.info("\\u00e9")', tmp_path, stdout=subprocess.PIPE)
    assert process.communicate(timeout=30)[0] == "\\xe9\n" and process.returncode == 0
    assert (tmp_path / "log.txt").read_text(encoding="utf-8") == "\u00e9\n"


# -- the progress bar

PROGRAM = f"""{SETUP}
from megatron_lite.monitor.logging import ProgressBar
bar = ProgressBar(20, 5, lambda iteration: f"loss 2.5000, {{20 - iteration}} left")
for iteration in range(6, 21):
    bar.update(iteration)
    if iteration % 5 == 0:
        logger.info("line %d", iteration)
bar.close()
bar.close()
"""


def test_silent_without_a_terminal(tmp_path):
    process = run_python(PROGRAM, tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (
        process.communicate(timeout=60) == ("line 10\nline 15\nline 20\n", "")
        and process.returncode == 0
    )


def test_bar_and_whole_lines_on_a_terminal(tmp_path):
    pty = pytest.importorskip("pty", reason="no pseudo-terminals here")
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = run_python(PROGRAM, tmp_path, stdout=theirs, stderr=theirs)
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
    assert [segment for segment in segments if segment.startswith("line")] == [
        "line 10",
        "line 15",
        "line 20",
    ]


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
