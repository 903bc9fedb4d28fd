"""Whole documents in samples: none is lost, repeated, cut or put where it does not fit."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.config import Config
from megatron_lite.data.host_batch import HostBatch
from megatron_lite.data.open_data import open_data
from megatron_lite.data.sampling import PackedDocuments, Pattern, pack
from megatron_lite.errors import DataError
from megatron_lite.validation import resolve
from tests.support.harness import run_distributed, train_tiny
from tests.support.token_files import data_config, read_batches, write_documents

Random = np.random.Generator


def sizes_of(generator: Random, capacity: int) -> np.ndarray:
    """Return lengths of up to 300 documents, some of them empty or too long, often of few different
    lengths."""
    count, largest = int(generator.integers(1, 300)), int(generator.integers(1, capacity + 4))
    lengths = generator.integers(0, largest + 1, count)
    if generator.random() < 0.5:
        lengths = generator.choice(lengths[:5], count)
    return lengths.astype(np.int32)


def planned(sizes: np.ndarray, capacity: int, key: int = 0) -> PackedDocuments:
    """Plan the samples of documents of these sizes, without files."""
    dataset: Any = SimpleNamespace(
        document_sizes=lambda documents: sizes[documents.start : documents.stop]
    )
    return PackedDocuments(dataset, range(len(sizes)), capacity, key)


def test_each_document_comes_once_in_every_epoch() -> None:
    """Whole, in a sample with room for it; empty documents and those that are too long never
    come."""
    for seed in range(15):
        generator = np.random.default_rng(seed)
        capacity = int(generator.integers(1, 60))
        sizes = sizes_of(generator, capacity)
        packed = planned(sizes, capacity, key=seed)
        expected = [number for number, size in enumerate(sizes) if 0 < size <= capacity]
        assert packed.too_long == int((sizes > capacity).sum())
        for epoch in (0, 1000):
            samples = [packed.documents(epoch, slot) for slot in range(packed.samples_per_epoch)]
            assert sorted(itertools.chain(*samples)) == expected, (seed, epoch)
            assert all(0 < sizes[sample].sum() <= capacity for sample in samples), (seed, epoch)
        assert packed.num_tokens == sizes[expected].sum()


def test_best_fit_decreasing() -> None:
    """As the plain algorithm, one document at a time, packs: the number of samples and the space
    left in each."""
    for seed in range(100):
        generator = np.random.default_rng(seed)
        capacity = int(generator.integers(1, 40))
        sizes = sizes_of(generator, capacity)
        sizes = sizes[(sizes > 0) & (sizes <= capacity)]
        spaces: list[int] = []
        for size in sorted(sizes.tolist(), reverse=True):
            fitting = [space for space in spaces if space >= size]
            if fitting:
                spaces.remove(min(fitting))
            spaces.append((min(fitting) if fitting else capacity) - size)
        patterns = pack(np.bincount(sizes, minlength=capacity + 1), capacity)
        found = [
            capacity - sum(pattern.lengths) for pattern in patterns for _ in range(pattern.count)
        ]
        assert len(found) == len(spaces), seed
        assert sorted(found) == sorted(spaces), seed


def test_a_small_plan() -> None:
    """Two samples of 10 for lengths 6, 5, 4, 3, 2; equal lengths share one pattern, a million of
    them as well."""
    counts = np.bincount([6, 5, 4, 3, 2], minlength=11)
    assert pack(counts, 10) == [Pattern((6, 4), 1), Pattern((5, 3, 2), 1)]
    assert pack(np.bincount([3, 7], minlength=11) * 10**6, 10) == [Pattern((7, 3), 10**6)]
    assert pack(np.zeros(11, dtype=np.int64), 10) == []


SIZES = [7, 0, 30, 1, 1, 17, 5, 16, 0, 18, 40, 2, 3, 64, 11, 16, 9, 50, 17, 6, 6, 6, 6]
LENGTH = 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[list[int]]]:
    """Return the prefix of a data set in which each token from 1 on comes once, and its documents
    that fit."""
    prefix = str(tmp_path_factory.mktemp("corpus") / "corpus")
    tokens = np.split(np.random.default_rng(0).permutation(sum(SIZES)) + 1, np.cumsum(SIZES)[:-1])
    write_documents(prefix, tokens)
    return prefix, [document.tolist() for document in tokens if 0 < document.size <= LENGTH + 1]


def config(prefix: str, ranks: int = 1, **more: Any) -> Config:
    values: dict[str, Any] = dict(
        sequence_length=LENGTH, vocab_size=sum(SIZES) + 1, batch_size=6, train_iters=40
    )
    values |= dict(
        truncate_documents=False, cross_document_attention=False, mask_document_starts=True
    )
    return resolve(data_config(prefix, **{**values, **more}), ranks)


def documents_of(batch: HostBatch, row: int) -> list[list[int]]:
    """Return the documents of a sample by its borders, after checking that padding comes last and
    that every token of a document but the first is a label."""
    assert batch.starts is not None and batch.masked is not None
    tokens, masked = batch.tokens[row].tolist(), [False, *batch.masked[row].tolist()]
    borders = [
        int(start) - row * LENGTH
        for start in batch.starts
        if row * LENGTH <= start < (row + 1) * LENGTH
    ]
    if masked[LENGTH]:  # the last token, which is no input, begins a document, or is padding
        borders.append(LENGTH)
    found = []
    for low, high in zip(borders, [*borders[1:], LENGTH + 1], strict=True):
        if tokens[low] == 0:
            assert not any(tokens[low:]) and all(masked[low:])
            break
        found.append(tokens[low:high])
        assert masked[low] == (low > 0) and not any(masked[low + 1 : high]), (low, high)
    return found


@pytest.mark.parametrize(
    ("ranks", "micro_batch_size", "num_workers"), [(1, 3, 0), (2, 1, 0), (1, 6, 2)]
)
def test_every_epoch_has_every_document(
    corpus: tuple[str, list[list[int]]], ranks: int, micro_batch_size: int, num_workers: int
) -> None:
    """Whole, once, and at the same place of the sample stream for any ranks, micro-batches, workers
    and restart."""
    prefix, documents = corpus
    values = dict(micro_batch_size=micro_batch_size, num_workers=num_workers)
    per_epoch = planned(np.array(SIZES, np.int32), LENGTH + 1).samples_per_epoch
    rows = rows_of(config(prefix, ranks, **values), ranks, 0)
    for epoch in range(len(rows) // per_epoch):
        found = itertools.chain(
            *(documents_of(*row) for row in rows[epoch * per_epoch : (epoch + 1) * per_epoch])
        )
        assert sorted(found) == sorted(documents), epoch
    expected = torch.cat(
        [batch.tokens for (batch,) in read_batches(config(prefix, micro_batch_size=6), count=8)]
    )
    assert torch.equal(torch.stack([batch.tokens[row] for batch, row in rows]), expected)
    resumed = rows_of(config(prefix, ranks, **values), ranks, 5)
    assert torch.equal(
        torch.stack([batch.tokens[row] for batch, row in resumed]), expected[5 * 6 :]
    )


def rows_of(values: Config, ranks: int, done: int) -> list[tuple[HostBatch, int]]:
    """Return all ranks' samples of iterations up to 8 in their order, each as a batch and a row of
    it."""
    streams = [read_batches(values, rank, ranks, done, 8 - done) for rank in range(ranks)]
    batches = [
        batch
        for steps in zip(*streams, strict=True)
        for step in zip(*steps, strict=True)
        for batch in step
    ]
    return [(batch, row) for batch in batches for row in range(len(batch.tokens))]


def test_documents_that_are_left_out_are_named(
    corpus: tuple[str, list[list[int]]], tmp_path: Path
) -> None:
    """A warning counts them, the banner shows the padding, and a set without any that fits is
    refused."""
    prefix, _ = corpus
    source = open_data(config(prefix, train_iters=1), 0, 1)
    assert source.warnings == (
        f"{prefix}: 5 of 23 documents for training have more than 17 tokens and are left out (--truncate_documents=0)",
    )
    assert "; whole documents, " in source.description["training data"]
    with pytest.raises(DataError, match="none of its 1 documents for training has 1 to 17 tokens"):
        open_data(config(write_documents(tmp_path / "long", [[1] * 18])), 0, 1)


def test_training_on_packed_documents(corpus: tuple[str, list[list[int]]]) -> None:
    """One rank and two with other micro-batches agree, although their labels are not equally
    many."""
    values: dict[str, Any] = dict(
        data_path=(corpus[0],), split=(1.0,), vocab_size=sum(SIZES) + 1, batch_size=8
    )
    values |= dict(dataset_source="list", sequence_length=LENGTH, train_iters=40, num_workers=0)
    values |= dict(
        truncate_documents=False, cross_document_attention=False, mask_document_starts=True
    )
    one = run_distributed(1, train_tiny, values, 2)[0]
    two = run_distributed(2, train_tiny, {**values, "zero_stage": 3, "micro_batch_size": 1}, 2)[0]
    np.testing.assert_allclose(two.losses, one.losses, rtol=1e-6)


def test_epochs_combine_other_documents() -> None:
    """The patterns stay; the documents that fill them, and their order in a sample, differ from
    epoch to epoch and with the key, and are the same when asked again."""
    sizes = np.random.default_rng(0).integers(1, 20, 500).astype(np.int32)
    packed = planned(sizes, 40, key=1)

    def epoch(number: int, plan: PackedDocuments = packed) -> list[list[int]]:
        return [plan.documents(number, slot) for slot in range(plan.samples_per_epoch)]

    first, second = epoch(0), epoch(1)
    assert first == epoch(0) and first == epoch(0, planned(sizes, 40, key=1))
    together = [{frozenset(sample) for sample in epoch} for epoch in (first, second)]
    assert len(together[0] & together[1]) < 5
    assert first != epoch(0, planned(sizes, 40, key=2))
    leads = sum(sizes[sample[0]] == max(sizes[sample]) for sample in first if len(sample) > 1)
    assert 0 < leads < sum(len(sample) > 1 for sample in first), (
        "long documents do not always come first"
    )
