"""Order samples by a pure function of (seed, phase, sample index), with nothing stored and nothing
precomputed.

The documents of a split, in file order, are one stream of tokens. An epoch cuts the stream into
samples of s + 1 tokens that overlap by one (the last label of a sample is the first input of the
next), and visits these slots in a pseudo-random order that a small keyed cipher computes one index
at a time. So any sample of any epoch is found in O(1) time and memory: a resume costs nothing, and
the order cannot depend on the number of iterations, ranks or workers. `SampleOrder` has the other
orders, all computed the same way. Documents, too, may have another order than the file's, also a
function of key and epoch:

Shuffled documents: finding a token of the shuffled stream takes a table of cumulative lengths, one
entry per 16 documents, which each process computes when it first reads from an epoch: 2.5 seconds
and 5 MB for 10 million documents, 60 MB at its peak. A sample then takes less than a millisecond.

Packed documents (--truncate_documents=0): whole documents in samples of a fixed capacity, as many
as fit, without cutting any. Best fit decreasing on the histogram of lengths (Krell et al. 2021,
arXiv:2107.02027): documents of one length are interchangeable, so the longest go first, many at a
time, each into the samples that it fills best. The plan is a few thousand patterns of lengths, for
any number of documents, and depends only on the number of documents per length. An epoch visits the
plan's samples in a new order, and fills its patterns with other documents of the same lengths.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_lite.config.training import ITERATIONS
from megatron_lite.data.blending import Integers
from megatron_lite.data.indexed_dataset import IndexedDataset, Run
from megatron_lite.seeds import derive_seed

Words = NDArray[np.uint64]
SHUFFLES = ("epoch", "full", "skip_first_epoch", "none")
PHASES = tuple(ITERATIONS)
# Every evaluation reads a data set like the validation of a run with these seed, phase and place in
# earlier versions.
EVALUATION = 1234, "validation", 0

# 2**64 / golden ratio, odd: consecutive counters land far apart
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ROUNDS = 8
# For `mix`. Creating a scalar takes as long as adding two short arrays.
_30 = np.uint64(30)
_27 = np.uint64(27)
_31 = np.uint64(31)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
# arbitrary: an epoch's shift must not reuse its permutation's bits
_SHIFT_SALT = np.uint64(0xD1B54A32D192ED03)
# arbitrary, too: for the permutation of all epochs together
_ALL_SALT = np.uint64(0x8CB92BA72F3D8DD7)
STRIDE = 16  # documents per table entry
_AT_A_TIME = 1 << 18  # documents per step while building the table; a multiple of STRIDE
# arbitrary: documents must not be shuffled like samples
_DOCUMENT_SALT = np.uint64(0xA24BAED4963EE407)
# arbitrary, odd: words that differ from the order of samples'
_EPOCH_SALT = np.uint64(0xC6A4A7935BD1E995)


def mix(values: Words) -> Words:
    """Map 64-bit words one to one so that every input bit flips every output bit with probability
    near 1/2.

    Source: the output function of SplitMix64 (Steele, Lea & Flood 2014, constants: Stafford's
    variant 13).
    """
    values = values ^ (values >> _30)
    values = values * _FIRST  # uint64 arrays wrap around silently, as intended
    values = values ^ (values >> _27)
    values = values * _SECOND
    return values ^ (values >> _31)


def permute(slots: Words, keys: Words, size: int) -> Words:
    """Permute range(size) element-wise and pseudo-randomly; each element has its own key.

    slots: (k,) values below `size`; keys: (k,); returns (k,) values below `size`. For one key it is
    a bijection. A Feistel network over pairs (left, right) with right * a + left < a * b, a * b >=
    size and a, b near sqrt(size); results outside of range(size), about one in sqrt(size) at most,
    are encrypted again until they fall inside. Source: Black & Rogaway 2002, "Ciphers with
    arbitrary finite domains": generalised Feistel cipher and cycle walking.
    """
    assert size >= 1 and slots.shape == keys.shape, (size, slots.shape, keys.shape)
    if keys.size and (keys == keys[0]).all():
        keys = keys[:1]  # nearly always: the samples are from one epoch
    schedule = mix(keys + np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None] * _GOLDEN)
    result = _encrypt(slots, schedule, size)
    outside = np.flatnonzero(result >= size)
    while outside.size:
        own = schedule if len(keys) == 1 else schedule[:, outside]
        result[outside] = _encrypt(result[outside], own, size)
        outside = outside[result[outside] >= size]
    return result


def _encrypt(values: Words, schedule: Words, size: int) -> Words:
    """Apply one pass of `permute`'s network: a bijection of range(a * b). schedule: (rounds, k), or
    (rounds, 1)."""
    a = math.isqrt(size - 1) + 1  # ceil(sqrt(size)) for size >= 1
    b = -(-size // a)
    widths = (np.uint64(a), np.uint64(b))
    left, right = values % widths[0], values // widths[0]
    for step, keys in enumerate(schedule):
        width = widths[step % 2]
        left, right = right, (left + mix(right ^ keys) % width) % width
    return right * widths[0] + left  # an even number of rounds: left is below a again


@dataclass(frozen=True)
class SampleOrder:
    """The order of a data set's samples, as a function of index and key."""

    # epoch: reshuffled in every epoch; full: `epochs` epochs together; skip_first_epoch: the first
    # epoch in file order, the others as epoch; none: every epoch in file order.
    shuffle: str = "epoch"
    era: int | None = (
        None  # shuffle only within windows of this size in samples; windows are in file order
    )
    epochs: int = 1

    def __post_init__(self) -> None:
        assert (
            self.shuffle in SHUFFLES and self.epochs >= 1 and (self.era is None or self.era >= 1)
        ), self

    def shuffled(self, epochs: Words) -> NDArray[np.bool_]:
        """Return which of these epochs are not in file order."""
        return (
            (epochs > 0)
            if self.shuffle == "skip_first_epoch"
            else np.full(epochs.shape, self.shuffle != "none")
        )


