"""Checkpoints that stay and checkpoints that are deleted, as one pure function. Imports no torch.

A permanent checkpoint is one at an iteration that a rule of --keep_checkpoints names, in the command line of the start
that saved the checkpoint (its manifest has that) or of the current start. All others are temporary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from megatron_lite.config.structured_values import KeepRule, keep_rules
from megatron_lite.errors import UsageError


class Saved(NamedTuple):
    """A complete checkpoint: its manifest is good and its files have the right sizes."""

    iteration: int
    permanent: bool


def is_permanent(iteration: int, rules: Sequence[KeepRule]) -> bool:
    """Whether the first rule that reaches an iteration names it; after the last `until` there are no more."""
    rule = next((rule for rule in rules if rule.until is None or iteration <= rule.until), None)
    return rule is not None and iteration % rule.every == 0


def was_permanent(iteration: int, saved: dict[str, Any]) -> bool:
    """Whether a checkpoint with this flat saved configuration was permanent; True if that cannot be understood."""
    items = saved.get("keep_checkpoints", [])
    try:
        return is_permanent(iteration, keep_rules(items))
    except (UsageError, TypeError, AttributeError):
        return True


def num_permanent(first: int, last: int, rules: Sequence[KeepRule]) -> int:
    """Return the number of permanent checkpoints in iterations first + 1 to last."""
    number = 0
    for rule in rules:
        end = last if rule.until is None else min(last, rule.until)
        if end > first:
            number += end // rule.every - first // rule.every
            first = end
    return number


def checkpoints_to_delete(
    saved: Sequence[Saved],
    keep: int | None,
    newest: int | None = None,
    after: int | None = None,
    held: Collection[int] = (),
) -> list[int]:
    """Return the iterations to delete, oldest first: the temporary ones that are not among the newest `keep`.

    Args:
        saved: every complete checkpoint there is.
        keep: --max_checkpoints; None keeps all.
        newest: the iteration just saved. Later ones belong to an abandoned or damaged continuation and are neither
            counted nor deleted, so that the checkpoint just saved always stays.
        after: delete none of iterations up to this one, which earlier starts have saved; None: those, too.
        held: iterations that stay beside the newest, for a replay of a bad step.

    Raises:
        ValueError: if `keep` is below 1.
    """
    if keep is None:
        return []
    if keep < 1:
        raise ValueError(f"max_checkpoints must be at least 1, not {keep}: a run without a checkpoint cannot resume")
    counted = sorted({item.iteration for item in saved if newest is None or item.iteration <= newest})
    stays = {*counted[-keep:], *held, *(item.iteration for item in saved if item.permanent)}
    return [iteration for iteration in counted if iteration not in stays and (after is None or iteration > after)]
