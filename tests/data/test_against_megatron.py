"""The same files as megatron-core's, where megatron-core is installed."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_lite.data.indexed_dataset import TOKEN_DTYPES, IndexedDataset
from tests.support.token_files import write_documents

pytest.importorskip("megatron")
# slow to import
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*__array__:DeprecationWarning")]

# Each document has one or more sequences; some are empty.
DOCUMENTS: list[list[list[int]]] = [
    [[5, 1, 2], [7]],
    [[]],
    [[9, 8, 7, 6, 5, 4]],
    [[3, 3], [], [1]],
    [[]],
]
SEQUENCES = [sequence for document in DOCUMENTS for sequence in document]


@pytest.fixture(scope="module")
def theirs() -> Any:
    """megatron-core's module; its import warns about packages that are not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import indexed_dataset
    return indexed_dataset


def build(theirs: Any, prefix: Path, dtype: str) -> None:
    """Write the documents with megatron-core."""
    builder = theirs.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
    for document in DOCUMENTS:
        builder.add_document(
            torch.tensor([token for one in document for token in one]),
            [len(one) for one in document],
        )
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("dtype", TOKEN_DTYPES.values())
def test_both_read_what_the_other_writes(theirs: Any, tmp_path: Path, dtype: str) -> None:
    """Every sequence, of every dtype; from documents of one sequence each, both write the same
    bytes."""
    build(theirs, tmp_path / "theirs", dtype)
    ours = IndexedDataset(str(tmp_path / "theirs"))
    assert [ours.document(number).tolist() for number in range(ours.num_documents)] == SEQUENCES
    assert ours.tokens.dtype == np.dtype(dtype)
    assert ours.document_index.read(0, len(DOCUMENTS) + 1).tolist() == [0, 2, 3, 4, 7, 8]
    write_documents(tmp_path / "ours", SEQUENCES, dtype)
    read = theirs.IndexedDataset(str(tmp_path / "ours"))
    assert [read[number].tolist() for number in range(len(read))] == SEQUENCES
    assert read[0].dtype == np.dtype(dtype)
    assert (tmp_path / "ours.bin").read_bytes() == (tmp_path / "theirs.bin").read_bytes()
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "same.bin"), dtype=np.dtype(dtype).type)
    for sequence in SEQUENCES:
        builder.add_document(torch.tensor(sequence), [len(sequence)])
    builder.finalize(str(tmp_path / "same.idx"))
    assert (tmp_path / "ours.idx").read_bytes() == (tmp_path / "same.idx").read_bytes()