@dataclass(frozen=True)
class StreamSampler:
    """The start of every sample in a stream of tokens.

    Tokens that do not fill a last sample are not lost: every epoch starts its first sample a little
    later, by a pseudo-random shift between zero and their number, so all tokens are read sooner or
    later. The first epoch starts with the first token if it is in file order.
    """

    num_tokens: int
    sequence_length: int
    key: int
    order: SampleOrder = SampleOrder()

    def __post_init__(self) -> None:
        assert self.num_tokens > self.sequence_length >= 1, (self.num_tokens, self.sequence_length)

    @property
    def samples_per_epoch(self) -> int:
        return (self.num_tokens - 1) // self.sequence_length

    def places(self, indices: Integers) -> tuple[Integers, Integers]:
        """Return each sample's epoch, and its first token's position in that epoch's stream.

        A sample is the s + 1 tokens from there. indices: (k,) sample indices, from zero without
        bound; returns two (k,). Without `shuffle=full` the epoch is index // samples_per_epoch.
        """
        size, order = self.samples_per_epoch, self.order
        if order.shuffle == "full":
            epochs, slots = self._of_all_epochs(indices.astype(np.uint64))
        else:
            epochs, slots = np.divmod(indices.astype(np.uint64), size)
        keys = mix(self.key + epochs * _GOLDEN)
        left_over = (self.num_tokens - 1) % self.sequence_length
        shifts = mix(keys ^ _SHIFT_SALT) % (left_over + 1)
        if order.shuffle != "full":
            shuffled = order.shuffled(epochs)
            shifts[(epochs == 0) & ~shuffled] = 0
            slots[shuffled] = permute_within(
                slots[shuffled], keys[shuffled], size, order.era or size
            )
        return epochs.astype(np.int64), (slots * self.sequence_length + shifts).astype(np.int64)

    def _of_all_epochs(self, indices: Words) -> tuple[Words, Words]:
        """Return epochs and slots of samples shuffled over `order.epochs` epochs at a time."""
        size, together = self.samples_per_epoch, self.order.epochs
        rounds, slots = np.divmod(indices, size * together)
        keys = mix((np.uint64(self.key) ^ _ALL_SALT) + rounds * _GOLDEN)
        epochs, slots = np.divmod(permute(slots, keys, size * together), size)
        return epochs + rounds * together, slots


def permute_within(slots: Words, keys: Words, size: int, window: int) -> Words:
    """Permute range(size) like `permute`, but only within windows of `window` slots; the last may
    be smaller."""
    if window >= size:
        return permute(slots, keys, size)
    windows, places = np.divmod(slots, window)
    keys = mix(keys + (windows + 1) * _GOLDEN)
    last = windows == (size - 1) // window
    for chosen, length in ((~last, window), (last, (size - 1) % window + 1)):
        places[chosen] = permute(places[chosen], keys[chosen], length)
    return windows * window + places


