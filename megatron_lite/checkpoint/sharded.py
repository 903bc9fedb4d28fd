"""Training checkpoints: root/<iteration>/ holds one safetensors file per rank and manifest.json.

Every rank writes only its own shards, into a folder `.tmp-<iteration>-<save id>`. Once all have succeeded, rank 0 adds
the manifest, syncs, and renames the folder to its final name: a checkpoint is complete or does not exist. The manifest
maps every element of every parameter to its place, so any world size, ZeRO stage, number of layers per stage and choice
of frozen parameters can load any other: a rank reads only the bytes of its own shards.

Loading verifies a checkpoint (manifest, sizes, checksums) first; it reports and skips a damaged one, never touching it.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lite.checkpoint import files, manifest, names
from megatron_lite.checkpoint.manifest import Manifest, SavedFile, tensor_name
from megatron_lite.checkpoint.names import MANIFEST_NAME, is_folder, new_nonce, rank_file, reason, work_path
from megatron_lite.checkpoint.reading import changes, fill, verify
from megatron_lite.config import Config, flatten
from megatron_lite.distributed.agreement import first_problem, together, write_together
from megatron_lite.errors import CheckpointError, DamagedError, shorten
from megatron_lite.run.durable_files import sync_folder

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed
    from megatron_lite.zero.multi_stage import MultiStage


def save(
    root: Path,
    iteration: int,
    model: MultiStage,
    state: dict[str, Any],
    config: Config,
    distributed: Distributed,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Write root/<iteration>/, replacing an older checkpoint of that iteration; all ranks call this together.

    Returns the bytes of all ranks' shards. Also delete the remains of interrupted saves in `root`.

    Args:
        state: JSON, the same on every rank.
        check: rank 0 calls it before it makes a folder and before it publishes one; it raises a RunError if the
            directory above `root` is no longer this run's.

    Raises:
        StorageError: on every rank, if any rank cannot write; older checkpoints are untouched.
    """
    folder = root / str(iteration)
    save_id = distributed.broadcast_object(new_nonce())
    temporary = work_path(folder, "tmp", save_id)
    tensors = _tensors(model)
    own_name = rank_file(distributed.rank)

    def prepare() -> None:
        if distributed.rank == 0:
            check()
            root.mkdir(exist_ok=True)
            files.recover(root)
            temporary.mkdir()

    def write() -> files.WrittenFile:
        if not temporary.is_dir():
            raise OSError(errno.ENOENT, "the folder is not visible here, all ranks need the same file system")
        metadata = manifest.file_metadata(save_id, iteration, distributed.rank)
        return files.write_tensors(temporary / own_name, tensors, metadata)

    def finish(written: list[files.WrittenFile]) -> None:
        if distributed.rank == 0:
            content = Manifest(
                save_id=save_id,
                iteration=iteration,
                world_size=distributed.world_size,
                config=flatten(config),
                state=state,
                files={rank_file(rank): SavedFile(file.size, file.crc32) for rank, file in enumerate(written)},
                parameters=manifest.locate_parameters([part for _, part in model.parts()], written),
            )
            files.write_text(temporary / MANIFEST_NAME, manifest.dump(content))
            sync_folder(temporary)
            check()
            files.publish(temporary, folder, _is_checkpoint)

    what = f"the checkpoint of iteration {iteration}"
    try:
        write_together(distributed, what, root, prepare)
        own_bytes = sum(tensor.num_bytes for tensor in tensors)
        written = write_together(distributed, what, temporary / own_name, write, own_bytes)
        write_together(distributed, what, folder, lambda: finish([files.WrittenFile(*file) for file in written]))
    except Exception:
        if distributed.rank == 0:
            files.remove_folder(temporary)
        raise
    return sum(files.WrittenFile(*file).size for file in written)


def _tensors(model: MultiStage) -> list[files.TensorToWrite]:
    """List this rank's shards in the order of `manifest.locate_parameters`; writing creates them one at a time."""
    for index, part in model.parts():
        assert part.frozen or part.has_state, f"stage {index}: a checkpoint needs moments, this model is for inference"
    return [
        files.TensorToWrite(tensor_name(index, part.frozen, kind), dtype, (part.numel(kind),), partial(part.read, kind))
        for index, part in model.parts()
        for kind, dtype in part.kinds().items()
    ]


