"""Blends: the data set of a sample as a pure function of its index.

The data sets are the leaves of a binary tree whose nodes split their weight about evenly. At a node whose left side has
share p of the weight, round(p * i) of the first i samples go left and the others go right: sample i goes left if this
count increases, and its index on its side is the count before it. A walk down from the root costs O(depth), needs no
table, and keeps the proportions in every prefix of the run, not only at its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_BITS = 32  # of fixed-point shares and of sample indices, whose product then fits into 64
MAX_SAMPLES = 2**_BITS - 2


class Blend:
    """A weighted mix of data sets: the data set of every sample, and the index in it.

    Error bound: a data set of normalised weight w gets w * i of the first i samples, give or take
    `max_error(i)` = 2.5 + 5 * i / 2**33, for any number of data sets. The error of a child is at most its share times
    the error of its node, plus c = 1/2 + i / 2**33 for rounding (the second term from the 32 bits of the share).
    `_build` gives every child that is not a leaf a share of at most 3/4, so the errors of inner nodes stay below
    c / (1 - 3/4) = 4 c, and those of leaves, which may have any share, below 5 c.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """weights: one non-negative finite number per data set, with a positive sum, not normalised."""
        assert len(weights) and min(weights) >= 0 and 0 < sum(weights) < float("inf"), weights
        self.num_datasets = len(weights)
        self.weights = tuple(weight / sum(weights) for weight in weights)
        self._shares: list[int] = []  # per inner node: weight of its left side / its weight, times 2**32
        self._children: list[tuple[int, int]] = []  # per inner node: (left, right); -1 - d stands for data set d
        # Heaviest first, as the error bound requires.
        order = sorted(range(len(weights)), key=lambda dataset: (-weights[dataset], dataset))
        self._root = self._build(order)
        self._share_table = np.array(self._shares, dtype=np.uint64)
        self._child_table = np.array(self._children, dtype=np.int64).reshape(-1, 2)

    def _build(self, datasets: list[int]) -> int:
        """Build the subtree of `datasets` (sorted by falling weight) and return its node."""
        if len(datasets) == 1:
            return -1 - datasets[0]
        weights = [self.weights[dataset] for dataset in datasets]
        total = sum(weights)
        running, cut = weights[0], 1
        while cut < len(datasets) - 1 and running + weights[cut] <= total / 2:
            running, cut = running + weights[cut], cut + 1
        share = running / total if total > 0 else 1.0
        node = len(self._shares)
        self._shares.append(round(share * 2**_BITS))
        self._children.append((0, 0))
        self._children[node] = (self._build(datasets[:cut]), self._build(datasets[cut:]))
        return node

    def max_error(self, num_samples: int) -> float:
        """Bound the distance of a data set's count from weight * num_samples, in samples."""
        return 2.5 + 5 * num_samples / 2 ** (_BITS + 1)

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the data set of each sample, and the sample's index in it, which runs 0, 1, 2, ... per data set.

        indices: (k,) below MAX_SAMPLES; returns two arrays (k,).
        """
        assert not indices.size or 0 <= indices.min() <= indices.max() < MAX_SAMPLES, indices
        position = indices.astype(np.uint64)
        node = np.full(indices.shape, self._root, dtype=np.int64)
        inner = np.flatnonzero(node >= 0)
        while inner.size:
            here, at = node[inner], position[inner]
            share = self._share_table[here]
            before, after = _left_count(share, at), _left_count(share, at + np.uint64(1))
            goes_left = after > before
            position[inner] = np.where(goes_left, before, at - before)
            node[inner] = self._child_table[here, np.where(goes_left, 0, 1)]
            inner = inner[node[inner] >= 0]
        return -1 - node, position.astype(np.int64)


class Concatenation:
    """Data sets one after the other: each sample once, whatever the weights."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: samples of each data set."""
        self.num_datasets = len(sizes)
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._starts = self._ends - np.array(sizes, dtype=np.int64)

    @property
    def num_samples(self) -> int:
        return int(self._ends[-1])

    def locate(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the data set of each sample, and the sample's index in it: (k,) below `num_samples` -> two (k,)."""
        assert not indices.size or 0 <= indices.min() <= indices.max() < self.num_samples, indices
        datasets = np.searchsorted(self._ends, indices, side="right")
        return datasets, indices - self._starts[datasets]


def _left_count(share: NDArray[np.uint64], count: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return how many of the first `count` samples of a node go left: round(share * count / 2**32)."""
    return (share * count + np.uint64(2 ** (_BITS - 1))) >> np.uint64(_BITS)
