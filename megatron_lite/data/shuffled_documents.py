"""Documents reshuffled in every epoch: where in the file the tokens of a sample are.

The order is a function of the key and the epoch, computed one document at a time like the order of samples. Finding a
token of the shuffled stream takes a table of cumulative lengths, one entry per 16 documents, which each process makes
when it first reads from an epoch: 2.5 seconds and 5 MB for 10 million documents, 60 MB at its peak. A sample then takes
less than a millisecond.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.sampling import mix, permute

STRIDE = 16  # documents to an entry of the table
_AT_A_TIME = 1 << 18  # documents while the table is made; a multiple of STRIDE
_SALT = np.uint64(0xA24BAED4963EE407)  # arbitrary: documents must not be shuffled like samples
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Run = tuple[int, int]  # first token in the file, and number of tokens, all of one document


class ShuffledDocuments:
    """The documents of a split as a stream of tokens, in a different order in every epoch."""

    def __init__(self, dataset: IndexedDataset, documents: range, key: int, keep: int = 2) -> None:
        """keep: how many tables to remember, one per epoch."""
        self._dataset, self._documents, self._key, self._keep = dataset, documents, key, keep
        self._tables: dict[int, NDArray[np.int64]] = {}

    def runs(self, epoch: int, start: int, length: int) -> list[Run]:
        """Return where tokens [start, start + length) of an epoch's stream are, in order, without empty runs.

        Raises: DataError if the index is damaged or cannot be read.
        """
        table, itemsize = self._table(epoch), self._dataset.tokens.dtype.itemsize
        entry = int(np.searchsorted(table, start, side="right")) - 1
        position, found = int(table[entry]), list[Run]()
        end = start + length
        while position < end:
            for document in self._order(epoch, entry * STRIDE, STRIDE).tolist():
                size = self._dataset.sizes[document]
                low, high = max(start, position), min(end, position + size)
                if low < high:
                    found.append((self._dataset.pointers[document] // itemsize + low - position, high - low))
                position += size
            entry += 1
        return found

    def _order(self, epoch: int, first: int, count: int) -> NDArray[np.int64]:
        """Return documents [first, first + count) of an epoch's order; fewer at the end."""
        slots = np.arange(first, min(first + count, len(self._documents)), dtype=np.uint64)
        epochs = np.array([epoch], dtype=np.uint64)  # an array, since a product of scalars would warn
        key = mix((np.uint64(self._key) ^ _SALT) + epochs * _GOLDEN)
        keys = np.broadcast_to(key, slots.shape)
        return permute(slots, keys, len(self._documents)).astype(np.int64) + self._documents.start

    def _table(self, epoch: int) -> NDArray[np.int64]:
        """Return the tokens before each STRIDE-th document of an epoch."""
        if epoch not in self._tables:
            while len(self._tables) >= self._keep:
                del self._tables[next(iter(self._tables))]
            sizes = self._dataset.document_sizes(self._documents)
            sums = [np.zeros(1, dtype=np.int64)]
            for first in range(0, len(sizes), _AT_A_TIME):
                order = self._order(epoch, first, _AT_A_TIME) - self._documents.start
                sums.append(np.add.reduceat(sizes[order], np.arange(0, len(order), STRIDE), dtype=np.int64))
            self._tables[epoch] = np.cumsum(np.concatenate(sums))[:-1]
        return self._tables[epoch]
