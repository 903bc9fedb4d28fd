"""The export callback never stops or delays a run, leaves no process behind, and shows no
secret."""

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_lite.distributed.processes import process_state
from megatron_lite.errors import UsageError
from megatron_lite.monitor import export_callback
from megatron_lite.monitor.export_callback import ExportCallback, open_callback

SECRET = "s3cr3t-t0ken"


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Records of the program's logger."""
    logger = logging.getLogger("megatron_lite")
    before = logger.propagate
    logger.propagate = True
    with caplog.at_level(logging.INFO, "megatron_lite"):
        yield caplog
    logger.propagate = before


def script(folder: Path, text: str) -> str:
    """Write an executable shell script."""
    path = folder / "script.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def children() -> set[str]:
    """Return the child processes of this one, including zombies."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def run(path: str, folders: list[Path], limit_s: float = 20.0, **variables: str) -> None:
    before = children()
    callback = open_callback(path, {**os.environ, **variables}, variables)
    for folder in folders:
        callback.start(folder)
    callback.close(limit_s)
    assert children() <= before, "a process is left"


def test_the_script_gets_the_folder_and_the_environment_one_export_at_a_time(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """Argument and variables arrive, in the order of the exports and never two at once; its output
    is in the log."""
    text = f"test ! -e {tmp_path}/busy || exit 9; touch {tmp_path}/busy; sleep 0.1; rm {tmp_path}/busy\n"
    text += f'echo "$1 $GREETING $HOME" >> {tmp_path}/seen; echo "out $1"; echo "err" >&2'
    run(script(tmp_path, text), [tmp_path / "10", tmp_path / "20"], GREETING="hello")
    expected = [f"{tmp_path}/{n} hello {os.environ['HOME']}" for n in (10, 20)]
    assert (tmp_path / "seen").read_text().splitlines() == expected
    for n in (10, 20):
        assert (
            f"export {n}: out {tmp_path}/{n}" in log.messages and f"export {n}: err" in log.messages
        )
    assert not [record for record in log.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "signal 9"),
        (None, "cannot be started: Exec format"),
    ],
)
def test_a_failure_is_a_warning(
    tmp_path: Path, log: pytest.LogCaptureFixture, text: str | None, said: str
) -> None:
    """The warning names exit code, signal or reason; the script runs for the next export all the
    same."""
    path = script(tmp_path, text or "")
    if text is None:
        Path(path).write_bytes(b"\x7fELF no program")
    run(path, [tmp_path / "1", tmp_path / "2"])
    warned = [record.getMessage() for record in log.records if record.levelno == logging.WARNING]
    assert len(warned) == 2 and all(said in line for line in warned)


def test_starting_does_not_wait(tmp_path: Path) -> None:
    """Training goes on while a slow script runs."""
    callback = open_callback(script(tmp_path, "sleep 0.4"), os.environ, ())
    start_s = time.monotonic()
    callback.start(tmp_path)
    assert time.monotonic() - start_s < 0.3
    callback.close(20.0)
    assert time.monotonic() - start_s >= 0.4, "and the end waits for it"


@pytest.mark.parametrize("how", ["limit", "signal"])
def test_a_script_without_end_is_ended(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """After the limit, or on a stop request, the script and its children are ended, and the folders
    are named."""
    monkeypatch.setattr(export_callback, "_KILL_AFTER_S", 0.3)  # it ignores SIGTERM
    path = script(
        tmp_path, f"sleep 1000 & echo $! > {tmp_path}/child; trap '' TERM; wait; sleep 1000"
    )
    callback, before = open_callback(path, os.environ, ()), children()
    for name in ("1", "2"):
        callback.start(tmp_path / name)
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.02)
    start_s = time.monotonic()
    callback.close(0.2 if how == "limit" else 1000.0, lambda: how == "signal")
    assert time.monotonic() - start_s < 3
    (warning,) = (
        record.getMessage() for record in log.records if record.levelno == logging.WARNING
    )
    assert f"{tmp_path}/1, {tmp_path}/2" in warning
    child = int((tmp_path / "child").read_text())
    deadline_s = time.monotonic() + 5
    # Z: waits for whoever adopts orphans here
    while (state := process_state(child)) not in ("", "Z"):
        assert time.monotonic() < deadline_s, f"what the script had started is in state {state}"
        time.sleep(0.02)
    assert children() <= before


def test_something_left_in_the_background_does_not_hold_up_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that ends while its child keeps the output open is done."""
    monkeypatch.setattr(export_callback, "_DRAIN_S", 0.1)
    start_s = time.monotonic()
    run(script(tmp_path, "sleep 5 &"), [tmp_path / "1"])
    assert time.monotonic() - start_s < 4


def test_no_value_of_its_variables_is_logged(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """Whole, in a line, cut off at the end of a long line, or a line of several: only words of up
    to 3 letters stay."""
    text = 'echo key=$KEY; echo "$MANY"; head -c 4090 /dev/zero | tr "\\0" x; echo $KEY; head -c 9000 /dev/zero | '
    text += 'tr "\\0" y; echo; echo short $SHORT; exit 1'
    run(
        script(tmp_path, text),
        [tmp_path / "1"],
        KEY=SECRET,
        MANY=f"line {SECRET}\nof several",
        SHORT="yes",
    )
    assert SECRET not in log.text and SECRET[:6] not in log.text and "of several" not in log.text
    assert "export 1: key=..." in log.messages and "export 1: short yes" in log.messages
    assert max(map(len, log.messages)) < 5000


def test_a_flood_of_lines_is_cut(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is read to its end, so that the script can end; the log stays readable."""
    monkeypatch.setattr(export_callback, "MAX_LINES", 10)
    run(script(tmp_path, "seq 1 100000; printf '\\033[1mbold\\007\\377\\n' >&2"), [tmp_path / "1"])
    assert len(log.messages) < 20 and "export 1: (further lines are not logged)" in log.messages


def test_a_script_that_cannot_be_run_is_refused_before_training(tmp_path: Path) -> None:
    """Missing, a folder, not executable."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("#!/bin/sh")
    facts = {
        "missing": "no such file",
        "folder": "it is not a file",
        "text": r"not executable; run: chmod \+x",
    }
    for name, said in facts.items():
        with pytest.raises(UsageError, match=said):
            open_callback(str(tmp_path / name), {}, ())


def test_without_a_script_nothing_happens(tmp_path: Path) -> None:
    """No thread, no wait."""
    callback = ExportCallback()
    callback.start(tmp_path)
    callback.close(1000.0)
