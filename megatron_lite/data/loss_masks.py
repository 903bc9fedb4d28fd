"""Loss masks: a second `.bin/.idx` pair beside a data set, with 1 for each token that counts in the loss, else 0.

Both pairs have the same documents, so a token and its mask have the same position in their files.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.disk_array import DiskArray
from megatron_lite.data.indexed_dataset import CHUNK, IndexedDataset
from megatron_lite.errors import DataError

NO_MASK = "none"  # in --loss_mask: every token of that data set counts


def open_masks(prefixes: Sequence[str], datasets: Sequence[IndexedDataset]) -> list[IndexedDataset | None]:
    """Open the masks of data sets; without prefixes, none has a mask.

    Raises:
        DataError: one line that names the file, if a mask is damaged or has other documents than its data set.
    """
    assert len(prefixes) in (0, len(datasets)), "checked by validation"
    opened: dict[str, IndexedDataset] = {}
    masks: list[IndexedDataset | None] = [None] * len(datasets)
    for number, prefix in enumerate(prefixes):
        if prefix != NO_MASK:
            masks[number] = opened[prefix] = opened.get(prefix) or IndexedDataset(prefix)
            _check_same_documents(opened[prefix], datasets[number])
    return masks


def _check_same_documents(mask: IndexedDataset, dataset: IndexedDataset) -> None:
    """Compare the sizes of all documents, 4 bytes each: 10 million take 0.05 s."""
    given = f"{mask.index_path} (--loss_mask)"
    if mask.num_documents != dataset.num_documents:
        raise DataError(
            f"{given}: {mask.num_documents:,} documents, but {dataset.index_path} has {dataset.num_documents:,}; a "
            "mask has the same documents"
        )
    for start in range(0, mask.num_documents, CHUNK):
        count = min(CHUNK, mask.num_documents - start)
        own, expected = mask.sizes.read(start, count), dataset.sizes.read(start, count)
        if differing := np.flatnonzero(own != expected)[:1].tolist():
            raise DataError(
                f"{given}: document {start + differing[0]} has {own[differing[0]]:,} entries, but "
                f"{expected[differing[0]]:,} tokens in {dataset.index_path}; a mask has an entry for each token"
            )


def masked_labels(mask: DiskArray, start: int, count: int) -> NDArray[np.bool_]:
    """Return whether each of tokens [start, start + count) is left out of the loss, (count,).

    Raises: DataError if the mask cannot be read any more, or holds something else than 0 and 1.
    """
    entries = mask.read(start, count)
    if wrong := np.flatnonzero((entries != 0) & (entries != 1))[:1].tolist():
        raise DataError(
            f"{mask.path} (--loss_mask): entry {start + wrong[0]:,} is {entries[wrong[0]]}; 1 lets a token count in "
            "the loss, 0 leaves it out"
        )
    counts: NDArray[np.bool_] = entries == 0
    return counts
