"""Files that change while a run reads them: other data ends the run, another date does not."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.blending import Blend
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.reading import Stream, StreamReader
from megatron_lite.data.sampling import FileOrder, StreamSampler
from megatron_lite.data.workers import Workers
from megatron_lite.errors import DataError
from tests.support.token_files import overwrite, write_documents

LENGTH = 16


@pytest.fixture
def reader(tmp_path: Path) -> StreamReader:
    """A reader of one data set that knows its documents."""
    dataset = IndexedDataset(
        write_documents(tmp_path / "x", [[number] * number for number in range(50)])
    )
    stream = Stream(
        dataset, FileOrder(dataset, range(50), True), StreamSampler(dataset.num_tokens, LENGTH, 1)
    )
    return StreamReader([stream], Blend([1.0]), LENGTH, 50, 1e6)


def replace(path: Path) -> None:
    """Put another file of the same size in its place."""
    path.with_suffix(".new").write_bytes(bytes(path.stat().st_size))
    os.replace(path.with_suffix(".new"), path)


@pytest.mark.parametrize("ending", ["bin", "idx"])
@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (overwrite, "holds other data than when the run began"),
        (replace, "holds other data than when the run began"),
        (Path.unlink, "is gone: it was deleted or moved"),
        (lambda path: os.truncate(path, 11), "11 bytes, but it had"),
        (lambda path: path.write_bytes(b"x" * 10_000), "10,000 bytes, but it had"),
    ],
    ids=["overwritten", "replaced", "deleted", "cut short", "longer"],
)
def test_other_data_ends_the_run(
    tmp_path: Path, reader: StreamReader, change: Callable[[Path], None], fact: str, ending: str
) -> None:
    """The next micro-batch is an error that names the file, whichever file it is and however it
    changed."""
    reader.read(0, 4)
    change(tmp_path / f"x.{ending}")
    with pytest.raises(DataError, match=rf"x\.{ending}: .*{fact}"):
        reader.read(4, 4)


def test_a_change_before_the_first_batch_is_noticed(tmp_path: Path, reader: StreamReader) -> None:
    """The data of the start counts, not the data that a worker finds when it first reads."""
    replace(tmp_path / "x.bin")
    workers = Workers(reader, iter([(0, 4), (4, 4)]), 1, 1, "spawn")
    try:
        with pytest.raises(DataError, match="x.bin: it holds other data than when the run began"):
            next(iter(workers))
    finally:
        workers.close()


def test_another_date_or_place_is_a_warning(tmp_path: Path, reader: StreamReader) -> None:
    """`touch` and a restored copy change no data: one warning for each, and the same samples as
    before."""
    before = reader.read(0, 8)
    assert before.warnings == ()
    os.utime(tmp_path / "x.bin", (0, 0))
    (warning,) = reader.read(0, 8).warnings
    assert "x.bin: modified while the run reads it" in warning and "the run continues" in warning
    shutil.copy(tmp_path / "x.idx", tmp_path / "copy")
    os.replace(tmp_path / "copy", tmp_path / "x.idx")
    (warning,) = reader.read(0, 8).warnings
    assert "x.idx: replaced while the run reads it" in warning
    after = reader.read(0, 8)
    assert after.warnings == () and np.array_equal(after.tokens, before.tokens)
