"""Blends: the stated error bound in every prefix, and indices that count up within each data
set."""

import random

import numpy as np
import pytest

from megatron_lite.data.blending import MAX_SAMPLES, Blend

GENERATOR = random.Random(0)
WEIGHTS = [
    [1.0],
    [0.3, 0.7],
    [1, 1, 1],
    [1e-9, 1.0],
    [0.999, 0.001],
    [2.0**-power for power in range(20)],  # a chain of halves
    [1.0] * 256,
    [1 / (rank + 1) for rank in range(300)],
    [5.0, *[1e-3] * 100],
    *[[GENERATOR.random() ** 4 for _ in range(GENERATOR.randint(2, 60))] for _ in range(20)],
]


def max_error(blend: Blend, num_samples: int) -> float:
    """Bound the distance of a data set's count from `due`, as the documentation of `Blend` derives
    it."""

    def below(node: int) -> list[int]:
        return (
            [-1 - node]
            if node < 0
            else [dataset for child in blend._child_table[node] for dataset in below(child)]
        )

    def roundings(node: int, own: float) -> float:
        """The error of the worst leaf below a node, whose own error is `own`."""
        if node < 0:
            return own
        totals = [sum(stage[dataset] for dataset in below(node)) for stage in blend.stages]
        found = []
        for child in blend._child_table[node].tolist():
            parts = [sum(stage[dataset] for dataset in below(child)) for stage in blend.stages]
            shares = [part / total for part, total in zip(parts, totals, strict=True) if total > 0]
            found.append(roundings(child, 1.0 + own * max(shares, default=0.0)))
        return max(found)

    return roundings(blend._root, 0.0) * (0.5 + num_samples / 2**33 + len(blend.stages) / 2**16)


@pytest.mark.parametrize("weights", WEIGHTS, ids=range(len(WEIGHTS)))
def test_counts_stay_within_the_stated_error(weights: list[float]) -> None:
    """In every prefix of 5,000 samples each data set has its share within `max_error`, and its
    indices run 0, 1, 2."""
    blend = Blend(weights)
    count = 5000
    datasets, indices = blend.locate(np.arange(count))
    chosen = datasets[:, None] == np.arange(len(weights))[None, :]
    counts = np.cumsum(chosen, axis=0)
    share = np.array(weights) / sum(weights)
    errors = np.abs(counts - share[None, :] * np.arange(1, count + 1)[:, None])
    assert errors.max() <= max_error(blend, count) < 2.6
    assert (counts[np.arange(count), datasets] - 1 == indices).all()


@pytest.mark.parametrize("weights", WEIGHTS[1:10])
def test_bound_holds_far_out(weights: list[float]) -> None:
    """Near the largest index, where the 32-bit shares count, the index within a data set shows how
    many came before."""
    blend = Blend(weights)
    first = MAX_SAMPLES - 2000
    datasets, indices = blend.locate(np.arange(first, MAX_SAMPLES))
    expected = np.array(blend.weights)[datasets] * np.arange(first, MAX_SAMPLES)
    assert np.abs(indices - expected).max() <= max_error(blend, MAX_SAMPLES) < 6
    for dataset in np.unique(datasets):
        assert (np.diff(indices[datasets == dataset]) == 1).all()


def test_a_blend_is_a_pure_function_of_the_index() -> None:
    """Indices give the same answer one by one and in any order; scaled weights give the same
    blend."""
    blend, scaled = Blend([3, 1, 2]), Blend([300, 100, 200])
    whole = np.stack(blend.locate(np.arange(500)))
    assert (
        np.stack([np.concatenate(blend.locate(np.array([i]))) for i in range(500)], axis=1) == whole
    ).all()
    assert (np.stack(scaled.locate(np.arange(500)[::-1]))[:, ::-1] == whole).all()


def test_indices_beyond_the_range_are_refused() -> None:
    """Beyond MAX_SAMPLES the arithmetic would overflow: it stops instead."""
    with pytest.raises(AssertionError):
        Blend([1, 1]).locate(np.array([MAX_SAMPLES]))


def changing(case: int) -> Blend:
    """A blend whose weights change at random samples, with data sets that come and go."""
    generator = random.Random(case)
    count = generator.randint(1, [2, 3, 8, 30][case % 4])

    def weights() -> list[float]:
        drawn = [generator.choice([0.0, 1.0, generator.random() ** 4, 1e-9]) for _ in range(count)]
        return drawn if sum(drawn) > 0 else [1.0] * count

    firsts = sorted(
        generator.sample(range(1, generator.choice([30, 400, 2500])), generator.randint(1, 8))
    )
    return Blend(weights(), [(first, weights()) for first in firsts])


@pytest.mark.parametrize(
    "cases", [range(60), pytest.param(range(60, 3000), marks=pytest.mark.slow)]
)
def test_weights_that_change(cases: range) -> None:
    """In every prefix each data set has the sum of its weights within `max_error`, and its indices
    run 0, 1, 2."""
    for case in cases:
        blend, count = changing(case), 3000
        datasets, indices = blend.locate(np.arange(count))
        counts = np.cumsum(datasets[:, None] == np.arange(blend.num_datasets), axis=0)
        assert (counts[np.arange(count), datasets] - 1 == indices).all()
        errors = [
            np.abs(counts[place - 1] - blend.due(place)).max() for place in range(1, count + 1, 53)
        ]
        assert max(errors) <= max_error(blend, count)
        if blend.num_datasets <= 3:
            assert max_error(blend, count) < 1.01


def test_a_change_of_two_weights_is_exact() -> None:
    """A data set begins and ends at the very sample; far out, where the shares are rounded, the
    counts still fit."""
    blend = Blend([1, 0], [(1000, [0, 1]), (3000, [1, 1])])
    datasets, _ = blend.locate(np.arange(4000))
    assert (
        (datasets[:1000] == 0).all()
        and (datasets[1000:3000] == 1).all()
        and datasets[3000:].sum() == 500
    )
    blend = Blend([0.3, 0.5, 0.2], [(10**9, [0.1, 0.2, 0.7]), (3 * 10**9, [1, 1, 1])])
    first = MAX_SAMPLES - 1000
    datasets, indices = blend.locate(np.arange(first, MAX_SAMPLES))
    for dataset in range(3):
        due = np.array([blend.due(place)[dataset] for place in range(first, MAX_SAMPLES)])
        chosen = datasets == dataset
        assert np.abs(indices - due)[chosen].max() <= max_error(blend, MAX_SAMPLES) < 3
        assert (np.diff(indices[chosen]) == 1).all()


def test_a_change_leaves_the_samples_before_it_alone() -> None:
    """A run may get a change for later; of two data sets not one sample before it moves."""
    plain, changed = Blend([0.37, 0.63]), Blend([0.37, 0.63], [(2000, [0.9, 0.1])])
    for whole, part in zip(
        plain.locate(np.arange(2000)), changed.locate(np.arange(2000)), strict=True
    ):
        assert (whole == part).all()
