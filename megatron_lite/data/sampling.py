"""The order of samples: a pure function of (seed, phase, sample index), with nothing stored and nothing precomputed.

The documents of a split, in file order, are one stream of tokens. An epoch cuts the stream into samples of s + 1 tokens
that overlap by one (the last label of a sample is the first input of the next), and visits these slots in a
pseudo-random order that a small keyed cipher computes one index at a time. So any sample of any epoch is found in O(1)
time and memory: a resume costs nothing, and the order cannot depend on the number of iterations, ranks or workers.
`SampleOrder` has the other orders, all found in the same way; `document_orders.py` shuffles the documents, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_lite.seeds import derive_seed

SHUFFLES = ("epoch", "full", "skip_first_epoch", "none")
PHASES = ("training", "validation", "test")  # in the order of --split

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: consecutive counters land far apart
_ROUNDS = 8
# Of `mix`. Making a scalar takes as long as adding two short arrays.
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFT_SALT = np.uint64(0xD1B54A32D192ED03)  # arbitrary: an epoch's shift must not reuse the bits of its permutation
_ALL_SALT = np.uint64(0x8CB92BA72F3D8DD7)  # arbitrary, too: of the permutation of all epochs together


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit words in which every input bit flips every output bit with probability near 1/2.

    Source: the output function of SplitMix64 (Steele, Lea & Flood 2014, constants: Stafford's variant 13).
    """
    values = values ^ (values >> _30)
    values = values * _FIRST  # uint64 arrays wrap around silently, as intended
    values = values ^ (values >> _27)
    values = values * _SECOND
    return values ^ (values >> _31)


def permute(slots: NDArray[np.uint64], keys: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """Element-wise pseudo-random permutation of range(size); each element has its own key.

    slots: (k,) values below `size`; keys: (k,); returns (k,) values below `size`. For one key it is a bijection.
    A Feistel network over pairs (left, right) with right * a + left < a * b, a * b >= size and a, b near sqrt(size);
    results outside of range(size), about one in sqrt(size) at most, are encrypted again until they fall inside.
    Source: Black & Rogaway 2002, "Ciphers with arbitrary finite domains": generalised Feistel cipher and cycle walking.
    """
    assert size >= 1 and slots.shape == keys.shape, (size, slots.shape, keys.shape)
    if keys.size and (keys == keys[0]).all():
        keys = keys[:1]  # nearly always: the samples are of one epoch
    schedule = mix(keys + np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None] * _GOLDEN)
    result = _encrypt(slots, schedule, size)
    outside = np.flatnonzero(result >= size)
    while outside.size:
        own = schedule if len(keys) == 1 else schedule[:, outside]
        result[outside] = _encrypt(result[outside], own, size)
        outside = outside[result[outside] >= size]
    return result


def _encrypt(values: NDArray[np.uint64], schedule: NDArray[np.uint64], size: int) -> NDArray[np.uint64]:
    """One pass of the network of `permute`: a bijection of range(a * b). schedule: (rounds, k), or (rounds, 1)."""
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
    """The order of the samples of a data set, as a function of the index and a key."""

    # epoch: reshuffled in every epoch; full: `epochs` epochs together; skip_first_epoch: the first epoch in file
    # order, the others as epoch; none: every epoch in file order.
    shuffle: str = "epoch"
    era: int | None = None  # shuffle only within windows of so many samples, which come in file order
    epochs: int = 1

    def __post_init__(self) -> None:
        assert self.shuffle in SHUFFLES and self.epochs >= 1 and (self.era is None or self.era >= 1), self

    def shuffled(self, epochs: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of these epochs are not in file order."""
        return (epochs > 0) if self.shuffle == "skip_first_epoch" else np.full(epochs.shape, self.shuffle != "none")


@dataclass(frozen=True)
class StreamSampler:
    """Start of every sample in a stream of tokens.

    The tokens that do not fill a last sample are not lost: every epoch starts its first sample a little later, by a
    pseudo-random shift between zero and their number, so all tokens are read sooner or later. The first epoch starts
    with the first token if it is in file order.
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

    def places(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the epoch of each sample, and the position of its first token in the stream of that epoch.

        A sample is the s + 1 tokens from there. indices: (k,) sample indices, from zero without bound; returns two
        (k,). Without `shuffle=full` the epoch is index // samples_per_epoch.
        """
        size, order = self.samples_per_epoch, self.order
        if order.shuffle == "full":
            epochs, slots = self._of_all_epochs(indices.astype(np.uint64))
        else:
            epochs, slots = np.divmod(indices.astype(np.uint64), np.uint64(size))
        keys = mix(np.uint64(self.key) + epochs * _GOLDEN)
        left_over = (self.num_tokens - 1) % self.sequence_length
        shifts = mix(keys ^ _SHIFT_SALT) % np.uint64(left_over + 1)
        if order.shuffle != "full":
            shuffled = order.shuffled(epochs)
            shifts[(epochs == 0) & ~shuffled] = 0
            slots[shuffled] = permute_within(slots[shuffled], keys[shuffled], size, order.era or size)
        return epochs.astype(np.int64), (slots * np.uint64(self.sequence_length) + shifts).astype(np.int64)

    def _of_all_epochs(self, indices: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return epochs and slots of samples that are shuffled over `order.epochs` epochs at a time."""
        size, together = self.samples_per_epoch, self.order.epochs
        rounds, slots = np.divmod(indices, np.uint64(size * together))
        keys = mix((np.uint64(self.key) ^ _ALL_SALT) + rounds * _GOLDEN)
        epochs, slots = np.divmod(permute(slots, keys, size * together), np.uint64(size))
        return epochs + rounds * np.uint64(together), slots


def permute_within(slots: NDArray[np.uint64], keys: NDArray[np.uint64], size: int, window: int) -> NDArray[np.uint64]:
    """Permute range(size) as `permute`, but only within windows of `window` slots; the last one may be smaller."""
    if window >= size:
        return permute(slots, keys, size)
    windows, places = np.divmod(slots, np.uint64(window))
    keys = mix(keys + (windows + np.uint64(1)) * _GOLDEN)
    last = windows == np.uint64((size - 1) // window)
    for chosen, length in ((~last, window), (last, (size - 1) % window + 1)):
        places[chosen] = permute(places[chosen], keys[chosen], length)
    return windows * np.uint64(window) + places


def sampler_key(seed: int, phase: str, position: int) -> int:
    """Return the key of the order in which `phase` reads data set number `position` of a blend."""
    assert phase in PHASES, phase
    return derive_seed("sample order", seed, phase, position)


def sample_words(indices: NDArray[np.int64], length: int, key: int) -> NDArray[np.uint64]:
    """Return pseudo-random words for samples: (k,) indices -> (k, length). Word j is a function of (key, index, j)."""
    rows = mix(np.uint64(key) + indices.astype(np.uint64) * _GOLDEN)
    return mix(rows[:, None] + np.arange(1, length + 1, dtype=np.uint64)[None, :] * _GOLDEN)


def random_tokens(indices: NDArray[np.int64], length: int, vocab_size: int, key: int) -> NDArray[np.int64]:
    """Make up samples, uniform over the vocabulary: (k,) indices -> (k, length).

    Token j of a sample is a pure function of (key, index, j).
    """
    words = sample_words(indices, length, key) >> np.uint64(32)
    # Multiply and shift maps 32 bits onto range(vocab_size); its bias, below vocab_size / 2**32, does not matter here.
    return ((words * np.uint64(vocab_size)) >> np.uint64(32)).astype(np.int64)
