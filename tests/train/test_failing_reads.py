"""Reads of the data that fail: tried again with the file opened anew; if that does not help, the
run saves and ends."""

import errno
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from megatron_lite.data import disk_array
from megatron_lite.data.blending import Blend
from megatron_lite.data.disk_array import DataFile, DiskArray
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.reading import Stream, StreamReader
from megatron_lite.data.sampling import FileOrder, StreamSampler
from megatron_lite.data.workers import Workers
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import DataError
from megatron_lite.run import durable_files
from tests.support.harness import run_distributed, tiny_config, train_whole
from tests.support.token_files import write_documents


def failing(call: Callable[..., Any], path: str, code: int, numbers: range) -> Callable[..., Any]:
    """`call`, which raises an OSError at these calls with a file of this path, or a descriptor of
    such a file."""
    calls = itertools.count(1)

    def called(file: Any, *arguments: Any, **options: Any) -> Any:
        where = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else os.fspath(file)
        if where == path and next(calls) in numbers:
            raise OSError(code, os.strerror(code), path)
        return call(file, *arguments, **options)

    return called


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StreamReader:
    """A reader of one data set with documents and a mask, and no pauses."""
    monkeypatch.setattr(durable_files, "pause_s", lambda attempt: 0.0)
    dataset = IndexedDataset(
        write_documents(tmp_path / "x", [[number] * number for number in range(50)])
    )
    (tmp_path / "mask").write_bytes(b"\1\0\1" * (dataset.num_tokens // 3 + 1))
    mask = DiskArray(DataFile(str(tmp_path / "mask")), np.dtype(np.uint8), dataset.num_tokens)
    sampler = StreamSampler(dataset.num_tokens, 16, 1)
    stream = Stream(dataset, FileOrder(dataset, range(50), True), sampler, mask)
    return StreamReader([stream], Blend([1.0]), 16, 50, 1e6)


CASES = [
    ("pread", "x.bin", errno.EIO),
    ("pread", "x.idx", errno.ETIMEDOUT),
    ("pread", "mask", errno.ESTALE),
]
CASES += [
    ("open", "x.bin", errno.EIO),
    ("stat", "x.bin", errno.ESTALE),
    ("stat", "mask", errno.EIO),
]


@pytest.mark.parametrize(("call", "name", "code"), CASES)
@pytest.mark.parametrize("in_a_worker", [False, True])
def test_a_read_that_fails_is_tried_again(
    call: str,
    name: str,
    code: int,
    in_a_worker: bool,
    tmp_path: Path,
    reader: StreamReader,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three more times, here or in a worker: the same samples with a warning, else an error that
    names the file."""
    wanted = reader.read(8, 4)

    def read(failures: int) -> Any:
        owner, original = (os, getattr(os, call)) if call != "open" else (disk_array, open)
        fake = failing(original, str(tmp_path / name), code, range(1, failures + 1))
        reader.streams[0].dataset.tokens.file.close()
        with monkeypatch.context() as patch:
            patch.setattr(owner, call, fake, raising=False)
            if not in_a_worker:
                return reader.read(8, 4)
            workers = Workers(reader, iter([(8, 4)]), 1, 1, "fork")
            try:
                return next(iter(workers))
            finally:
                workers.close()

    reason = f"{name}: cannot be read: {os.strerror(code)}; tried"
    for failures in (1, 3):
        samples = read(failures)
        assert np.array_equal(samples.tokens, wanted.tokens) and np.array_equal(
            samples.masked, wanted.masked
        )
        assert len(samples.warnings) == 1 and f"{reason} again after" in samples.warnings[0]
    with pytest.raises(DataError, match=f"{reason} 4 times"):
        read(4)


def test_a_file_is_opened_anew(
    tmp_path: Path, reader: StreamReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale handle stays stale."""
    reader.read(0, 4)
    file = reader.streams[0].dataset.tokens.file
    before = file._file
    monkeypatch.setattr(
        os, "pread", failing(os.pread, str(tmp_path / "x.bin"), errno.ESTALE, range(1, 2))
    )
    reader.read(0, 4)
    assert before is not None and before.closed and file._file is not before


def train_with_failing_reads(distributed: Distributed, options: dict[str, Any], path: str) -> str:
    """A whole run; from rank 1's 20th read of this file on, reads fail. Return how it ends."""
    durable_files.pause_s = lambda attempt: 0.0  # type: ignore[assignment]  # in a process of its own
    if path and distributed.rank == 1:
        os.pread = failing(os.pread, path, errno.EIO, range(20, 10**9))
    try:
        train_whole(distributed, tiny_config(2, **options))
    except DataError as error:
        return str(error)
    return "done"


def test_the_run_saves_before_it_ends(tmp_path: Path) -> None:
    """All ranks save what they trained, and the same command goes on to the weights of a run
    without a fault."""
    prefix = write_documents(
        tmp_path / "x", [[(7 * index) % 64 for index in range(400)] for _ in range(10)]
    )
    data = dict(
        dataset_source="list", data_path=(prefix,), split=(1.0,), num_workers=0, train_iters=12
    )
    ended, weights = [], []
    for name, path in (("whole", ""), ("cut", f"{prefix}.bin"), ("cut", "")):
        experiment = tmp_path / name
        options = {**data, "checkpoint_interval": 1000, "experiment_dir": str(experiment)}
        ended.append(run_distributed(2, train_with_failing_reads, options, path))
        (newest,) = sorted(
            (experiment / "checkpoints").iterdir(), key=lambda folder: int(folder.name)
        )[-1:]
        weights.append(
            (
                int(newest.name),
                [load_file(newest / f"rank_00{rank}.safetensors") for rank in (0, 1)],
            )
        )
    assert ended[0] == ended[2] == ["done", "done"]
    assert all(
        "rank 1: " in text and "x.bin: cannot be read: Input/output error" in text
        for text in ended[1]
    )
    assert weights[0][0] == weights[2][0] == 12 and 0 < weights[1][0] < 12
    for one, other in zip(weights[0][1], weights[2][1], strict=True):
        assert one.keys() == other.keys() and all(
            np.array_equal(one[name], other[name]) for name in one
        )
