"""A save that fails is tried again, for as long as it makes sense."""

import errno
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lite.checkpoint import manifest, writing
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import FolderLostError, StorageError
from megatron_lite.outputs import saving
from tests.support.fakes import one_rank
from tests.support.harness import run_distributed, tiny_config, train_whole
from tests.support.launch import TINY, Fault, read_exit, run


def tried(
    monkeypatch: pytest.MonkeyPatch,
    failures: int,
    retries: int,
    received: int = 0,
    kind: type = StorageError,
    check: Callable[[], None] = lambda: None,
) -> tuple[int, list[float], bool]:
    """Call `with_retries` on an action that fails some times; return attempts, pauses, and whether
    it failed.

    check: that of the directory.
    """
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    config = SimpleNamespace(checkpoint=SimpleNamespace(save_retries=retries))
    fake: Any = SimpleNamespace(
        config=config,
        logger=logging.getLogger("test"),
        distributed=one_rank(),
        stop=SimpleNamespace(received=received),
        experiment=SimpleNamespace(check=check),
    )
    attempts = 0

    def attempt() -> str:
        nonlocal attempts
        attempts += 1
        if attempts <= failures:
            raise kind("full")
        return "saved"

    try:
        assert saving.with_retries(fake, attempt) == "saved"
        return attempts, pauses, False
    except StorageError:
        return attempts, pauses, True


def test_pauses_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """1, 4, 16, 60 s, then the error; without a failure there is no pause."""
    attempts, pauses, failed = tried(monkeypatch, failures=9, retries=4)
    assert (attempts, failed) == (5, True) and sum(pauses) == pytest.approx(1 + 4 + 16 + 60)
    attempts, pauses, failed = tried(monkeypatch, failures=2, retries=4)
    assert (attempts, failed) == (3, False) and sum(pauses) == pytest.approx(1 + 4)
    assert tried(monkeypatch, failures=0, retries=4) == (1, [], False)
    assert tried(monkeypatch, failures=1, retries=0) == (1, [], True)


def test_a_stop_signal_ends_the_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more attempt, at once, then the error."""
    assert tried(monkeypatch, failures=9, retries=4, received=15) == (2, [], True)
    assert tried(monkeypatch, failures=1, retries=4, received=15) == (2, [], False)


def test_a_stop_signal_ends_the_wait_for_a_save_in_the_background() -> None:
    """A rank pauses before it writes again, and all wait for it: at a signal to any rank it
    hurries, and no rank waits in one exchange for the whole of the pauses, for which there is a
    time-out."""
    for received, looks in ((0, 3), (15, 1)):
        told: list[bool] = []
        states = iter([False, False, True])
        background: Any = SimpleNamespace(
            is_pending=True,
            advance=lambda states=states: next(states),
            finish=lambda hurry, told=told: told.append(hurry),
        )
        fake: Any = SimpleNamespace(
            background=background, distributed=one_rank(), stop=SimpleNamespace(received=received)
        )
        saving.finish_save(fake)
        assert told == [received > 0] and len(list(states)) == 3 - looks


def test_a_lost_folder_is_no_reason_to_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tried(monkeypatch, failures=9, retries=4, kind=FolderLostError) == (1, [], True)


def test_a_save_that_fails_since_its_folder_is_lost_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder may be removed between the check and the last sync: the error of the sync is not the
    reason. A file system that does not tell whether the folder is lost changes nothing."""

    def lost() -> None:
        raise FolderLostError("moved")

    def silent() -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    def fail(*_: object) -> None:
        raise StorageError("cannot save: No such file or directory")

    assert tried(monkeypatch, failures=9, retries=4, check=lost) == (1, [], True)
    assert tried(monkeypatch, failures=1, retries=4, check=silent)[0] == 2
    background: Any = SimpleNamespace(is_pending=True, advance=lambda: True, finish=fail)
    fake: Any = SimpleNamespace(background=background, distributed=one_rank())
    fake.experiment, fake.stop = SimpleNamespace(check=lost), SimpleNamespace(received=0)
    with pytest.raises(FolderLostError, match="moved"):
        saving.finish_save(fake)


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
