"""Blend data sets: the data set of a sample is a pure function of the sample's index.

The data sets are the leaves of a binary tree whose nodes split their weight about evenly. At a node
whose left side has share p of the weight, round(p * i) of the first i samples go left and the
others go right: sample i goes left if this count increases, and its index on its side is the count
before it. A walk down from the root costs O(depth), needs no table, and keeps the proportions in
every prefix of the run, not only at its end.

Weights may change at given samples. The left side's share of i samples is then not p * i but a line
with a bend at each change: it bends where the node's own samples reach the change if all
proportions are exact. A later change does not affect the samples before it, except for the last few
samples of a data set.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_BITS = 32  # of fixed-point shares and of sample indices, whose product then fits into 64
MAX_SAMPLES = 2**_BITS - 2
_NEVER = 2**64 - 1  # start of an absent segment

Integers = NDArray[np.int64]
Change = tuple[int, Sequence[float]]  # first sample, and the weights from it on


class _Segment(NamedTuple):
    """A straight part of a node's line: `value + share * (i - first)` of its first i samples go
    left."""

    first: int  # sample of the node
    value: int  # times 2**32
    share: int  # times 2**32


class Blend:
    """A weighted mix of data sets: the data set of every sample, and the index in it.

    Error bound: in every prefix a data set gets its weight times the samples with that weight, up
    to a few. A child's error is at most its largest share times its node's error, plus c = 1/2 + i
    / 2**33 for rounding (the second term from the 32 bits of the share). `_build` gives every child
    that is not a leaf a share of at most 3/4 of the first weights, so that without changes the
    errors of inner nodes stay below c / (1 - 3/4) = 4 c, and those of leaves, which may have any
    share, below 5 c: 2.5 samples, for any number of data sets.
    """

    def __init__(self, weights: Sequence[float], changes: Sequence[Change] = ()) -> None:
        """Build the tree. weights: per data set, not negative, finite, with a positive sum, not
        normalised; changes: ascending, above sample 0."""
        stages = [(0, weights), *changes]
        for _, stage in stages:
            assert (
                len(stage) == len(weights) and min(stage) >= 0 and 0 < sum(stage) < float("inf")
            ), stage
        assert all(one[0] < other[0] for one, other in itertools.pairwise(stages)), stages
        self.num_datasets = len(weights)
        self.firsts = tuple(first for first, _ in stages)
        self.stages = tuple(tuple(weight / sum(stage) for weight in stage) for _, stage in stages)
        self.weights = self.stages[0]
        # Samples of each data set before each stage.
        self._due = [self.due(first) for first in self.firsts]
        lines: list[list[_Segment]] = []  # per inner node
        children: list[tuple[int, int]] = []  # per inner node: (left, right); -1 - d is data set d
        # Heaviest first, as the error bound requires.
        order = sorted(range(len(weights)), key=lambda dataset: (-weights[dataset], dataset))
        self._root = self._build(order, lines, children)
        most = max(map(len, lines), default=1)
        padded = [[*line, *[_Segment(_NEVER, 0, 0)] * (most - len(line))] for line in lines]
        table = np.array(padded, dtype=np.uint64).reshape(-1, most, 3)
        # (nodes, segments of the node with the most) each, and (nodes, 2)
        self._first_table, self._value_table, self._share_table = (
            table[:, :, column].copy() for column in range(3)
        )
        self._child_table = np.array(children, dtype=np.int64).reshape(-1, 2)

    def due(self, num_samples: int) -> list[float]:
        """Return each data set's exact share of the first `num_samples`, in samples."""
        ends = (*self.firsts[1:], num_samples)
        lengths = [
            max(0, min(num_samples, end) - first)
            for first, end in zip(self.firsts, ends, strict=True)
        ]
        return [
            math.fsum(
                stage[dataset] * length for stage, length in zip(self.stages, lengths, strict=True)
            )
            for dataset in range(self.num_datasets)
        ]

    def taken(self, num_samples: int) -> list[int]:
        """Return how many of the first `num_samples` each data set provides."""
        nodes = len(self._child_table)
        counts = np.zeros(nodes + self.num_datasets, dtype=np.uint64)  # of -1 - d: data set d
        counts[self._root] = num_samples
        for node in reversed(range(nodes)):  # a node comes after its children
            left = self._left_count(np.array([node]), counts[[node]])
            counts[self._child_table[node]] = [*left, *(counts[[node]] - left)]
        return [int(count) for count in counts[nodes:][::-1]]

    def _build(
        self, datasets: list[int], lines: list[list[_Segment]], children: list[tuple[int, int]]
    ) -> int:
        """Build the subtree of `datasets` (sorted by descending weight) and return its node."""
        if len(datasets) == 1:
            return -1 - datasets[0]
        weights = [self.weights[dataset] for dataset in datasets]
        total = sum(weights)
        running, cut = weights[0], 1
        while cut < len(datasets) - 1 and running + weights[cut] <= total / 2:
            running, cut = running + weights[cut], cut + 1
        if total == 0:
            cut = len(datasets) // 2
        sides = datasets[:cut], datasets[cut:]
        left, right = (self._build(side, lines, children) for side in sides)
        lines.append(
            self._line(
                sides[0], datasets, round((running / total if total > 0 else 1.0) * 2**_BITS)
            )
        )
        children.append((left, right))
        return len(lines) - 1

    def _line(self, left: list[int], datasets: list[int], first_share: int) -> list[_Segment]:
        """Return a node's line, whose rounded values only ever step by 0 or 1."""
        line = [_Segment(0, 0, first_share)]
        for stage, due in zip(self.stages[1:], self._due[1:], strict=True):
            whole = _total(stage, datasets)
            if whole == 0:
                continue  # no sample of this stage arrives here
            share, bend = min(_total(stage, left) / whole, 1.0), _total(due, datasets)
            first = math.ceil(bend)
            value = round((_total(due, left) + share * (first - bend)) * 2**_BITS)
            while line and line[-1].first >= first:
                line.pop()
            before = (
                0 if not line else line[-1].value + line[-1].share * (first - 1 - line[-1].first)
            )
            value = min(max(value, before), before + 2**_BITS) if line else 0
            line.append(_Segment(first, value, round(share * 2**_BITS)))
        return line

    def locate(self, indices: Integers) -> tuple[Integers, Integers]:
        """Return each sample's data set and its index there, which counts 0, 1, 2, ... per data
        set.

        indices: (k,) below MAX_SAMPLES; returns two arrays (k,).
        """
        assert not indices.size or 0 <= indices.min() <= indices.max() < MAX_SAMPLES, indices
        position = indices.astype(np.uint64)
        node = np.full(indices.shape, self._root)
        inner = np.flatnonzero(node >= 0)
        while inner.size:
            here, at = node[inner], position[inner]
            before, after = self._left_count(here, at), self._left_count(here, at + 1)
            goes_left = after > before
            position[inner] = np.where(goes_left, before, at - before)
            node[inner] = self._child_table[here, np.where(goes_left, 0, 1)]
            inner = inner[node[inner] >= 0]
        return -1 - node, position.astype(np.int64)

    def _left_count(self, node: Integers, count: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return how many of the first `count` samples of a node go left: its line at `count`,
        rounded."""
        if self._first_table.shape[1] == 1:
            exact = self._share_table[node, 0] * count
        else:
            segment = (self._first_table[node] <= count[:, None]).sum(axis=1) - 1
            first, value = self._first_table[node, segment], self._value_table[node, segment]
            exact = value + self._share_table[node, segment] * (count - first)
        return (exact + 2 ** (_BITS - 1)) >> _BITS


def _total(values: Sequence[float], datasets: Sequence[int]) -> float:
    return math.fsum(values[dataset] for dataset in datasets)


class Concatenation:
    """Data sets one after the other: each sample once, whatever the weights."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Concatenate the data sets. sizes: samples per data set."""
        self.num_datasets = len(sizes)
        self._ends = np.cumsum(sizes, dtype=np.int64)
        self._starts = self._ends - np.array(sizes, dtype=np.int64)
        self.num_samples = int(self._ends[-1])

    def locate(self, indices: Integers) -> tuple[Integers, Integers]:
        """Return each sample's data set and its index there: (k,) below `num_samples` -> two
        (k,)."""
        assert not indices.size or 0 <= indices.min() <= indices.max() < self.num_samples, indices
        datasets = np.searchsorted(self._ends, indices, side="right")
        return datasets, indices - self._starts[datasets]
