"""The retention policy."""

from __future__ import annotations

import pytest

from megatron_lite.checkpoint.sharded import checkpoints_to_delete

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


@pytest.mark.parametrize(
    ("iterations", "keep", "deleted"),
    [
        ([], 1, []),
        ([100], 1, []),
        ([100, 200, 300], None, []),
        ([100, 200, 300], 5, []),
        ([100, 200, 300], 3, []),
        ([100, 200, 300], 2, [100]),
        ([300, 100, 200], 1, [100, 200]),
        ([9, 10, 0], 2, [0]),
        ([10, 10, 20], 1, [10]),
    ],
)
def test_table(iterations: list[int], keep: int | None, deleted: list[int]) -> None:
    """Oldest first; numbers are compared as numbers."""
    assert checkpoints_to_delete(iterations, keep) == deleted


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(keep: int) -> None:
    """A policy cannot delete everything."""
    with pytest.raises(ValueError, match="at least 1"):
        checkpoints_to_delete([1, 2], keep)


@hypothesis.given(st.lists(st.integers(0, 10**6)), st.none() | st.integers(1, 20))
def test_the_newest_stay(iterations: list[int], keep: int | None) -> None:
    """Kept checkpoints are newer than deleted ones, and their number is `keep` or all there are."""
    deleted = checkpoints_to_delete(iterations, keep)
    kept = set(iterations) - set(deleted)
    assert set(deleted) <= set(iterations)
    assert len(kept) == min(len(set(iterations)), keep if keep is not None else len(iterations))
    assert not deleted or max(deleted) < min(kept)
