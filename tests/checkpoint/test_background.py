"""Saves in the background: the bytes of a save in place, as of its beginning, and nothing before it
is whole."""

import dataclasses
import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lite.checkpoint import files, manifest, writing
from megatron_lite.checkpoint.writing import HostCopy, Save, Saving, open_host_copy, shards_bytes
from megatron_lite.config import CheckpointConfig, Config, RunConfig
from megatron_lite.errors import OutOfMemoryError, StorageError
from tests.checkpoint.test_writing import SPECS, fail_to_write, load, names, newest, save
from tests.support.fakes import (
    FakePart,
    Layout,
    World,
    empty_model,
    one_rank,
    put,
    random_values,
    run_state,
    same,
)
from tests.support.thread_ranks import ThreadRank

VALUES, LATER = random_values(SPECS, 1), random_values(SPECS, 2)
LAYOUT = Layout(2)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "pause_s", lambda attempt: 0.01)


def in_background(
    root: Path,
    after: Callable[[ThreadRank, Saving], Any],
    retries: int = 0,
    iteration: int = 20,
    layout: Layout = LAYOUT,
) -> list[Any]:
    """Begin a save of VALUES on two ranks, go on to LATER, call `after`; return the ranks' results
    or exceptions."""

    def rank_main(distributed: Any) -> Any:
        model: Any = put(empty_model(SPECS, layout, distributed.rank), VALUES, distributed.rank)
        copy = HostCopy(model, distributed)
        save = Save(root, iteration, model, run_state(), Config(), distributed, lambda: None)
        saving = Saving(save, retries, copy)
        saving.wait_for_copy()
        put(model, LATER, distributed.rank)
        return after(distributed, saving)

    return World(2).run(rank_main)


def finish(distributed: ThreadRank, saving: Saving) -> Saving:
    while not saving.advance():
        pass
    return saving


def test_the_same_bytes_as_a_save_in_place(tmp_path: Path) -> None:
    """Values of the beginning, whatever the model does meanwhile; but for the random id, files and
    manifest agree."""
    for name in ("now", "later"):
        (tmp_path / name).mkdir()
    save(tmp_path / "now", 20, 1, world_size=2, state=run_state())
    for result in in_background(tmp_path / "later", finish):
        assert result.save.iteration == 20 and result.num_bytes > 0, result
    contents = []
    for root in (tmp_path / "now", tmp_path / "later"):
        content = manifest.read(root / "20", 20)
        values = [
            (root / "20" / name).read_bytes().replace(content.save_id.encode(), b"id")
            for name in content.files
        ]
        contents.append((dataclasses.replace(content, save_id="", files={}), values))
    assert contents[0] == contents[1]
    assert same(load(tmp_path / "later", 2)[1], VALUES)


def test_split_weights_are_copied_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two halves, joined on the host: another stream must make no fp32 copy on the device."""
    read = FakePart.read
    monkeypatch.setattr(
        FakePart,
        "read",
        lambda part, kind: read(part, kind) if kind != "weights" else pytest.fail(),
    )
    for result in in_background(tmp_path, finish, layout=Layout(2, copies=True)):
        assert isinstance(result, Saving), result
    monkeypatch.undo()
    assert same(load(tmp_path, 2)[1], VALUES)
    split, plain = (empty_model(SPECS, Layout(copies=copies), 0) for copies in (True, False))
    config = Config(
        checkpoint=CheckpointConfig(async_checkpoint=True),
        run=RunConfig(experiment_dir=str(tmp_path)),
    )
    joined = max(part.tensors["weights"].nbytes for _, part in split.parts())
    own = [writing.host_copy_bytes(config, model) for model in (split, plain)]  # type: ignore[arg-type]
    assert own[0] == own[1] + joined, "one shard is joined at a time"


class Cuda:
    """CUDA's runtime, which pins host memory or not."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.pinned = dict[int, int]()
        self.attempts = 0

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:  # noqa: N802
        self.attempts += 1
        if not self.error:
            self.pinned[start] = size
        return self.error

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        del self.pinned[start]
        return 0


