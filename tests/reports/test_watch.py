"""The page that follows a run: read from its folder while files grow, are replaced or torn, and
shown on a terminal."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_lite.commands import watch_run
from megatron_lite.reports.watch_page import page
from megatron_lite.reports.watched_run import LARGEST_READ_BYTES, WatchedRun
from tests.support.launch import TINY, run
from tests.support.light_imports import heavy_imports

ROOT = Path(__file__).resolve().parents[2]
NOW_S = 1_000_000.0


def record(iteration: int, start: int = 0, phase: str = "training", **more: Any) -> str:
    """One line of metrics.jsonl, ten seconds after the line before."""
    values = {"phase": phase, "iteration": iteration, "loss": 10.0 - iteration / 10, "run": start}
    return (
        json.dumps({**values, "time": NOW_S - 600 + 10 * iteration, "train_iters": 60, **more})
        + "\n"
    )


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def folder(
    root: Path, iterations: int = 40, heartbeat_s: float | None = NOW_S - 1, start: int = 0
) -> Path:
    """A run that logs every iteration and has saved two checkpoints."""
    append(
        root / "metrics.jsonl",
        "".join(record(i, remaining_seconds=10.0 * (60 - i)) for i in range(1, iterations)),
    )
    append(root / "metrics.jsonl", record(20, phase="validation", loss=8.5))
    (root / "exit.json").write_text(
        json.dumps({"exit_code": None, "status": "running", "message": "", "run": start})
    )
    for iteration in (10, 30):
        manifest = root / "checkpoints" / str(iteration) / "manifest.json"
        append(manifest, "{}")
        os.utime(manifest, (NOW_S, NOW_S - 60 * (40 - iteration)))
    log = root / "runs" / str(start) / "logs" / "logs_rank_000.txt"
    append(log, "a line\nWARNING: the disk is slow\ntraining @ iteration 1\n")
    if heartbeat_s is not None:
        append(root / "runs" / str(start) / "lock.json", "{}")
        os.utime(root / "runs" / str(start) / "lock.json", (heartbeat_s, heartbeat_s))
    return root


def look(run: WatchedRun, now_s: float = NOW_S, width: int = 120, unicode: bool = True) -> str:
    run.update(now_s)
    lines = page(run, now_s, width, unicode)
    assert max(len(line) for line in lines) <= width
    return "\n".join(lines)


# -- the page
# ----------------------------------------------------------------------------------------------------------


def test_page_of_a_running_run(tmp_path: Path) -> None:
    """State, progress with the time left since the last line, curves, checkpoints with their age,
    warnings."""
    text = look(WatchedRun(folder(tmp_path / "mine")), NOW_S - 200)
    lines = text.splitlines()
    assert lines[0] == "mine | start 1 | running"
    assert lines[1] == "last line 0:00:10 ago"
    assert re.fullmatch(
        r"█{26}░{14}  iteration 39 of 60  65%  0:03:20 left, until \w{3} \d\d:\d\d", lines[2]
    )
    assert re.search(r"^training loss +6\.1000  █[▁-█]+▁  6\.1000 to 9\.9000$", text, re.M)
    assert re.search(r"^validation loss +8\.5000 ", text, re.M) and "gradient norm" not in text
    assert "checkpoints: 30 (0:06:40 ago), 10 (0:26:40 ago)" in lines
    assert lines[-2:] == ["one warning:", "  the disk is slow"]


def test_page_fits_any_terminal(tmp_path: Path) -> None:
    """Narrow, without Unicode, and with control characters in texts that a terminal would obey."""
    root = folder(tmp_path)
    append(
        root / "runs/0/logs/logs_rank_000.txt",
        "2026-01-02 03:04:05,678 WARNING: \033[2J bad ü " + "x" * 300 + "\n",
    )
    text = look(WatchedRun(root), width=44, unicode=False)
    assert text.isascii() and "\033" not in text and "?[2J bad ?" in text
    assert "iteration 39 of 60  65%" in text and re.search(r"#[#*%+=.-]*_", text)


DONE = {"status": "done", "exit_code": 0, "time": NOW_S - 7200, "message": "training complete"}
FAILED = {"status": "failed", "exit_code": 5, "time": NOW_S - 5, "message": "loss nan"}
ENDINGS: tuple[tuple[float | None, Any, str], ...] = (
    (NOW_S - 10, {"status": "running"}, "running"),
    (
        NOW_S - 300,
        {"status": "running"},
        "no heartbeat for 0:05:00: the process or its machine is gone",
    ),
    (None, {"status": "running"}, "killed: it left no ending"),
    (
        NOW_S - 5,
        {"status": "starting", "message": "in the rendezvous"},
        "starting\nin the rendezvous",
    ),
    (
        None,
        {"status": "starting", "message": "in the loading"},
        "killed: it left no ending\nin the loading",
    ),
    (None, None, "not running"),
    (None, DONE, "done 2:00:00 ago, exit code 0\ntraining complete"),
    (NOW_S - 5, FAILED, "failed 0:00:05 ago, exit code 5\nloss nan"),
    (NOW_S - 10, {"status": ["done"], "message": {}}, "running"),
)


def test_how_a_run_is(tmp_path: Path) -> None:
    """Running, silent, killed, done or failed, from exit.json and the heartbeat."""
    for number, (heartbeat_s, ending, words) in enumerate(ENDINGS):
        root = folder(tmp_path / str(number) / "mine", heartbeat_s=heartbeat_s)
        (root / "exit.json").unlink() if ending is None else (root / "exit.json").write_text(
            json.dumps(ending)
        )
        assert look(WatchedRun(root)).startswith(f"mine | start 1 | {words}\n"), ending


def test_late_lines_are_pointed_out(tmp_path: Path) -> None:
    """Ten seconds between the lines: forty without one are worth a remark, eleven are not."""
    run = WatchedRun(folder(tmp_path))
    assert "came every" not in look(run, NOW_S - 199)
    os.utime(tmp_path / "runs/0/lock.json", (NOW_S, NOW_S - 170))
    assert "last line 0:00:40 ago; the lines before came every 0:00:10" in look(run, NOW_S - 170)


def test_a_beat_counts_by_this_clock(tmp_path: Path) -> None:
    """The file server's clock is an hour behind: the run seems dead at the first look, and not at
    the second."""
    run = WatchedRun(folder(tmp_path, heartbeat_s=NOW_S - 3600))
    assert "no heartbeat for 1:00:00" in look(run)
    os.utime(tmp_path / "runs/0/lock.json", (NOW_S, NOW_S - 3599))
    assert "| running" in look(run, NOW_S + 1) and "| running" in look(run, NOW_S + 50)
    assert "no heartbeat for 0:02:00" in look(run, NOW_S + 121)


# -- files that change
# -------------------------------------------------------------------------------------------------


def test_files_grow_and_are_replaced(tmp_path: Path) -> None:
    """A torn line counts once it is complete; a new start brings its own warnings; a replaced file
    is read anew."""
    root = folder(tmp_path)
    metrics, log = root / "metrics.jsonl", root / "runs/0/logs/logs_rank_000.txt"
    watched = WatchedRun(root)
    look(watched)
    line = record(45)
    append(metrics, line[:25])
    append(log, "WARNING: half a")
    text = look(watched)
    assert "iteration 39 of 60" in text and "half" not in text
    append(metrics, line[25:])
    append(log, " line\nERROR: the end\n")
    text = look(watched)
    assert (
        "iteration 45 of 60" in text
        and "the last 3 warnings:\n  the disk is slow\n  half a line\n  the end" in text
    )
    append(root / "runs/1/logs/logs_rank_000.txt", "WARNING: of the second start\n")
    append(metrics, record(31, start=1))
    text = look(watched)
    assert "| start 2 |" in text and text.endswith("one warning:\n  of the second start")
    assert "2 starts; the newest log from iterations 1, 31" in text
    append(metrics, record(31, start=2))
    assert "3 starts; the newest log from iterations 1, 31\n" in look(watched) + "\n", "31 once"
    other = root / "other"
    other.write_text(record(7, loss=3.25))
    os.replace(other, metrics)
    text = look(watched)
    assert "iteration 7 of 60" in text and re.search(r"^training loss +3\.2500  . ", text, re.M)
    metrics.write_text(record(9))  # shorter than what has been read
    assert "iteration 9 of 60" in look(watched)
    assert not [
        link for link in Path("/proc/self/fd").iterdir() if str(root) in os.path.realpath(link)
    ]  # none stays open


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    """The first look at a log of many megabytes."""
    root = folder(tmp_path)
    append(
        root / "runs/0/logs/logs_rank_000.txt", "x" * 2 * LARGEST_READ_BYTES + "\nWARNING: new\n"
    )
    assert look(WatchedRun(root)).endswith("one warning:\n  new")


def test_an_empty_folder_and_one_that_goes(tmp_path: Path) -> None:
    """Before the first record, and after the folder was removed, there is still a page."""
    root = tmp_path / "soon"
    root.mkdir()
    watched = WatchedRun(root)
    assert look(watched) == "soon | not running\nno record yet"
    root.rmdir()
    assert look(watched) == "soon | not running\nno record yet"


@pytest.mark.parametrize(
    "value", ["1e999", "-1e999", "1e300", "null", '"text"', "[]", "{}", "true", "9" * 400, "NaN"]
)
def test_records_may_hold_anything(tmp_path: Path, value: str) -> None:
    """Numbers, words and lists where others are expected cost their own part of the page only."""
    root = folder(tmp_path)
    names = [
        *re.findall(r'"(\w+)":', record(1, remaining_seconds=1)),
        "skipped_iters",
        "mfu",
        "consumed_tokens",
    ]
    fields = [f'"{name}": {value}' for name in names if name not in ("phase", "iteration")]
    append(
        root / "metrics.jsonl",
        '{"phase": "training", "iteration": 41, ' + ", ".join(fields) + "}\n",
    )
    (root / "exit.json").write_text(
        f'{{"status": {value}, "exit_code": {value}, "message": {value}, "time": {value}}}'
    )
    assert "learning rate" not in look(WatchedRun(root)) and "checkpoints: 30" in look(
        WatchedRun(root)
    )


# -- the script
# --------------------------------------------------------------------------------------------------------


def test_once_on_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page of a whole run, without a terminal; a folder that is not there is one line."""
    flags = [
        f"--experiment_dir={tmp_path / 'real'}",
        "--validation_iters=1",
        "--lr_warmup_iters=20",
    ]
    assert run([*TINY, *flags]).codes == [0]
    assert watch_run.main([str(tmp_path / "real"), "--once"]) == 0
    shown = capsys.readouterr().out
    assert watch_run.main([str(tmp_path / "nothing")]) == 2
    refused = capsys.readouterr()
    assert shown.startswith("real | start 1 | done 0:00:0")
    assert "\ntraining complete: 6 iterations\n" in shown and "iteration 6 of 6  100%\n" in shown
    for label in ("training loss", "validation loss", "gradient norm", "learning rate", "tokens/s"):
        assert re.search(rf"^{label} ", shown, re.M), label
    assert "\ncheckpoints: 6 (0:00:0" in shown and "the warmup is cut to" in shown
    assert refused.out == "" and refused.err == (
        f"ERROR: there is no folder {tmp_path / 'nothing'}; give the --experiment_dir of a run\n"
    )


