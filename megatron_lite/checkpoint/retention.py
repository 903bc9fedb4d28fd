"""Decide which checkpoints to delete (a pure function), delete them, and warn if the next will not
fit.

A checkpoint is permanent if a rule of --keep_checkpoints names its iteration, either in the
configuration that saved it (in its manifest) or in the current one. All other checkpoints are
temporary.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint import files, names
from megatron_lite.checkpoint.names import new_nonce, reason, work_path
from megatron_lite.checkpoint.rotation import Identity, identity
from megatron_lite.checkpoint.writing import good_manifest
from megatron_lite.config import Config
from megatron_lite.config.structured_values import KeepRule, keep_rules
from megatron_lite.errors import UsageError

# complete checkpoints, and whether each was permanent when saved
Known = dict[Identity | None, bool]


def is_permanent(iteration: int, rules: Sequence[KeepRule]) -> bool:
    """Return whether the first rule that covers an iteration names it. No rule applies after the
    last `until`."""
    rule = next((rule for rule in rules if rule.until is None or iteration <= rule.until), None)
    return rule is not None and iteration % rule.every == 0


def was_permanent(iteration: int, saved: dict[str, Any]) -> bool:
    """Return whether a checkpoint with this flat saved configuration was permanent; True if its
    rules are not readable."""
    try:
        return is_permanent(iteration, keep_rules(saved.get("keep_checkpoints", [])))
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
    saved: Mapping[int, bool],
    keep: int,
    newest: int | None = None,
    after: int | None = None,
    held: Collection[int] = (),
) -> list[int]:
    """Return the iterations to delete, oldest first: the temporary ones that are not among the
    newest `keep`.

    Args:
        saved: the iteration of every complete checkpoint, and whether it is permanent.
        keep: --max_checkpoints.
        newest: the iteration just saved. Later ones belong to an abandoned or damaged continuation
            and are neither counted nor deleted, so that the newest save is always kept.
        after: keep all iterations up to this one, saved by earlier starts; None: delete these as
            well.
        held: iterations to keep, too, for replaying a bad step.
    """
    assert keep >= 1, f"{keep}: a run without a checkpoint cannot resume"
    counted = sorted(iteration for iteration in saved if newest is None or iteration <= newest)
    stays = {
        *counted[-keep:],
        *held,
        *(iteration for iteration, permanent in saved.items() if permanent),
    }
    return [
        iteration
        for iteration in counted
        if iteration not in stays and (after is None or iteration > after)
    ]


def prune(
    root: Path,
    keep: int | None,
    newest: int | None = None,
    rules: Sequence[KeepRule] = (),
    after: int | None = None,
    held: Collection[int] = (),
    known: Known | None = None,
) -> None:
    """Delete the temporary checkpoints beyond the newest `keep` (None: keep all) after a successful
    save, on rank 0.

    Only complete checkpoints of this program count; damaged ones, links and everything else are
    kept. A failed deletion only logs a warning. See `checkpoints_to_delete`; `rules`:
    --keep_checkpoints.

    known: results of earlier calls of this start, so that a save costs the same with any number of
    checkpoints: only new ones are read, and those to delete once more. Permanent ones beyond the
    newest never are.
    """
    if keep is None:
        return
    try:
        found = names.find_checkpoints(root)
    except OSError as error:
        files.logger.warning(
            "no old checkpoint is deleted: cannot read %s: %s", root, reason(error)
        )
        return
    saved, known = dict[int, bool](), {} if known is None else known
    for iteration, folder in found:
        by_rule, now = is_permanent(iteration, rules), identity(folder)
        if folder.name != str(iteration) or (by_rule and len(saved) >= keep):
            continue
        if now not in known:
            if (content := good_manifest(folder, with_files=True)) is None:
                continue
            known[now] = was_permanent(iteration, content.config)
        saved[iteration] = by_rule or known[now]
    for iteration in checkpoints_to_delete(saved, keep, newest, after, held):
        folder = root / str(iteration)
        known.pop(identity(folder), None)
        if good_manifest(folder, with_files=True) is None:
            continue  # damaged since it was read
        trash = work_path(folder, "trash", new_nonce())
        try:
            os.rename(folder, trash)
        except OSError as error:
            files.logger.warning("cannot delete the old checkpoint %s: %s", folder, reason(error))
            continue
        files.remove_folder(trash)


def best_of(folder: Path) -> set[int]:
    """Return the best iteration recorded in a checkpoint, from which a resume continues; may be
    empty."""
    content = good_manifest(folder)
    return (
        {content.state["best"]["iteration"]}
        if content is not None and "best" in content.state
        else set()
    )


def free_bytes(path: Path) -> int | None:
    """Return the free bytes for this user at a path, or at its nearest existing parent; None if
    unknown."""
    try:
        usage = os.statvfs(next(parent for parent in (path, *path.parents) if parent.exists()))
    except (OSError, StopIteration):
        return None
    return usage.f_bavail * usage.f_frsize


def lack_at_start(root: Path | None, num_bytes: int, config: Config, done: int) -> str | None:
    """Describe the space missing for all future checkpoints; None if there is enough.

    num_bytes: size of one checkpoint. done: iterations done. Saves by time are not counted.
    """
    if root is None or (free := free_bytes(root)) is None:
        return None
    options, train_iters = config.checkpoint, config.training.train_iters
    left, there = max(0, train_iters - done), len(names.find_checkpoints(root))
    permanent = num_permanent(done, train_iters, keep_rules(options.keep_checkpoints))
    saves = (
        min(left, 1)
        if options.checkpoint_interval is None
        else -(-left // options.checkpoint_interval)
    )
    if options.max_checkpoints is None:
        more = max(saves, permanent)
    else:
        more = (
            additional(there, saves, options.max_checkpoints + (options.keep_best is not None))
            + permanent
        )
    if more * num_bytes <= free:
        return None
    return (
        f"{root}: {_size(free)} free, but the checkpoints to come take {more} x {_size(num_bytes)}; make "
        "room, or keep fewer (--max_checkpoints)"
    )


def additional(there: int, saves: int, keep: int | None) -> int:
    """Return how many more checkpoints will exist at once. One is written before an old one is
    deleted."""
    if keep is None or there + saves <= keep:
        return saves
    return max(0, keep - there) + 1


def lack_now(root: Path, num_bytes: int) -> str | None:
    """Describe the space missing for the next checkpoint; None if there is enough."""
    free = free_bytes(root)
    if free is None or num_bytes <= free:
        return None
    return f"{root}: the next checkpoint takes {_size(num_bytes)}, but only {_size(free)} are free"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:,.1f} MB"