def sampler_key(seed: int, phase: str, position: int) -> int:
    """Return the key for the order in which `phase` reads data set number `position` of a blend."""
    assert phase in PHASES, phase
    return derive_seed("sample order", seed, phase, position)


def sample_words(indices: Integers, length: int, key: int) -> Words:
    """Return pseudo-random words for samples: (k,) indices -> (k, length). Word j is a function of
    (key, index, j)."""
    rows = mix(key + indices.astype(np.uint64) * _GOLDEN)
    return mix(rows[:, None] + np.arange(1, length + 1, dtype=np.uint64)[None, :] * _GOLDEN)


def random_tokens(indices: Integers, length: int, vocab_size: int, key: int) -> Integers:
    """Return random samples, uniform over the vocabulary: (k,) indices -> (k, length).

    Token j of a sample is a pure function of (key, index, j).
    """
    words = sample_words(indices, length, key) >> 32
    # Multiply and shift maps 32 bits onto range(vocab_size); its bias, below vocab_size / 2**32,
    # does not matter here.
    return (words * vocab_size >> 32).astype(np.int64)


class FileOrder:
    """A split's documents as a stream of tokens, in file order.

    by_document: whether to cut runs where documents end, which reads the index.
    """

    def __init__(self, dataset: IndexedDataset, documents: range, by_document: bool) -> None:
        self.dataset = dataset
        self.documents = documents
        self.by_document = by_document
        self._first_token = dataset.first_token(documents.start)
        self.num_tokens = dataset.first_token(documents.stop) - self._first_token

    def runs(self, epoch: int, start: int, length: int) -> list[Run]:
        """Return the places of tokens [start, start + length) of an epoch's stream, in order,
        without empty runs.

        Raises: DataError if the index is damaged or cannot be read.
        """
        first = self._first_token + start
        return self.dataset.runs(first, length) if self.by_document else [(first, length)]


