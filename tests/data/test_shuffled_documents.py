"""Shuffled documents: every epoch has each document once, whole, in another order, found from any
place."""

import re
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data import sampling
from megatron_lite.data.blending import Blend
from megatron_lite.data.indexed_dataset import HEADER, IndexedDataset
from megatron_lite.data.reading import Stream, StreamReader
from megatron_lite.data.sampling import SampleOrder, ShuffledDocuments, StreamSampler
from megatron_lite.errors import DataError
from tests.support.token_files import write_counting

LENGTH = 16


def open_documents(
    path: Path, sizes: list[int], first: int = 0, **options: int
) -> tuple[IndexedDataset, ShuffledDocuments]:
    """A data set whose tokens count up, and its documents from `first` on, shuffled."""
    dataset = IndexedDataset(write_counting(path, sizes))
    return dataset, ShuffledDocuments(dataset, range(first, dataset.num_documents), 7, **options)


@pytest.mark.parametrize(
    ("count", "at_a_time"), [(1, 16), (15, 16), (16, 16), (17, 16), (100, 16), (100, 1 << 18)]
)
def test_an_epoch_has_every_document_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, at_a_time: int
) -> None:
    """The runs of a whole epoch are the documents that are not empty, none of another split among
    them."""
    monkeypatch.setattr(sampling, "_AT_A_TIME", at_a_time)
    sizes = [50, *np.random.default_rng(count).integers(0, 30, count).tolist(), 3]
    dataset, documents = open_documents(tmp_path / "x", sizes, first=1)
    expected = {
        (dataset.first_token(number), sizes[number])
        for number in range(1, len(sizes))
        if sizes[number]
    }
    orders = []
    for epoch in (0, 1, 10**6, 0):
        orders.append(documents.runs(epoch, 0, sum(sizes[1:])))
        assert set(orders[-1]) == expected and len(orders[-1]) == len(expected)
    assert orders[0] == orders[3]
    if count == 100:
        assert orders[0] != orders[1] != orders[2] and orders[0] != sorted(orders[0])


def test_any_part_of_the_stream_is_found(tmp_path: Path) -> None:
    """Tokens read in parts, from any place, are those of the whole stream."""
    sizes = np.random.default_rng(0).integers(0, 30, 70).tolist()
    dataset, documents = open_documents(tmp_path / "x", sizes)

    def tokens(start: int, length: int) -> list[int]:
        return [
            token
            for first, count in documents.runs(3, start, length)
            for token in range(first, first + count)
        ]

    whole = tokens(0, dataset.num_tokens)
    assert sorted(whole) == list(range(dataset.num_tokens))
    for start in range(0, dataset.num_tokens - 40, 13):
        for length in (1, 2, 40):
            assert tokens(start, length) == whole[start : start + length]


@pytest.mark.parametrize("shuffle", ["epoch", "full", "skip_first_epoch"])
def test_samples_of_shuffled_documents(tmp_path: Path, shuffle: str) -> None:
    """Samples are cut from the shuffled stream; their pieces are its documents; each epoch has
    nearly every token."""
    sizes = np.random.default_rng(1).integers(0, 40, 60).tolist()
    dataset, documents = open_documents(
        tmp_path / "x", sizes, keep=4, skip_first_epoch=shuffle == "skip_first_epoch"
    )
    sampler = StreamSampler(dataset.num_tokens, LENGTH, 7, SampleOrder(shuffle, epochs=3))
    stream = Stream(dataset, documents, sampler)
    size = sampler.samples_per_epoch
    reader = StreamReader([stream], Blend([1.0]), stream.sampler.sequence_length, 10_000, 1e6)
    samples = reader.read(0, 3 * size)
    assert samples.lengths is not None
    tokens = samples.tokens.astype(np.int64)
    owner = np.repeat(np.arange(60), sizes)
    borders_found = np.flatnonzero(np.diff(owner[tokens[:, :-1]], axis=1).ravel() != 0)
    assert (
        len(samples.lengths) == len(borders_found) + len(tokens)
        and samples.lengths.sum() == 3 * size * LENGTH
    )
    steps = np.diff(tokens, axis=1)
    assert ((steps == 1) | (owner[tokens[:, 1:]] != owner[tokens[:, :-1]])).all()
    epochs, _ = sampler.places(np.arange(3 * size))
    for epoch in range(3):
        inputs = tokens[epochs == epoch, :-1]
        assert len(np.unique(inputs)) == inputs.size == size * LENGTH
    first = tokens[epochs == 0]
    assert ((np.diff(first, axis=1) == 1).all()) == (shuffle == "skip_first_epoch")
    assert np.array_equal(reader.read(3, 5).tokens, samples.tokens[3:8])


def test_a_bad_token_is_named_where_it_is_in_the_file(tmp_path: Path) -> None:
    """The message has the document of the file, not of the shuffled stream."""
    dataset, documents = open_documents(tmp_path / "x", [20] * 30)
    stream = Stream(dataset, documents, StreamSampler(600, LENGTH, 7))
    with pytest.raises(DataError) as caught:
        StreamReader([stream], Blend([1.0]), stream.sampler.sequence_length, 407, 1e6).read(0, 37)
    document, offset, token = map(
        int, re.findall(r"(?:document|offset|token id) (\d+)", str(caught.value))
    )
    assert token == 20 * document + offset >= 407


def test_a_damaged_index_is_noticed(tmp_path: Path) -> None:
    """Sizes that do not add up, in a part of a large index that was not checked when it was
    opened."""
    dataset, documents = open_documents(tmp_path / "x", [20] * 30)
    with open(dataset.index_path, "r+b") as index:
        index.seek(HEADER.size + 4 * 13)
        index.write(np.int32(21).tobytes())
    with pytest.raises(DataError, match="documents 0 to 29 have 601 tokens together, but take 600"):
        documents.runs(0, 0, 5)
