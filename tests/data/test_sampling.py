"""The order of samples: a bijection in every epoch, and a function of (seed, phase, index) only."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_lite.data.open_data import split_documents
from megatron_lite.data.sampling import (
    PHASES,
    SampleOrder,
    StreamSampler,
    mix,
    permute,
    permute_within,
    random_tokens,
    sampler_key,
)

SIZES = [*range(1, 40), 63, 64, 65, 99, 100, 101, 1023, 1024, 1025, 4099]


def permutation(size: int, key: int) -> list[int]:
    slots = np.arange(size, dtype=np.uint64)
    return permute(slots, np.full(size, key, dtype=np.uint64), size).tolist()


def starts_of(sampler: StreamSampler, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    return sampler.places(indices)[1]


def test_permutation_is_a_bijection() -> None:
    """For every size and key each slot comes exactly once."""
    for size, key in itertools.product(SIZES, (0, 1, 2**64 - 1, 0x123456789ABCDEF)):
        assert sorted(permutation(size, key)) == list(range(size)), (size, key)


@pytest.mark.parametrize("size", [2**31 + 11, 10**12 + 39, 2**40])
def test_permutation_of_huge_ranges_has_no_collisions(size: int) -> None:
    """At sizes that no table could hold, distinct slots stay distinct and within the range."""
    slots = np.concatenate([np.arange(5000), size - 1 - np.arange(5000)]).astype(np.uint64)
    result = permute(slots, np.full(len(slots), 77, dtype=np.uint64), size)
    assert len(np.unique(result)) == len(slots) and int(result.max()) < size
    assert abs(float(result.astype(np.float64).mean()) / size - 0.5) < 0.02


def test_permutations_are_spread_evenly() -> None:
    """Over many keys every one of the 24 orders of four slots is about as frequent (chi-square, 23
    degrees)."""
    keys = mix(np.arange(24000, dtype=np.uint64))
    slots = np.tile(np.arange(4, dtype=np.uint64), (len(keys), 1))
    orders = permute(slots.reshape(-1), np.repeat(keys, 4), 4).reshape(-1, 4).astype(np.int64)
    counts = np.unique(orders @ np.array([64, 16, 4, 1]), return_counts=True)[1]
    assert len(counts) == 24 and ((counts - 1000) ** 2 / 1000).sum() < 60  # the 99.99 % point is 56


def test_neighbours_are_torn_apart() -> None:
    """Consecutive indices land at unrelated slots: no more neighbours stay together than by
    chance."""
    order = np.array(permutation(10007, 5))
    assert (np.abs(np.diff(order)) == 1).sum() < 15  # 2 expected
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05


FROZEN = {
    SampleOrder("full", epochs=3): [530, 862, 450, 107, 492, 702, 227, 787],
    SampleOrder("skip_first_epoch"): [0, 10, 20, 30, 990, 277, 182, 96],
    SampleOrder("epoch", era=16): [50, 120, 90, 150, 960, 157, 562, 66],
    SampleOrder("none"): [0, 10, 20, 30, 990, 7, 502, 6],
}
ORDERS = [
    *(SampleOrder(shuffle, epochs=3) for shuffle in ("epoch", "full", "skip_first_epoch", "none")),
    *(
        SampleOrder(shuffle, era=era)
        for shuffle in ("epoch", "skip_first_epoch")
        for era in (1, 2, 7, 10**9)
    ),
]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_order_visits_every_slot_of_an_epoch_once(order: SampleOrder) -> None:
    """In each epoch, or in each three of `full`, the samples tile the stream, and the order is that
    of its name."""
    for num_tokens, length in ((33, 32), (34, 32), (64, 32), (65, 32), (1000, 7), (1001, 1)):
        check_tiling(order, num_tokens, length)


def check_tiling(order: SampleOrder, num_tokens: int, length: int) -> None:
    sampler = StreamSampler(num_tokens, length, 9, order)
    size, together = sampler.samples_per_epoch, 3 if order.shuffle == "full" else 1
    assert size == (num_tokens - 1) // length
    for first in range(0, 6, together):
        epochs, starts = sampler.places(np.arange(first * size, (first + together) * size))
        assert epochs.min() >= 0 and set(epochs.tolist()) == set(range(first, first + together))
        for epoch in range(first, first + together):
            own = starts[epochs == epoch]
            assert len(own) == size and (np.diff(np.sort(own)) == length).all()
            assert 0 <= own.min() and own.max() + length + 1 <= num_tokens
            in_order = order.shuffle == "none" or (
                order.shuffle == "skip_first_epoch" and epoch == 0
            )
            if in_order:
                assert (np.diff(own) == length).all() and (epoch > 0 or own[0] == 0)
            elif size > 20 and order.era != 1:
                assert (np.diff(own) != length).any()
    if order.shuffle == "full" and size > 20:
        # not one epoch after the other
        assert len(set(sampler.places(np.arange(size))[0].tolist())) == 3


def test_windows_stay_in_their_place() -> None:
    """A permutation within windows is a bijection that leaves every slot in its window, each one in
    its own way."""
    for size, window in itertools.product((1, 2, 10, 11, 99), (1, 2, 5, 10, 11, 12, 100)):
        slots = np.arange(size, dtype=np.uint64)
        found = permute_within(slots, np.full(size, 5, dtype=np.uint64), size, window).astype(
            np.int64
        )
        assert sorted(found.tolist()) == list(range(size)), (size, window)
        assert (found // window == np.arange(size) // window).all(), (size, window)
        if size == 99 and window == 10:
            assert (
                len(
                    {
                        tuple((found[first : first + 10] - first).tolist())
                        for first in range(0, 90, 10)
                    }
                )
                == 9
            )


def test_left_over_tokens_are_used_in_other_epochs() -> None:
    """The shift of the epochs reaches both ends of the stream."""
    sampler = StreamSampler(100, 8, key=4)  # 12 samples and 3 tokens left over
    starts = starts_of(sampler, np.arange(12 * 50))
    assert starts.min() == 0 and starts.max() + 9 == 100
    assert len(set((starts % 8).tolist())) == 4


def test_order_depends_on_nothing_but_seed_phase_and_index() -> None:
    """Asking one by one, in pieces, backwards or for more gives the same samples; epochs, seeds and
    phases differ."""
    sampler = StreamSampler(5000, 16, sampler_key(1, "training", 0))
    whole = starts_of(sampler, np.arange(1000))
    assert [int(starts_of(sampler, np.array([index]))[0]) for index in range(0, 1000, 9)] == whole[
        ::9
    ].tolist()
    assert starts_of(sampler, np.arange(1000)[::-1]).tolist() == whole[::-1].tolist()
    assert starts_of(sampler, np.arange(400, 500)).tolist() == whole[400:500].tolist()
    assert starts_of(sampler, np.arange(10**5))[:1000].tolist() == whole.tolist()
    size = sampler.samples_per_epoch
    assert whole[:size].tolist() != whole[size : 2 * size].tolist()
    for key in (
        sampler_key(2, "training", 0),
        sampler_key(1, "validation", 0),
        sampler_key(1, "training", 1),
    ):
        assert starts_of(StreamSampler(5000, 16, key), np.arange(1000)).tolist() != whole.tolist()


def test_order_is_frozen() -> None:
    """A change of these numbers breaks the resume of existing runs and needs a note in the change
    log."""
    assert sampler_key(1234, "training", 0) == 254862848622153407
    sampler = StreamSampler(1008, 10, sampler_key(1234, "training", 0))
    assert starts_of(sampler, np.array([0, 1, 2, 3, 99, 100, 10**12])).tolist() == [
        72,
        802,
        42,
        52,
        292,
        963,
        184,
    ]
    assert random_tokens(np.array([0, 7]), 4, 1000, key=5).tolist() == [
        [416, 536, 783, 768],
        [478, 362, 643, 813],
    ]
    indices = np.array([0, 1, 2, 3, 99, 100, 250, 10**12])
    found = {
        order: starts_of(StreamSampler(1008, 10, 77, order), indices).tolist() for order in FROZEN
    }
    assert found == FROZEN


def test_resume_is_immediate_at_any_index() -> None:
    """Indices far beyond 2**53 and late epochs work like any others."""
    starts = starts_of(StreamSampler(1000, 10, key=1), np.array([2**62, 2**62 + 1, 2**63 - 1]))
    assert ((0 <= starts) & (starts < 990)).all()


def megatron_split(split: list[float], size: int) -> list[tuple[int, int]]:
    """megatron-core's arithmetic: parse_and_normalize_split, then round(split[i] * size) at both
    ends."""
    weights = np.array(split + [0.0] * (3 - len(split)), dtype=np.float64)
    weights = (weights / np.sum(weights)).tolist()
    ends = [0, weights[0], weights[0] + weights[1], weights[0] + weights[1] + weights[2]]
    return [
        (int(round(ends[i] * float(size))), int(round(ends[i + 1] * float(size)))) for i in range(3)
    ]


@pytest.mark.parametrize(
    "split", [[969.0, 30.0, 1.0], [9998.0, 2.0, 0.0], [1.0], [0.0, 0.0, 3.0], [0.5, 0.5], [1, 1, 1]]
)
def test_split_rounds_as_megatron_does(split: list[float]) -> None:
    """Consecutive ranges of documents that cover everything, with Megatron's boundaries."""
    for size in [*range(0, 120), 999, 1000, 1001, 10**9 + 7]:
        ranges = split_documents(size, split)
        assert ranges == megatron_split(split, size)
        assert len(ranges) == len(PHASES) and ranges[0][0] == 0 and ranges[-1][1] == size
        assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False))


def test_random_tokens_are_uniform_and_pure() -> None:
    """Random tokens are uniform over the vocabulary (chi-square) and a function of (key, index,
    place) only."""
    tokens = random_tokens(np.arange(1000), 100, 50, key=3)
    assert tokens.shape == (1000, 100) and tokens.dtype == np.int64
    counts = np.bincount(tokens.reshape(-1), minlength=50)
    # 49 degrees: the 99.99 % point is 95
    assert len(counts) == 50 and ((counts - 2000) ** 2 / 2000).sum() < 100
    for length, key, same in ((100, 3, True), (60, 3, True), (100, 4, False)):
        assert (
            random_tokens(np.array([17]), length, 50, key)[0] == tokens[17, :length]
        ).all() == same
    assert len(np.unique(tokens, axis=0)) == 1000
