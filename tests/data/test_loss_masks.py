"""--loss_mask: labels that a second pair of files leaves out, compared with the files' bytes."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_lite.config import Config, flatten, unflatten
from megatron_lite.data import open_data as open_data_module
from megatron_lite.data.open_data import open_data
from megatron_lite.errors import DataError, UsageError
from megatron_lite.validation import resolve
from tests.support.token_files import data_config, read_batches, write_counting, write_documents

LENGTH = 16
SIZES = [7, 0, 30, 1, 1, 16, 5, 17, 0, 0, 40, 2, 3, 64, 11, 16, 9, 50]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """Return a data set whose tokens count up, and a random mask of it."""
    ends = np.cumsum(SIZES)[:-1]
    mask = np.random.default_rng(0).integers(0, 2, sum(SIZES))
    mask[0] = 0
    tokens = write_counting(tmp_path / "tokens", SIZES, "<u2")
    return tokens, write_documents(tmp_path / "mask", np.split(mask, ends), "|u1")


def config(*data_path: str, **values: Any) -> Config:
    options = dict(
        batch_size=8, micro_batch_size=4, sequence_length=LENGTH, train_iters=10, vocab_size=10_000
    )
    return resolve(data_config(*data_path, **{**options, **values}), 1)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("mask_starts", [False, True])
@pytest.mark.parametrize(
    "order", [{}, {"shuffle_documents": True}, {"truncate_documents": False, "sequence_length": 64}]
)
def test_each_label_has_its_entry(
    pair: tuple[str, str], workers: int, mask_starts: bool, order: dict[str, Any]
) -> None:
    """A label counts if its entry is 1, in every epoch and order; the labels that begin documents
    are left out as well. Padding consists of token 0, whose entry is 0."""
    tokens, mask = pair
    entries = np.fromfile(mask + ".bin", np.uint8)
    first = np.zeros(sum(SIZES), dtype=bool)
    first[np.cumsum([0, *SIZES[:-1]])] = True
    options: dict[str, Any] = {
        "loss_mask": (mask,),
        "mask_document_starts": mask_starts,
        "num_workers": workers,
    }
    options |= order
    for batch in itertools.chain(*read_batches(config(tokens, **options))):
        labels = batch.tokens[:, 1:].numpy()
        assert batch.masked is not None
        expected = (entries[labels] == 0) | (first[labels] & mask_starts)
        np.testing.assert_array_equal(batch.masked.numpy(), expected)
        assert batch.counted == (~expected).sum()


def test_padded_rows_have_masks(pair: tuple[str, str]) -> None:
    """Also a micro-batch without any sample, which a worker sends like the others."""
    tokens, mask = pair
    options: dict[str, Any] = {
        "loss_mask": (mask,),
        "batch_size": 5,
        "micro_batch_size": 2,
        "num_workers": 1,
    }
    both = resolve(
        unflatten({**flatten(config(tokens)), **options, "allow_nondivisible_batch_size": True}), 2
    )
    ranks = [read_batches(both, rank, 2, count=3) for rank in (0, 1)]
    assert all(
        batch.masked is not None and len(batch.tokens) == 2
        for batch in itertools.chain(*ranks[0], *ranks[1])
    )
    counted = [[[batch.counted for batch in step] for step in steps] for steps in ranks]
    assert all(step[1] == 0 for step in counted[1])  # of 5 samples, rank 1 has the third and fourth
    whole = read_batches(
        config(tokens, loss_mask=(mask,), batch_size=5, micro_batch_size=5), count=3
    )
    for number, (batch,) in enumerate(whole):
        assert batch.counted == sum(sum(rank[number]) for rank in counted)


def test_of_a_blend_some_have_masks(pair: tuple[str, str], tmp_path: Path) -> None:
    """Every token of a data set without a mask counts; a batch has a mask in any case, so that all
    ranks agree."""
    tokens, mask = pair
    entries = np.fromfile(mask + ".bin", np.uint8)
    other = write_documents(tmp_path / "other", [np.arange(1000, 1500)], "<u2")
    blended = config("0.5", other, "0.5", tokens, loss_mask=("none", mask))
    for batch in itertools.chain(*read_batches(blended)):
        labels = batch.tokens[:, 1:].numpy()
        expected = np.where(
            labels < 1000, entries[np.minimum(labels, len(entries) - 1)] == 0, False
        )
        assert batch.masked is not None
        np.testing.assert_array_equal(batch.masked.numpy(), expected)
    data = open_data(blended, 0, 1)
    assert data.identity["masks"][0] is None and len(data.identity["masks"][1]) == 16
    assert "masks" not in open_data(config(tokens), 0, 1).identity


def test_a_mask_of_other_documents_is_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    """One line that names the file and the first difference; bad entries are found where they are
    read."""
    tokens, _ = pair
    document = [np.ones(size, dtype=np.uint8) for size in SIZES]
    moved = [*document[:4], document[4][:0], np.ones(17, np.uint8), *document[6:]]
    strange = [array + (number == 10) for number, array in enumerate(document)]
    for name, documents, message in (
        (
            "fewer",
            document[:-1],
            r"fewer.idx \(--loss_mask\): 17 documents, but .*tokens.idx has 18",
        ),
        ("moved", moved, "document 4 has 0 entries, but 1 tokens in .*tokens.idx"),
        ("strange", strange, r"strange.bin \(--loss_mask\): entry 77 is 2; 1 lets a token count"),
    ):
        mask = write_documents(tmp_path / name, documents, "|u1")
        with pytest.raises(DataError, match=message):
            read_batches(config(tokens, loss_mask=(mask,)))
    with pytest.raises(
        DataError,
        match=r"absent\.idx: no such file; this loss mask is missing: .* --loss_mask=none",
    ):
        open_data(config(tokens, loss_mask=(str(tmp_path / "absent"),)), 0, 1)


def test_a_split_in_which_no_token_counts_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every data set and phase that the run reads; nothing is said about a long mask that begins
    with zeros."""
    documents = [np.zeros(20, dtype=np.uint8) for _ in range(10)]
    documents[7][19] = 1
    tokens = write_documents(tmp_path / "tokens", [np.arange(20)] * 10, "<u2")
    mask = write_documents(tmp_path / "mask", documents, "|u1")
    monkeypatch.setattr(open_data_module, "READ_AT_A_TIME", 7)

    def opened(first: float, **values: Any) -> None:
        open_data(config(tokens, loss_mask=(mask,), split=(first, 1 - first), **values), 0, 1)

    opened(0.8)
    with pytest.raises(
        DataError,
        match=r"mask.bin \(--loss_mask\): no token of its 7 documents for training counts",
    ):
        opened(0.7)
    with pytest.raises(
        DataError,
        match="no token of its 2 documents for validation counts in the loss: all entries",
    ):
        opened(0.8, validation_iters=1)
    monkeypatch.setattr(open_data_module, "SEARCHED", 139)
    opened(0.7)


def test_there_is_a_mask_for_each_data_set() -> None:
    """Weights are no data sets."""
    with pytest.raises(UsageError, match=r"--loss_mask=m: 1 for 2 data sets; write one for each"):
        config("0.5", "a", "0.5", "b", loss_mask=("m",))
