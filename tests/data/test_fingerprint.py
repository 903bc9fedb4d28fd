"""Fingerprints of data sets: of the content, not of the path, and bounded."""

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.disk_array import BLOCK_BYTES
from megatron_lite.data.fingerprint import check_same, fingerprint, identity
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.errors import DataError
from tests.support.fakes import World
from tests.support.token_files import write_documents


def write(prefix: Path, seed: int, documents: int = 40, length: int = 50) -> IndexedDataset:
    generator = np.random.default_rng(seed)
    return IndexedDataset(
        write_documents(prefix, generator.integers(0, 64, size=(documents, length)))
    )


def test_it_follows_the_content(tmp_path: Path) -> None:
    """Another corpus of the same size differs; the same one elsewhere does not, nor does it matter
    when it is read."""
    first, other = write(tmp_path / "a", 1), write(tmp_path / "b", 2)
    assert (first.num_tokens, first.num_documents) == (other.num_tokens, other.num_documents)
    assert fingerprint(first) == fingerprint(IndexedDataset(first.prefix)) != fingerprint(other)
    for end in (".bin", ".idx"):
        shutil.copy(f"{first.prefix}{end}", f"{tmp_path / 'moved'}{end}")
    moved = IndexedDataset(str(tmp_path / "moved"))
    assert identity([first], None) == identity([moved], None) != identity([other], None)
    assert identity([first, other], None) != identity([other, first], None)


@pytest.mark.parametrize("place", [0.0, 1.0])
def test_the_ends_of_large_files_count(tmp_path: Path, place: float) -> None:
    """The first and the last byte are in a block; the file is far larger than all blocks
    together."""
    dataset = write(tmp_path / "a", 1, documents=20, length=4 * BLOCK_BYTES)
    before, path = fingerprint(dataset), Path(dataset.tokens.path)
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1
    path.write_bytes(data)
    assert fingerprint(dataset) != before


def test_it_takes_no_time(tmp_path: Path) -> None:
    """A sparse file of 64 GiB takes as long as a small one."""
    dataset = write(tmp_path / "a", 1)
    os.truncate(dataset.tokens.path, 2**36)
    start_s = time.perf_counter()
    fingerprint(dataset)
    assert time.perf_counter() - start_s < 0.1


def test_the_tokenizer_and_the_ranks(tmp_path: Path) -> None:
    """The digest of the tokenizer's file is part of it; ranks that read other files are named."""
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    dataset = write(tmp_path / "a", 1)
    own = identity([dataset], str(tokenizer))
    tokenizer.write_text("{} ")
    assert own["tokenizer"] is not None and identity([dataset], str(tokenizer)) != own
    others = [own, own, identity([dataset], None)]
    results = World(3).run(lambda distributed: check_same(others[distributed.rank], distributed))  # type: ignore[arg-type]
    assert all(
        isinstance(error, DataError) and "rank 2 reads other files" in str(error)
        for error in results
    )
    assert World(2).run(lambda distributed: check_same(own, distributed)) == [None, None]  # type: ignore[arg-type]
