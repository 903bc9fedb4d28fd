"""A save that fails is tried again, for as long as it makes sense."""

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lite.checkpoint import manifest, writing
from megatron_lite.checkpoint.writing import HostCopy, Save, Saving
from megatron_lite.config import Config
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import FolderLostError, StorageError
from tests.checkpoint.test_writing import SPECS
from tests.support.fakes import Layout, empty_model, one_rank, run_state
from tests.support.harness import run_distributed, tiny_config, train_whole
from tests.support.launch import TINY, Fault, read_exit, run


class Pauses(threading.Event):
    """An event for which nobody waits, but which notes for how long."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.noted.append(timeout)
        return self.is_set()


def tried(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: int,
    retries: int,
    received: int = 0,
    error: Exception = OSError(errno.ENOSPC, "full"),  # noqa: B008
    check: Callable[[], None] = lambda: None,
) -> tuple[int, list[float], bool]:
    """Save with a first step that fails some times; return attempts, pauses, and whether it failed.

    check: that of the directory. received: a signal, at which real pauses end.
    """
    model: Any = empty_model(SPECS, Layout(), 0)
    save = Save(root, 20, model, run_state(), Config(), one_rank(), check)
    prepare, attempts = save.prepare, 0

    def flaky() -> None:
        nonlocal attempts
        attempts += 1
        if attempts <= failures:
            raise error
        prepare()

    monkeypatch.setattr(save, "prepare", flaky)
    saving = Saving(save, retries)
    pauses = Pauses()
    if received:
        monkeypatch.setattr(writing, "pause_s", lambda attempt: 600.0)
    else:
        saving._hurry = pauses
    try:
        saving.finish(stop=SimpleNamespace(received=received))  # type: ignore[arg-type]
    except StorageError as failure:
        assert not list(root.iterdir())
        with pytest.raises(StorageError) as again:  # as the end of a run finishes what it finds
            saving.finish(hurry=True)
        assert again.value is failure
        with pytest.raises(RuntimeError, match="after shutdown"):
            saving._pool.submit(list)
        return attempts, pauses.noted, True
    assert [path.name for path in root.iterdir()] == ["20"]
    return attempts, pauses.noted, False


def test_pauses_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1, 4, 16, 60 s, then the error; without a failure there is no pause."""
    attempts, pauses, failed = tried(tmp_path, monkeypatch, failures=9, retries=4)
    assert (attempts, failed) == (5, True) and pauses == [1, 4, 16, 60]
    assert tried(tmp_path, monkeypatch, failures=1, retries=0) == (1, [], True)
    assert tried(tmp_path, monkeypatch, failures=2, retries=4) == (3, [1, 4], False)
    assert tried(tmp_path, monkeypatch, failures=0, retries=4) == (1, [], False)


def test_a_stop_signal_ends_the_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more attempt, at once, then the error."""
    assert tried(tmp_path, monkeypatch, failures=9, retries=4, received=15) == (2, [], True)
    assert tried(tmp_path, monkeypatch, failures=1, retries=4, received=15) == (2, [], False)


def test_a_lost_folder_is_no_reason_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = FolderLostError("moved")
    assert tried(tmp_path, monkeypatch, failures=9, retries=4, error=lost) == (1, [], True)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_that_fails_since_its_folder_is_lost_says_so(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder may be removed between the check and the last sync: the error of the sync is not the
    reason. A file system that does not tell whether the folder is lost changes nothing."""
    outcomes = [
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        OSError(errno.EIO, "Input/output error"),
        FolderLostError("moved"),
    ]

    def check() -> None:
        raise outcomes.pop(0)

    model: Any = empty_model(SPECS, Layout(), 0)
    ranks: Any = one_rank()
    copy = HostCopy(model, ranks) if asynchronous else None
    monkeypatch.setattr(writing, "pause_s", lambda attempt: 0.0)
    saving = Saving(Save(tmp_path, 20, model, run_state(), Config(), ranks, check), 4, copy)
    with pytest.raises(FolderLostError, match="moved"):
        saving.finish()
    assert not outcomes


