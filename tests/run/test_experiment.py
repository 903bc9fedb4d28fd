"""One start at a time has an experiment directory, on whatever machine, and an owner that lost it
finds out."""

import fcntl
import json
import os
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lite.errors import FolderLostError, StorageError
from megatron_lite.run import experiment
from megatron_lite.run.experiment import LOCK_FILE, Experiment, FolderLock, Holder, is_in_use
from tests.support.harness import tiny_config
from tests.support.launch import ended_process


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty experiment directory, whose owners give signs of life ten times as often as
    usual."""
    monkeypatch.setattr(experiment, "BEAT_S", 0.1)
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def taken(root: Path) -> FolderLock:
    lock = FolderLock(root)
    lock.take()
    return lock


def abandoned(root: Path, age_s: float, **changes: Any) -> Path:
    """The lock of a start on another machine, whose last heartbeat is this old."""
    holder = Holder("far", "another machine", 77, "1", "ann", "2026-01-01 00:00:00 UTC", "ab")
    folder = root / "runs" / "0"
    (folder / "logs").mkdir(parents=True)
    path = folder / LOCK_FILE
    path.write_text(json.dumps(holder._replace(**changes)._asdict()))
    os.utime(path, times=(time.time() - age_s,) * 2)
    return path


def test_a_second_start_is_told_who_has_the_directory(root: Path) -> None:
    """Host, process and user, within two seconds; after the end of the first the next number is
    free at once."""
    first = taken(root)
    begun_s = time.monotonic()
    with pytest.raises(StorageError) as caught:
        taken(root)
    assert time.monotonic() - begun_s < 2
    holder = experiment.read_holder(first._descriptor)
    assert (
        f"another run is using it, process {os.getpid()} of {holder.user} on {holder.host}, since 20"
        in str(caught.value)
    )
    assert not caught.value.recorded, "exit.json belongs to the first"
    assert sorted(path.name for path in (root / "runs").iterdir()) == ["0"], (
        "nothing is left of the second"
    )
    first.check()
    first.release()
    assert not (first.folder / LOCK_FILE).exists()
    assert taken(root).run == 1


def test_rank_0_has_the_directory_before_the_ranks_meet(root: Path) -> None:
    """A refusal waits until all ranks can hear it, and such a start does not own exit.json even
    once it is free."""
    config = tiny_config(1, experiment_dir=str(root))
    alone: Any = SimpleNamespace(
        rank=0, gather_objects=lambda value: [value], broadcast_object=lambda value: value
    )
    first, other_rank, second = (Experiment(config, rank) for rank in (0, 1, 0))
    assert (first.run, other_rank.run, second.run) == (0, -1, -1)
    assert first.checkpoints == other_rank.checkpoints == root / "checkpoints"
    assert [one.is_lost() for one in (first, other_rank, second)] == [False, False, True]
    first.share(alone)
    with pytest.raises(StorageError, match="another run is using it") as caught:
        second.share(alone)
    assert not caught.value.recorded
    first.release()
    assert second.is_lost()


def test_a_dead_process_of_this_machine_holds_nothing(root: Path) -> None:
    """Neither a process number that is free, however fresh the heartbeat, nor one that another
    process has got."""
    here = experiment.machine_name()
    abandoned(root, 0.0, machine=here, pid=ended_process())
    second = taken(root)
    assert second.run == 1 and not (root / "runs" / "0" / LOCK_FILE).exists()
    second.release()
    shutil.rmtree(root / "runs")
    abandoned(root, 0.0, machine=here, pid=os.getpid(), start_ticks="1")
    assert taken(root).run == 1


def test_a_living_process_without_a_flock_keeps_the_directory(root: Path) -> None:
    """A file system may have no flock, and a stopped process (SIGSTOP) no heartbeat: no reasons to
    take over."""
    here, ticks = experiment.machine_name(), experiment.start_ticks(os.getppid())
    abandoned(root, 3600.0, machine=here, pid=os.getppid(), start_ticks=ticks)
    with pytest.raises(StorageError, match="another run is using it"):
        taken(root)
    assert is_in_use(root)


def test_a_heartbeat_from_another_machine_refuses_within_two_seconds(root: Path) -> None:
    """Where flock knows this machine only, the changing time of the file is the proof."""
    path, ended = abandoned(root, 0.0), threading.Event()

    def beat() -> None:
        while not ended.wait(experiment.BEAT_S):
            os.utime(path)

    owner = threading.Thread(target=beat)
    owner.start()
    begun_s = time.monotonic()
    try:
        with pytest.raises(StorageError, match="process 77 of ann on far, since 2026-01-01"):
            taken(root)
    finally:
        ended.set()
        owner.join()
    assert time.monotonic() - begun_s < 2


@pytest.mark.parametrize("damaged", [False, True])
def test_a_silent_owner_on_another_machine_is_waited_for(
    root: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """Taken over once the last heartbeat is old enough, not before; an empty lock (a power cut) is
    judged alike."""
    monkeypatch.setattr(experiment, "DEAD_AFTER_S", 0.4)
    path = abandoned(root, 0.0)
    if damaged:
        path.write_bytes(b"")
    begun_s = time.time()
    assert taken(root).run == 1
    assert 0.3 < time.time() - begun_s < 3


def test_the_clock_is_that_of_the_file_system(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose clock is an hour ahead takes nothing over: it compares times of two files."""
    monkeypatch.setattr(experiment, "DEAD_AFTER_S", 0.5)
    abandoned(root, 0.0)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 3600)
    begun_s = time.monotonic()
    taken(root)
    assert time.monotonic() - begun_s > 0.4


