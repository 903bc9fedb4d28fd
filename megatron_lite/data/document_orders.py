"""The order of documents: as in the file, reshuffled in every epoch, or packed whole into samples.

Each order is a function of the key and the epoch, as the order of samples is.

Shuffled documents: finding a token of the shuffled stream takes a table of cumulative lengths, one entry per 16
documents, which each process makes when it first reads from an epoch: 2.5 seconds and 5 MB for 10 million documents,
60 MB at its peak. A sample then takes less than a millisecond.

Packed documents (--truncate_documents=0): whole documents in samples of a fixed capacity, as many as fit, without
cutting any. Best fit decreasing on the histogram of lengths (Krell et al. 2021, arXiv:2107.02027): documents of one
length are alike, so the longest go first, many at a time, each into the samples that it fills best. The plan is a few
thousand patterns of lengths, however many documents there are, and depends on nothing but their number. An epoch visits
the samples of the plan in a new order, and fills its patterns with other documents of the same lengths.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.indexed_dataset import IndexedDataset, Run
from megatron_lite.data.sampling import mix, permute

STRIDE = 16  # documents to an entry of the table
_AT_A_TIME = 1 << 18  # documents while the table is made; a multiple of STRIDE
_SALT = np.uint64(0xA24BAED4963EE407)  # arbitrary: documents must not be shuffled like samples
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_EPOCH_SALT = np.uint64(0xC6A4A7935BD1E995)  # arbitrary, odd: other words than those of the order of samples


class FileOrder:
    """The documents of a split as a stream of tokens, in the order of the file.

    by_document: whether to cut runs where documents end, which reads the index.
    """

    def __init__(self, dataset: IndexedDataset, documents: range, by_document: bool = False) -> None:
        self.dataset, self.documents, self.by_document = dataset, documents, by_document
        self._first_token = dataset.first_token(documents.start)
        self.num_tokens = dataset.first_token(documents.stop) - self._first_token

    def runs(self, epoch: int, start: int, length: int) -> list[Run]:
        """Return where tokens [start, start + length) of an epoch's stream are, in order, without empty runs.

        Raises: DataError if the index is damaged or cannot be read.
        """
        first = self._first_token + start
        return self.dataset.runs(first, length) if self.by_document else [(first, length)]


class ShuffledDocuments(FileOrder):
    """The documents of a split as a stream of tokens, in a different order in every epoch."""

    def __init__(
        self, dataset: IndexedDataset, documents: range, key: int, keep: int = 2, skip_first_epoch: bool = False
    ) -> None:
        """keep: how many tables to remember, one per epoch. skip_first_epoch: read it in the order of the file."""
        super().__init__(dataset, documents, by_document=True)
        self._key, self._keep, self._skip_first_epoch = key, keep, skip_first_epoch
        self._tables: dict[int, NDArray[np.int64]] = {}

    def runs(self, epoch: int, start: int, length: int) -> list[Run]:
        """Return the runs as `FileOrder.runs`."""
        if self._skip_first_epoch and epoch == 0:
            return super().runs(epoch, start, length)
        table, itemsize = self._table(epoch), self.dataset.tokens.dtype.itemsize
        entry = int(np.searchsorted(table, start, side="right")) - 1
        position, found = int(table[entry]), list[Run]()
        end = start + length
        while position < end:
            for document in self._order(epoch, entry * STRIDE, STRIDE).tolist():
                size = self.dataset.sizes[document]
                low, high = max(start, position), min(end, position + size)
                if low < high:
                    found.append((self.dataset.pointers[document] // itemsize + low - position, high - low))
                position += size
            entry += 1
        return found

    def _order(self, epoch: int, first: int, count: int) -> NDArray[np.int64]:
        """Return documents [first, first + count) of an epoch's order; fewer at the end."""
        slots = np.arange(first, min(first + count, len(self.documents)), dtype=np.uint64)
        epochs = np.array([epoch], dtype=np.uint64)  # an array, since a product of scalars would warn
        key = mix((np.uint64(self._key) ^ _SALT) + epochs * _GOLDEN)
        keys = np.broadcast_to(key, slots.shape)
        return permute(slots, keys, len(self.documents)).astype(np.int64) + self.documents.start

    def _table(self, epoch: int) -> NDArray[np.int64]:
        """Return the tokens before each STRIDE-th document of an epoch."""
        if epoch not in self._tables:
            while len(self._tables) >= self._keep:
                del self._tables[next(iter(self._tables))]
            sizes = self.dataset.document_sizes(self.documents)
            sums = [np.zeros(1, dtype=np.int64)]
            for first in range(0, len(sizes), _AT_A_TIME):
                order = self._order(epoch, first, _AT_A_TIME) - self.documents.start
                sums.append(np.add.reduceat(sizes[order], np.arange(0, len(order), STRIDE), dtype=np.int64))
            self._tables[epoch] = np.cumsum(np.concatenate(sums))[:-1]
        return self._tables[epoch]


@dataclass(frozen=True)
class Pattern:
    """Samples that hold documents of the same lengths."""

    lengths: tuple[int, ...]  # the longest first
    count: int