def test_live_on_a_terminal(tmp_path: Path) -> None:
    """On another screen, with new lines as they come; Ctrl-C leaves quietly, and the terminal is as
    before.

    Also where the parent ignores Ctrl-C, as the shell of a script does for what it starts in the
    background.
    """
    root = folder(tmp_path / "mine")
    terminal, other_end = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 5, 100, 0, 0))
    before = termios.tcgetattr(other_end)
    command = [
        sys.executable,
        str(ROOT / "scripts" / "watch_run.py"),
        str(root),
        "--interval_s=0.1",
    ]
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(
            command, stdout=other_end, stderr=other_end, env={**os.environ, "PYTHONUTF8": "1"}
        )
    finally:
        signal.signal(signal.SIGINT, ignored)
    try:
        shown = read_until(terminal, "iteration 39 of 60")
        append(root / "metrics.jsonl", record(50))
        shown += read_until(terminal, "iteration 50 of 60")
        process.send_signal(signal.SIGINT)
        shown += read_until(terminal, "\033[?1049l")
        assert process.wait(10) == 0 and termios.tcgetattr(other_end) == before
    finally:
        process.kill()
        process.wait()
        os.close(other_end)
        os.close(terminal)
    assert shown.startswith("\033[?1049h\033[?25l\033[H") and shown.endswith("\033[?25h\033[?1049l")
    pages = shown.split("\033[H")[1:]
    # five lines of a terminal
    assert all(one.count("\r\n") < 5 and "Traceback" not in one for one in pages)


def read_until(terminal: int, text: str, limit_s: float = 20.0) -> str:
    """What the terminal has shown once `text` is there. A read may end inside of a character."""
    shown, end_s = b"", time.monotonic() + limit_s
    while text.encode() not in shown:
        assert select.select([terminal], [], [], max(end_s - time.monotonic(), 0.0))[0], shown
        shown += os.read(terminal, 65536)
    return shown.decode("utf-8", "replace")


def test_watching_needs_no_torch() -> None:
    """The page is there in a fraction of a second, also on a login node."""
    assert "torch" not in heavy_imports("import megatron_lite.reports.watch_page")