def test_exactly_the_copy_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's pinned tensors would take the next powers of two. Nothing stays pinned when the copy
    goes."""
    cuda, distributed = Cuda(), one_rank()
    distributed.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    model: Any = empty_model(SPECS, Layout(), 0)
    host_copy = HostCopy(model, distributed)
    ((start, size),) = cuda.pinned.items()
    assert size == shards_bytes(model, 1)
    places = sorted((copy.data_ptr(), copy.nbytes) for (copy,) in host_copy._copies)
    ends = [place + num_bytes for place, num_bytes in places]
    assert [place for place, _ in places] == [start, *ends[:-1]] and ends[-1] == start + size
    assert all(place % 128 == 0 for place, _ in places)
    del host_copy
    assert not cuda.pinned


def test_a_copy_that_cannot_be_pinned_is_still_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning; and CUDA's error, which would end the next kernel of training, is taken at
    once."""
    cuda = Cuda(error=2)
    distributed = one_rank()
    kernels = list[Any]()

    def failing_kernel(*_: Any, device: torch.device) -> None:
        kernels.append(device.type)
        raise RuntimeError("CUDA error: out of memory")

    distributed.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch, "ones", failing_kernel)
    monkeypatch.setattr(files.logger, "propagate", True)
    model: Any = empty_model(SPECS, Layout(), 0)
    with caplog.at_level(logging.WARNING, "megatron_lite"):
        host_copy = HostCopy(model, distributed)
    (record,) = caplog.records
    assert "cannot pin" in record.getMessage() and "(error 2)" in record.getMessage()
    assert kernels == ["cuda"] and cuda.attempts == 1
    assert sum(copy.nbytes for (copy,) in host_copy._copies) == shards_bytes(model, 1)


def test_training_goes_on_until_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy goes on beside it; only the wait before the update counts as blocked."""
    copy, may_copy = writing._copy_all, threading.Event()

    def slow(*arguments: Any) -> None:
        may_copy.wait(10)
        copy(*arguments)

    monkeypatch.setattr(writing, "_copy_all", slow)
    distributed: Any = one_rank()
    model: Any = put(empty_model(SPECS, Layout(), 0), VALUES, 0)
    host_copy = HostCopy(model, distributed)
    save = Save(tmp_path, 20, model, run_state(), Config(), distributed, lambda: None)
    saving = Saving(save, copy=host_copy)
    assert not saving.advance(), "returned before the copy"
    threading.Timer(0.2, may_copy.set).start()
    saving.wait_for_copy()
    put(model, LATER, 0)
    saving.wait_for_copy()
    assert 0.1 < saving.blocked_s < 5
    saving.finish()
    assert same(load(tmp_path)[1], VALUES)


def test_nothing_is_there_before_it_is_whole(tmp_path: Path) -> None:
    """A crash between writing and publishing leaves the older checkpoint, and a folder that the
    next save deletes."""
    old = save(tmp_path, 10, 3, world_size=2)

    def write_only(distributed: ThreadRank, saving: Saving) -> None:
        preparing = saving._job
        while saving._job is preparing:
            saving.advance()
        assert saving._job is not None
        saving._job.result()

    in_background(tmp_path, write_only)
    (folder,) = tmp_path.glob(".tmp-20-*")
    assert names(folder) == {"rank_000.safetensors", "rank_001.safetensors"}
    assert "10" in names(tmp_path) and "20" not in names(tmp_path)
    assert same(load(tmp_path)[1], old)
    save(tmp_path, 30, 4)
    assert names(tmp_path) == {"10", "30"}


def test_a_failure_on_one_rank_is_an_error_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found at the next look; the older checkpoint stays, nothing else does."""
    save(tmp_path, 10, 3, world_size=2)
    fail_to_write(monkeypatch, 1, 3, errno.EIO)
    for result in in_background(tmp_path, finish, retries=2):
        assert (
            isinstance(result, StorageError)
            and "rank 1: " in str(result)
            and "Input/output error" in str(result)
        )
    assert names(tmp_path) == {"10"}


def test_a_failure_that_passes_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While training goes on, with a warning each time."""
    fail_to_write(monkeypatch, 1, 2, errno.EIO)
    monkeypatch.setattr(files.logger, "propagate", True)
    with caplog.at_level(logging.WARNING, "megatron_lite"):
        in_background(tmp_path, finish, retries=2)
    assert same(load(tmp_path, 2)[1], VALUES)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 4 and all("Training continues" in one for one in warnings)
    assert all("rank 1: " in one and "Input/output error" in one for one in warnings)
    assert ["(1 of 2" in one for one in warnings] == [True, True, False, False]


@pytest.mark.parametrize(("replaces", "failing_call"), [(False, 1), (True, 1), (True, 2)])
def test_a_failure_after_a_rename_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaces: bool, failing_call: int
) -> None:
    """The folder has another name already: that of a checkpoint, or that of one that waits for the
    place of another."""
    save(tmp_path, 20 if replaces else 10, 3, world_size=2)
    calls, sync_folder = [0], files.sync_folder

    def sync(path: Path) -> None:
        calls[0] += 1
        if calls[0] == failing_call:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        sync_folder(path)

    monkeypatch.setattr(files, "sync_folder", sync)
    for result in in_background(tmp_path, finish, retries=1):
        assert isinstance(result, Saving), result
    assert same(load(tmp_path, 2)[1], VALUES) and calls[0] >= failing_call
    found = newest(tmp_path)
    assert found is not None and found[0].name == "20"


@pytest.mark.parametrize("signal", [0, 15])
def test_a_stop_request_ends_the_pauses(
    signal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait for another attempt would cost the grace time. A signal to any rank counts."""
    monkeypatch.setattr(writing, "pause_s", lambda attempt: 600.0)
    fail_to_write(monkeypatch, 1, 1, errno.EIO)

    def hurry(distributed: ThreadRank, saving: Saving) -> None:
        stop: Any = SimpleNamespace(received=signal if distributed.rank == 1 else 0)
        saving.finish(hurry=not signal, stop=stop)

    assert in_background(tmp_path, hurry, retries=3) == [None, None]
    assert same(load(tmp_path, 2)[1], VALUES)