def pack(counts: NDArray[np.int64], capacity: int) -> list[Pattern]:
    """Pack documents into samples: best fit, the longest first.

    counts: (capacity + 1,) documents of each length; those without tokens are left out.
    """
    assert counts.shape == (capacity + 1,), (counts.shape, capacity)
    groups: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # space that is left -> (lengths, samples)
    spaces: list[int] = []  # the keys of `groups` above zero, rising

    def add(lengths: tuple[int, ...], samples: int) -> None:
        if not samples:
            return
        space = capacity - sum(lengths)
        if space not in groups:
            groups[space] = []
            if space:
                bisect.insort(spaces, space)
        groups[space].append((lengths, samples))

    for length in range(capacity, 0, -1):
        left = int(counts[length])
        while left:
            fitting = bisect.bisect_left(spaces, length)
            if fitting == len(spaces):  # no sample has room: start new ones
                space, samples = capacity, left
                lengths: tuple[int, ...] = ()
            else:
                space = spaces[fitting]
                lengths, samples = groups[space].pop()
                if not groups[space]:
                    del groups[space], spaces[fitting]
            many = space // length  # a sample is the best fit until it has no room for another document of this length
            full = min(samples, left // many)
            left -= full * many
            last = min(left, many - 1) if samples > full else 0
            left -= last
            add((*lengths, *(length,) * many), full)
            add((*lengths, *(length,) * last), min(last, 1))
            if lengths:
                add(lengths, samples - full - min(last, 1))
    return [Pattern(lengths, samples) for space in sorted(groups) for lengths, samples in groups[space]]


class PackedDocuments:
    """The samples of the documents of a split, as a pure function of epoch and slot.

    A process holds 4 bytes per document, and needs 1.5 s for the plan of 10 million documents.
    """

    by_document = True

    def __init__(self, dataset: IndexedDataset, documents: range, capacity: int, key: int) -> None:
        """Plan the samples of an epoch. Documents with more than `capacity` tokens are left out."""
        self._dataset, self._first_document = dataset, documents.start
        self.capacity, self.key, self.num_documents = capacity, key, len(documents)
        sizes = dataset.document_sizes(documents)
        fits = sizes <= capacity
        self.too_long = int(sizes.size - np.count_nonzero(fits))
        counts = np.bincount(sizes[fits], minlength=capacity + 1)[: capacity + 1]
        self.patterns = pack(counts, capacity)
        self.num_tokens = int((counts * np.arange(capacity + 1)).sum())
        self._by_length = np.argsort(sizes, kind="stable").astype(np.int32 if sizes.size < 2**31 else np.int64)
        self._first = np.concatenate([[0], np.cumsum(counts)])  # of each length in `_by_length`
        self._ends = np.cumsum([pattern.count for pattern in self.patterns])  # slots of each pattern
        # Documents of each length that earlier patterns, and earlier places in this one, have taken.
        taken: dict[int, int] = {}
        self._taken: list[tuple[int, ...]] = []
        for pattern in self.patterns:
            before = []
            for length in pattern.lengths:
                before.append(taken.get(length, 0))
                taken[length] = before[-1] + pattern.count
            self._taken.append(tuple(before))
        assert all(taken.get(length, 0) == counts[length] for length in range(1, capacity + 1)), "all are packed"

    @property
    def samples_per_epoch(self) -> int:
        """The number of samples of an epoch."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def runs(self, epoch: int, slot: int, length: int) -> list[Run]:
        """Return where the documents of a slot's sample are; they have `length` tokens or fewer."""
        pointers, sizes, itemsize = self._dataset.pointers, self._dataset.sizes, self._dataset.tokens.dtype.itemsize
        documents = [self._first_document + number for number in self.documents(epoch, slot)]
        return [(pointers[document] // itemsize, sizes[document]) for document in documents]

    def documents(self, epoch: int, slot: int) -> list[int]:
        """Return the documents of a slot's sample in a random order, so that the longest is not always first.

        Documents are numbered from the first of the split.
        """
        assert 0 <= slot < self.samples_per_epoch, (slot, self.samples_per_epoch)
        number = int(np.searchsorted(self._ends, slot, side="right"))
        pattern, place = self.patterns[number], slot - (int(self._ends[number]) - self.patterns[number].count)
        found = []
        for length, before in zip(pattern.lengths, self._taken[number], strict=True):
            first, count = int(self._first[length]), int(self._first[length + 1] - self._first[length])
            rank = permute(np.array([before + place], np.uint64), self._mixed(epoch, np.array([length])), count)
            found.append(int(self._by_length[first + int(rank[0])]))
        order = np.argsort(self._mixed(epoch, self.capacity + 1 + np.array(found)))
        return [found[index] for index in order]

    def _mixed(self, epoch: int, values: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return pseudo-random words that depend on key, epoch and values."""
        start = mix(np.array([self.key], np.uint64) + np.array([epoch], np.uint64) * _EPOCH_SALT)
        return mix(start + values.astype(np.uint64))


DocumentOrder = FileOrder | PackedDocuments