@pytest.mark.parametrize("asynchronous", [0, 1])
def test_a_run_survives_storage_that_fails_for_a_moment(asynchronous: int, tmp_path: Path) -> None:
    """EIO on rank 1 at its first write: a warning, and the checkpoints of a run without a fault."""
    experiment, fired = tmp_path / "run", str(tmp_path / "fired")
    flags = [
        *TINY,
        f"--experiment_dir={experiment}",
        "--checkpoint_interval=2",
        f"--async_checkpoint={asynchronous}",
    ]
    faults = {1: Fault(2 if asynchronous else 1, errno.EIO, fired)}  # opens or writes its file
    outcome = run([*flags, "--save_retries=1"], 2, faults=faults)
    assert outcome.codes == [0, 0] and Path(fired).exists(), outcome.output
    log = (experiment / "runs" / "0" / "logs" / "logs_rank_001.txt").read_text()
    assert "Input/output error" in log and "trying again in 1 s (1 of 1" in log
    assert sorted(path.name for path in (experiment / "checkpoints").iterdir()) == ["2", "4", "6"]


def test_a_save_in_the_background_that_fails_ends_the_run(tmp_path: Path) -> None:
    """Exit 8 at the next iteration, and no checkpoint."""
    experiment = tmp_path / "run"
    faults = {1: Fault(2, errno.ENOSPC, str(tmp_path / "fired"))}
    flags = [
        *TINY,
        "--train_iters=1000",
        f"--experiment_dir={experiment}",
        "--checkpoint_interval=2",
    ]
    outcome = run([*flags, "--async_checkpoint=1"], 2, faults=faults)
    assert outcome.codes == [8, 8], outcome.output
    assert "cannot save the checkpoint of iteration 2: rank 1: " in read_exit(experiment)["message"]
    assert list((experiment / "checkpoints").iterdir()) == []


def train_and_copy_slowly(distributed: Distributed, options: dict[str, Any]) -> None:
    """A whole run whose copies for checkpoints take longer than its steps."""
    copy = writing._copy_all

    def slow(*arguments: Any) -> None:
        time.sleep(0.1)
        copy(*arguments)

    writing._copy_all = slow  # type: ignore[assignment]  # in a process of its own
    train_whole(distributed, tiny_config(**options))


def test_an_update_waits_for_the_copy(tmp_path: Path) -> None:
    """Checkpoints of a run whose copies are slow hold the weights of their iteration."""
    contents = []
    for asynchronous in (False, True):
        experiment = tmp_path / str(asynchronous)
        options = {"train_iters": 4, "checkpoint_interval": 2, "experiment_dir": str(experiment)}
        run_distributed(1, train_and_copy_slowly, {**options, "async_checkpoint": asynchronous})
        folder = experiment / "checkpoints" / "2"
        data = (folder / "rank_000.safetensors").read_bytes()
        contents.append(data.replace(manifest.read(folder, 2).save_id.encode(), b""))
    assert contents[0] == contents[1]


def test_a_run_reads_each_of_its_checkpoints_a_few_times(tmp_path: Path) -> None:
    """However many saves follow: a save costs the same with any number of kept checkpoints."""
    ((most, saves),) = run_distributed(1, count_reads, str(tmp_path))
    assert saves == 12 and most <= 2  # which is the best one, and is it good?


def count_reads(distributed: Distributed, folder: str) -> tuple[int, int]:
    """Return how often a run opens the same manifest, and how many it has."""
    opened, original = Counter[str](), os.open

    def counting(path: Any, *args: Any, **options: Any) -> int:
        if os.fspath(path).endswith("manifest.json") and not args[0] & os.O_CREAT:
            opened[os.fspath(path)] += 1
        return original(path, *args, **options)

    os.open = counting
    try:
        options = {
            "checkpoint_interval": 1,
            "max_checkpoints": 100,
            "train_iters": 12,
            "experiment_dir": folder,
        }
        train_whole(distributed, tiny_config(**options))
    finally:
        os.open = original
    return max(opened.values()), len(opened)