def _is_checkpoint(folder: Path, with_files: bool = False) -> bool:
    """Return True for a folder (not a link) with a good manifest for the iteration in its name.

    with_files: require files of the right sizes, too.
    """
    if not is_folder(folder):
        return False
    try:
        content = manifest.read(folder, int(folder.name))
        if with_files:
            manifest.check_sizes(folder, content)
        return True
    except DamagedError:
        return False


def newest_config(root: Path) -> tuple[int, dict[str, Any]] | None:
    """Return iteration and flat config of the newest checkpoint with a good manifest; None if there is none.

    Serves to refuse a changed architecture before memory is allocated; reads nothing but manifests.

    Raises:
        CheckpointError: if the directory cannot be read.
    """
    for iteration, folder in find(root):
        with contextlib.suppress(DamagedError):
            return iteration, manifest.read(folder, iteration).config
    return None


def load_newest(
    root: Path, model: MultiStage, distributed: Distributed, report: Callable[[str], None], optimizer: str = "adamw"
) -> tuple[Path, Manifest] | None:
    """Fill the shards of the model from the newest good checkpoint; all ranks call this together.

    Padding is not touched.

    Args:
        report: gets a line on every rank for each newer checkpoint that is damaged, and for each kind of state that
            cannot be restored unchanged (see `reading.changes`).
        optimizer: the current --optimizer.

    Returns:
        Its folder and manifest; None if there is no checkpoint.

    Raises:
        CheckpointError: on every rank, if none of the checkpoints is usable, or if the newest good one has other
            parameters than the model. No file is changed.
    """
    found = together(distributed, lambda: find(root) if distributed.rank == 0 else [])
    problems = []
    for iteration, name in distributed.broadcast_object([(iteration, path.name) for iteration, path in found]):
        folder = root / name
        content, problem = verify(folder, iteration, distributed)
        if content is not None:
            _check_parameters(folder, content, model)
            problem = first_problem(distributed, partial(fill, folder, content, model, distributed.rank, optimizer))
            if problem is None:
                for line in changes(content, model, optimizer):
                    report(f"checkpoint {folder}: {line}")
                return folder, content
        problems.append(f"{folder}: {problem}")
        report(f"checkpoint {problems[-1]}; skipped, looking for an older one")
    if not problems:
        return None
    raise CheckpointError(
        f"no usable checkpoint in {root}; nothing was changed, and training does not restart from zero by itself. "
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


def find(root: Path) -> list[tuple[int, Path]]:
    """List (iteration, folder) as `names.find_checkpoints`, but raise CheckpointError if `root` cannot be read."""
    try:
        return names.find_checkpoints(root)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoints in {root}: {reason(error)}") from None


def checkpoints_to_delete(iterations: Sequence[int], keep: int | None) -> list[int]:
    """Return the iterations to delete, oldest first, so that the newest `keep` stay; None keeps all.

    Raises:
        ValueError: if `keep` is below 1.
    """
    if keep is None:
        return []
    if keep < 1:
        raise ValueError(f"max_checkpoints must be at least 1, not {keep}: a run without a checkpoint cannot resume")
    return sorted(set(iterations))[:-keep]


def prune(root: Path, keep: int | None, newest: int | None = None) -> None:
    """Delete all but the newest `keep` checkpoints; rank 0 calls this after a successful save.

    Only complete checkpoints of this program count; damaged ones, links and everything else stay. A failure to delete
    is only a warning.

    newest: the iteration just saved. Later checkpoints belong to an abandoned or damaged continuation and are neither
        counted nor deleted, so that the checkpoint just saved always stays.
    """
    if keep is None:
        return
    candidates = [
        iteration
        for iteration, folder in names.find_checkpoints(root)
        if folder.name == str(iteration)
        and (newest is None or iteration <= newest)
        and _is_checkpoint(folder, with_files=True)
    ]
    for iteration in checkpoints_to_delete(candidates, keep):
        folder = root / str(iteration)
        trash = work_path(folder, "trash", new_nonce())
        try:
            os.rename(folder, trash)
        except OSError as error:
            files.logger.warning("cannot delete the old checkpoint %s: %s", folder, reason(error))
            continue
        files.remove_folder(trash)