class ShuffledDocuments(FileOrder):
    """A split's documents as a stream of tokens, in a different order in every epoch."""

    def __init__(
        self,
        dataset: IndexedDataset,
        documents: range,
        key: int,
        keep: int = 2,
        skip_first_epoch: bool = False,
    ) -> None:
        """Prepare the order. keep: how many tables to cache, one per epoch. skip_first_epoch: read
        it in file order."""
        super().__init__(dataset, documents, by_document=True)
        self._key = key
        self._keep = keep
        self._skip_first_epoch = skip_first_epoch
        self._tables: dict[int, Integers] = {}

    def runs(self, epoch: int, start: int, length: int) -> list[Run]:
        """Return the runs; see `FileOrder.runs`."""
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
                    found.append(
                        (self.dataset.pointers[document] // itemsize + low - position, high - low)
                    )
                position += size
            entry += 1
        return found

    def _order(self, epoch: int, first: int, count: int) -> Integers:
        """Return documents [first, first + count) in an epoch's order; fewer at the end."""
        slots = np.arange(first, min(first + count, len(self.documents)), dtype=np.uint64)
        # an array, since a product of scalars would warn
        epochs = np.array([epoch], dtype=np.uint64)
        key = mix((np.uint64(self._key) ^ _DOCUMENT_SALT) + epochs * _GOLDEN)
        keys = np.broadcast_to(key, slots.shape)
        return permute(slots, keys, len(self.documents)).astype(np.int64) + self.documents.start

    def _table(self, epoch: int) -> Integers:
        """Return the number of tokens before each STRIDE-th document of an epoch."""
        if epoch not in self._tables:
            while len(self._tables) >= self._keep:
                del self._tables[next(iter(self._tables))]
            sizes = self.dataset.document_sizes(self.documents)
            sums = [np.zeros(1, dtype=np.int64)]
            for first in range(0, len(sizes), _AT_A_TIME):
                order = self._order(epoch, first, _AT_A_TIME) - self.documents.start
                sums.append(
                    np.add.reduceat(sizes[order], np.arange(0, len(order), STRIDE), dtype=np.int64)
                )
            self._tables[epoch] = np.cumsum(np.concatenate(sums))[:-1]
        return self._tables[epoch]


@dataclass(frozen=True)
class Pattern:
    """Samples with documents of the same lengths."""

    lengths: tuple[int, ...]  # longest first
    count: int


def pack(counts: Integers, capacity: int) -> list[Pattern]:
    """Pack documents into samples: best fit, longest first.

    counts: (capacity + 1,) documents per length; those without tokens are skipped.
    """
    assert counts.shape == (capacity + 1,), (counts.shape, capacity)
    groups: dict[
        int, list[tuple[tuple[int, ...], int]]
    ] = {}  # remaining space -> (lengths, samples)
    spaces: list[int] = []  # the keys of `groups` above zero, ascending

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
            # A sample is the best fit until it has no room for another document of this length.
            many = space // length
            full = min(samples, left // many)
            left -= full * many
            last = min(left, many - 1) if samples > full else 0
            left -= last
            add((*lengths, *(length,) * many), full)
            add((*lengths, *(length,) * last), min(last, 1))
            if lengths:
                add(lengths, samples - full - min(last, 1))
    return [
        Pattern(lengths, samples) for space in sorted(groups) for lengths, samples in groups[space]
    ]


class PackedDocuments:
    """The samples of a split's documents, as a pure function of epoch and slot.

    A process stores 4 bytes per document, and needs 1.5 s for the plan of 10 million documents.
    """

    by_document = True

    def __init__(self, dataset: IndexedDataset, documents: range, capacity: int, key: int) -> None:
        """Plan an epoch's samples. Documents with more than `capacity` tokens are skipped."""
        self._dataset, self._first_document = dataset, documents.start
        self.capacity = capacity
        self.key = key
        self.num_documents = len(documents)
        sizes = dataset.document_sizes(documents)
        fits = sizes <= capacity
        self.too_long = int(sizes.size - np.count_nonzero(fits))
        counts = np.bincount(sizes[fits], minlength=capacity + 1)[: capacity + 1]
        self.patterns = pack(counts, capacity)
        self.num_tokens = int((counts * np.arange(capacity + 1)).sum())
        self._by_length = np.argsort(sizes, kind="stable").astype(
            np.int32 if sizes.size < 2**31 else np.int64
        )
        self._first = np.concatenate([[0], np.cumsum(counts)])  # of each length in `_by_length`
        # Slots of each pattern.
        self._ends = np.cumsum([pattern.count for pattern in self.patterns])
        # Documents of each length used by earlier patterns, and by earlier places in this one.
        taken: dict[int, int] = {}
        self._taken: list[tuple[int, ...]] = []
        for pattern in self.patterns:
            before = []
            for length in pattern.lengths:
                before.append(taken.get(length, 0))
                taken[length] = before[-1] + pattern.count
            self._taken.append(tuple(before))
        assert all(taken.get(length, 0) == counts[length] for length in range(1, capacity + 1)), (
            "all are packed"
        )

    @property
    def samples_per_epoch(self) -> int:
        """The number of samples per epoch."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def runs(self, epoch: int, slot: int, length: int) -> list[Run]:
        """Return the places of the documents in a slot's sample; they have at most `length`
        tokens."""
        pointers = self._dataset.pointers
        sizes = self._dataset.sizes
        itemsize = self._dataset.tokens.dtype.itemsize
        documents = [self._first_document + number for number in self.documents(epoch, slot)]
        return [(pointers[document] // itemsize, sizes[document]) for document in documents]

    def documents(self, epoch: int, slot: int) -> list[int]:
        """Return the documents in a slot's sample in a random order, so that the longest is not
        always first.

        Documents are numbered from the split's first.
        """
        assert 0 <= slot < self.samples_per_epoch, (slot, self.samples_per_epoch)
        number = int(np.searchsorted(self._ends, slot, side="right"))
        pattern = self.patterns[number]
        place = slot - (int(self._ends[number]) - self.patterns[number].count)
        found = []
        for length, before in zip(pattern.lengths, self._taken[number], strict=True):
            first = int(self._first[length])
            count = int(self._first[length + 1] - self._first[length])
            rank = permute(
                np.array([before + place], np.uint64), self._mixed(epoch, np.array([length])), count
            )
            found.append(int(self._by_length[first + int(rank[0])]))
        order = np.argsort(self._mixed(epoch, self.capacity + 1 + np.array(found)))
        return [found[index] for index in order]

    def _mixed(self, epoch: int, values: Integers) -> Words:
        """Return pseudo-random words from key, epoch and values."""
        start = mix(np.array([self.key], np.uint64) + np.array([epoch], np.uint64) * _EPOCH_SALT)
        return mix(start + values.astype(np.uint64))


DocumentOrder = FileOrder | PackedDocuments
