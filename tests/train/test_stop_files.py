"""A run without anybody to signal it is stopped, or saves, by a file; see
tests/train/test_resume.py for signals."""

from pathlib import Path

import pytest

from megatron_lite.run import stop_files
from megatron_lite.run.stop_files import StopFiles
from tests.support.launch import TINY, Start, read_exit, succeed, trains
from tests.support.results import assert_all_good, checkpoints


@pytest.mark.parametrize(
    "saves", ["", pytest.param("--async_checkpoint=1", marks=pytest.mark.slow)]
)
def test_a_run_obeys_a_file_once(saves: str, tmp_path: Path) -> None:
    """All ranks save and go on, then save and stop at one iteration, and the same command trains
    on."""
    run, stop = tmp_path / "run", tmp_path / "elsewhere"
    command = [
        *TINY,
        f"--experiment_dir={run}",
        "--train_iters=1000000",
        f"--stop_file={stop}",
        *saves.split(),
    ]
    run.mkdir()
    (run / "stop").touch()  # is not the one that the flag names
    with Start(command, 2) as start:
        assert start.wait_until(lambda: trains(run), "training")
        (run / "save").touch()
        assert start.wait_until(
            lambda: not (run / "save").exists() and bool(checkpoints(run)), "the save"
        )
        first = checkpoints(run)[-1]
        stop.touch()
        outcome = start.wait()
        start.assert_nothing_left()
    ended, newest = read_exit(run), checkpoints(run)[-1]
    assert outcome.codes == [75, 75] and newest > first, outcome.output
    assert (
        ended["message"]
        == f"stopped by a file (--stop_file): saved at iteration {newest}; the same command resumes"
    )
    assert not stop.exists() and (run / "stop").exists()
    assert_all_good(run)
    resumed = succeed([*command, f"--train_iters={newest + 2}"], 2)
    assert f"at iteration {newest}" in resumed.output and checkpoints(run)[-1] == newest + 2


def test_only_a_file_that_was_found_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look is at most once a second; a folder that has the name of a file asks for nothing."""
    monkeypatch.setattr(stop_files, "LOOK_S", 1e9)
    files = StopFiles(tmp_path / "stop", tmp_path / "save")
    assert not files.found(files.save) and files.limit.left_s() > 0
    files.save.touch()
    files.obeyed(files.save)
    assert files.save.exists() and not files.found(files.save), "after the last look"
    monkeypatch.setattr(stop_files, "LOOK_S", 0.0)
    files.stop.mkdir()
    assert files.found(files.save) and files.limit.left_s() > 0
    files.obeyed(files.save)
    assert not files.save.exists() and not files.found(files.save)
    files.stop.rmdir()
    files.stop.touch()
    assert files.limit.left_s() < 0
