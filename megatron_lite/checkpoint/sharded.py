"""Training checkpoints: root/<iteration>/ holds one safetensors file per rank and manifest.json.

Every rank writes only its own shards, into a folder `.tmp-<iteration>-<save id>`. Once all have succeeded, rank 0 adds
the manifest, syncs, and renames the folder to its final name: a checkpoint is complete or does not exist. The manifest
maps every element of every parameter to its place, so any world size, number of tensor-parallel ranks, ZeRO stage,
number of layers per stage and choice of frozen parameters can load any other: a rank reads only the bytes of its own
shards.

Loading verifies a checkpoint while it reads it (see `reading`). A damaged one is reported, skipped and never touched;
the next older one then overwrites what was read of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lite.checkpoint import files, names
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.checkpoint.names import new_nonce, reason, work_path
from megatron_lite.checkpoint.reading import changes, fill_verified, open_checkpoint
from megatron_lite.checkpoint.retention import Saved, checkpoints_to_delete, is_permanent, was_permanent
from megatron_lite.checkpoint.writing import complete_manifest
from megatron_lite.config.structured_values import KeepRule
from megatron_lite.errors import CheckpointError, shorten

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed
    from megatron_lite.zero.multi_stage import MultiStage


def load_first_good(
    found: Sequence[tuple[int, Path]],
    where: Path | None,
    model: MultiStage,
    distributed: Distributed,
    report: Callable[[str], None],
    optimizer: str = "adamw",
) -> tuple[Path, Manifest] | None:
    """Fill the shards of the model from the first good one of these checkpoints; all ranks call this together.

    Padding is not touched.

    Args:
        found: (iteration, folder), the same on every rank; see `choice.choose_together`.
        where: their folder, for the message.
        report: gets a line on every rank for each newer checkpoint that is damaged, and for each kind of state that
            cannot be restored unchanged (see `reading.changes`).
        optimizer: the current --optimizer.

    Returns:
        Its folder and manifest; None if there is no checkpoint.

    Raises:
        CheckpointError: on every rank, if none of the checkpoints is usable, or if the newest good one has other
            parameters than the model. No file is changed.
    """
    problems = []
    for iteration, folder in found:
        content, problem = open_checkpoint(folder, iteration, distributed)
        if content is not None:
            _check_parameters(folder, content, model)
            problem = fill_verified(folder, content, model, distributed, optimizer)
            if problem is None:
                for line in changes(content, model, optimizer):
                    report(f"checkpoint {folder}: {line}")
                return folder, content
        problems.append(f"{folder}: {problem}")
        report(f"checkpoint {problems[-1]}; skipped, looking for an older one")
    if not problems:
        return None
    raise CheckpointError(
        f"no usable checkpoint in {where}; nothing was changed, and training does not restart from zero by itself. "
        "Restore one of these or choose another --experiment_dir:\n  " + "\n  ".join(problems)
    )


def _check_parameters(folder: Path, content: Manifest, model: MultiStage) -> None:
    """Refuse a checkpoint whose parameters have other names or shapes than the model's."""
    specs = [slot.spec for _, part in model.parts() for slot in part.layout.slots]
    if misfits := content.misfits({spec.name: spec.shape for spec in specs}):
        raise CheckpointError(
            f"checkpoint {folder} does not fit the model: {shorten(misfits)}. Give the flags it was trained with, or "
            "choose another --experiment_dir"
        )


def prune(
    root: Path,
    keep: int | None,
    newest: int | None = None,
    rules: Sequence[KeepRule] = (),
    after: int | None = None,
    held: Collection[int] = (),
) -> None:
    """Delete the temporary checkpoints beyond the newest `keep`; rank 0 calls this after a successful save.

    Only complete checkpoints of this program count; damaged ones, links and everything else stay. A failure to delete
    is only a warning. See `retention.checkpoints_to_delete`; `rules`: those of --keep_checkpoints.
    """
    if keep is None:
        return
    try:
        found = names.find_checkpoints(root)
    except OSError as error:
        files.logger.warning("no old checkpoint is deleted: cannot read %s: %s", root, reason(error))
        return
    saved = []
    for iteration, folder in found:
        if folder.name == str(iteration) and (content := complete_manifest(folder)) is not None:
            permanent = is_permanent(iteration, rules) or was_permanent(iteration, content.config)
            saved.append(Saved(iteration, permanent))
    for iteration in checkpoints_to_delete(saved, keep, newest, after, held):
        folder = root / str(iteration)
        trash = work_path(folder, "trash", new_nonce())
        try:
            os.rename(folder, trash)
        except OSError as error:
            files.logger.warning("cannot delete the old checkpoint %s: %s", folder, reason(error))
            continue
        files.remove_folder(trash)
