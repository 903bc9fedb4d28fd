"""Which checkpoints a run keeps: a pure policy, so that it can be tested without a disk."""

from __future__ import annotations

from collections.abc import Sequence


def checkpoints_to_delete(iterations: Sequence[int], keep: int | None) -> list[int]:
    """The iterations to delete so that the newest `keep` stay, oldest first.

    `None` keeps all. The order and repetitions of `iterations` do not matter. The newest is never returned.

    Raises:
        ValueError: if `keep` is below 1.
    """
    if keep is None:
        return []
    if keep < 1:
        raise ValueError(f"max_checkpoints must be at least 1, not {keep}: a run without a checkpoint cannot resume")
    return sorted(set(iterations))[:-keep]