@pytest.mark.parametrize("left", ["nothing", "a dead owner"])
def test_of_many_starters_at_once_one_wins(root: Path, left: str) -> None:
    """Every other one is refused; twenty rounds of six starters."""
    for _ in range(20):
        if left == "a dead owner":
            abandoned(root, 3600.0)
        together = threading.Barrier(6)
        winners = []
        refused = []

        def start(
            together: threading.Barrier = together, winners: list = winners, refused: list = refused
        ) -> None:  # type: ignore[type-arg]
            lock = FolderLock(root)
            together.wait()
            try:
                lock.take()
                winners.append(lock)
            except StorageError as error:
                refused.append(error)

        threads = [threading.Thread(target=start) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(winners) == 1 and len(refused) == 5, (winners, refused)
        winners[0].check()
        winners[0].release()
        shutil.rmtree(root / "runs")


def test_an_owner_that_wakes_up_finds_its_successor(root: Path) -> None:
    """A process that was stopped for over a minute learns of the takeover before it writes; so does
    its watcher."""
    first, told = taken(root), threading.Event()
    first._ended.set()  # as if it were stopped
    record = json.loads((first.folder / LOCK_FILE).read_text())
    (first.folder / LOCK_FILE).write_text(json.dumps({**record, "machine": "another machine"}))
    os.utime(first.folder / LOCK_FILE, times=(0, 0))
    fcntl.flock(first._descriptor, fcntl.LOCK_UN)  # flock is per machine there
    second = taken(root)
    with pytest.raises(
        FolderLostError, match=rf"another run took it over \(process {os.getpid()} of"
    ):
        first.check()
    second.check()
    first._ended, first.on_loss = threading.Event(), lambda error: told.set()
    threading.Thread(target=first._beat, daemon=True).start()
    assert told.wait(5)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_moved_or_removed_directory_is_lost(root: Path, replaced: bool) -> None:
    """On every rank, with or without another run in its place; moved back, it is ours again."""
    owner = taken(root)
    other_rank = FolderLock(root)
    other_rank.see(owner.run, owner.nonce)
    moved = root.with_name("moved")
    root.rename(moved)
    if replaced:
        root.mkdir()
        taken(root)
    for lock in (owner, other_rank):
        with pytest.raises(FolderLostError, match="moved or removed") as caught:
            lock.check()
        assert (
            not caught.value.recorded
            and (f"of process {os.getpid()}" in str(caught.value)) == replaced
        )
    shutil.rmtree(root, ignore_errors=True)
    moved.rename(root)
    owner.check()
    other_rank.check()


def test_a_rank_without_the_common_file_system_is_named(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sees no lock, or that of another start; the message says which file."""
    monkeypatch.setattr(experiment, "VISIBLE_WITHIN_S", 0.2)
    owner = taken(root)
    (tmp_path / "local").mkdir()
    stranger = taken(tmp_path / "local")
    for place, nonce in ((tmp_path / "nothing", owner.nonce), (stranger.root, owner.nonce)):
        with pytest.raises(
            StorageError, match=f"does not see {place}/runs/0/{LOCK_FILE}, which rank 0 wrote"
        ):
            FolderLock(place).see(owner.run, nonce)
