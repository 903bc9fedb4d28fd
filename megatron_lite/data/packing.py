"""--truncate_documents=0: whole documents in samples of a fixed capacity, as many as fit, without cutting any.

Best fit decreasing on the histogram of lengths (Krell et al. 2021, arXiv:2107.02027): documents of one length are
alike, so the longest go first, many at a time, each into the samples that it fills best. The plan is a few thousand
patterns of lengths, however many documents there are, and depends on nothing but their number. An epoch visits the
samples of the plan in a new order, and fills its patterns with other documents of the same lengths.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.sampling import mix, permute

_EPOCH_SALT = np.uint64(0xC6A4A7935BD1E995)  # arbitrary, odd: other words than those of the order of samples


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
            if fitting == len(spaces):  # no sample has room: begin new ones
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

    def __init__(self, sizes: NDArray[np.int32], capacity: int, key: int) -> None:
        """Plan the samples of an epoch.

        sizes: tokens of each document. Those with more than `capacity` tokens are left out.
        """
        self.capacity, self.key, self.num_documents = capacity, key, sizes.size
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

    def documents(self, epoch: int, slot: int) -> list[int]:
        """Return the documents of a slot's sample, in an order of its own: not the longest first in all of them."""
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