def test_ranks_agree_during_the_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank waits in one exchange for the whole of a pause, for which there is a time-out."""
    monkeypatch.setattr(writing, "pause_s", lambda attempt: 0.2)
    fail_to_write(monkeypatch, 1, 1, errno.EIO)
    looks = [0, 0]

    def count(distributed: ThreadRank, saving: Saving) -> None:
        agree_max = distributed.agree_max

        def counting(value: int) -> int:
            looks[distributed.rank] += 1
            return agree_max(value)

        monkeypatch.setattr(distributed, "agree_max", counting)
        saving.finish()

    assert in_background(tmp_path, count, retries=1) == [None, None]
    assert looks[0] == looks[1] >= 10


@pytest.mark.parametrize("in_place", [False, True])
def test_ranks_that_wait_do_so_in_an_exchange(in_place: bool, tmp_path: Path) -> None:
    """In place and in a hurry: only an exchange has a time-out, for a rank whose disk hangs."""

    def rank_main(distributed: Any) -> None:
        model: Any = put(empty_model(SPECS, LAYOUT, distributed.rank), VALUES, distributed.rank)
        save = Save(tmp_path, 20, model, run_state(), Config(), distributed)
        saving = Saving(save, copy=None if in_place else HostCopy(model, distributed))
        distributed.agree_max = lambda value: pytest.fail("looks from time to time")
        saving.finish(hurry=not in_place)

    assert World(2).run(rank_main) == [None, None]
    assert same(load(tmp_path, 2)[1], VALUES)


def test_the_copy_must_fit_into_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused with the numbers before anything is allocated; every rank of the machine counts."""
    distributed: Any = one_rank()
    distributed.local_world_size = 4
    model: Any = empty_model(SPECS, Layout(), 0)
    own = shards_bytes(model, 1)
    run_config = RunConfig(experiment_dir=str(tmp_path))
    wanted = Config(checkpoint=CheckpointConfig(async_checkpoint=True), run=run_config)
    monkeypatch.setattr(writing, "available_bytes", lambda: 4 * own - 1)
    with pytest.raises(
        OutOfMemoryError,
        match="--async_checkpoint=1 .* GiB per rank, .* on this machine, of .* free",
    ):
        open_host_copy(wanted, model, distributed)
    monkeypatch.setattr(writing, "available_bytes", lambda: 4 * own)
    before = set(threading.enumerate())  # threads of earlier tests may end late
    host_copy = open_host_copy(wanted, model, distributed)
    assert host_copy is not None and sum(copy.nbytes for (copy,) in host_copy._copies) == own
    assert open_host_copy(Config(run=run_config), model, distributed) is None
    assert set(threading.enumerate()) <= before, "none until a save"


def test_no_rank_counts_the_copy_of_another_one_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that comes late looks at the free memory before the first one takes its part of it."""
    # type: ignore[arg-type]
    own = shards_bytes(empty_model(SPECS, LAYOUT, 0), 1)
    taken = threading.Event()
    run_config = RunConfig(experiment_dir=str(tmp_path))
    wanted = Config(checkpoint=CheckpointConfig(async_checkpoint=True), run=run_config)
    monkeypatch.setattr(writing, "available_bytes", lambda: 2 * own - own * taken.is_set())
    monkeypatch.setattr(writing, "HostCopy", lambda *_: taken.set() or "opened")

    def start(distributed: Any) -> Any:
        distributed.local_world_size = 2
        model: Any = empty_model(SPECS, LAYOUT, distributed.rank)
        if distributed.rank == 1:
            taken.wait(0.2)
        return open_host_copy(wanted, model, distributed)

    assert World(2).run(start) == ["opened"] * 2
