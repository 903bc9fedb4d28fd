"""Data sets for tests."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron_lite.data.indexed_dataset import IndexedDatasetWriter


def write_dataset(prefix: Path | str, documents: Iterable[np.ndarray | Sequence[int]], dtype: str = "<u2") -> None:
    """Write `prefix`.bin and `prefix`.idx with these documents."""
    with IndexedDatasetWriter(str(prefix), dtype) as writer:
        for document in documents:
            writer.add_document(np.asarray(document))
