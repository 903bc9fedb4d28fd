"""Training checkpoints: root/<iteration>/ holds one safetensors file per rank and manifest.json.

Every rank writes only its own shards, in a folder `.tmp-<iteration>-<save id>`. When all have succeeded, rank 0 adds
the manifest, syncs, and renames the folder to its final name, so that a checkpoint either is complete or does not
exist. The manifest says where each element of each parameter lies, so that any world size, ZeRO stage, number of
layers per stage or choice of frozen parameters reads any other: a rank reads just the bytes of its own shards,
wherever they are.

A checkpoint is verified (manifest, sizes, checksums) before it is used. A damaged one is reported, skipped and left
as it is.
"""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.manifest import Manifest, SavedFile
from megatron_lite.checkpoint.reading import changes, check_parameters, fill, find_checkpoints, verify
from megatron_lite.checkpoint.retention import checkpoints_to_delete
from megatron_lite.config import Config, flatten
from megatron_lite.distributed.agreement import first_problem, write_together
from megatron_lite.errors import CheckpointError, DamagedError
from megatron_lite.run.durable_files import sync_folder

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed
    from megatron_lite.zero.multi_stage import MultiStage


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What a checkpoint holds besides the shards."""

    iteration: int
    state: dict[str, Any]
    config: dict[str, Any]  # flat, as it was when saved
    folder: Path
    world_size: int  # of the run that saved it


def save(
    root: Path, iteration: int, model: MultiStage, state: dict[str, Any], config: Config, distributed: Distributed
) -> None:
    """Write root/<iteration>/; all ranks call this together. A checkpoint of that iteration is replaced.

    `state` is JSON, the same on every rank. Also deletes what interrupted saves have left in `root`.

    Raises:
        StorageError: on every rank, if any rank cannot write; what was there before is untouched.
    """
    folder = root / str(iteration)
    save_id = distributed.broadcast_object(files.new_nonce())
    temporary = files.work_path(folder, "tmp", save_id)
    tensors = _tensors(model)
    own_name = manifest.rank_file(distributed.rank)

    def prepare() -> None:
        if distributed.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            files.recover(root)
            temporary.mkdir()

    def write() -> files.WrittenFile:
        if not temporary.is_dir():
            raise OSError(errno.ENOENT, "the folder is not visible here, all ranks need the same file system")
        metadata = {"format": manifest.FORMAT, "save_id": save_id, "iteration": str(iteration)}
        metadata["rank"] = str(distributed.rank)
        return files.write_tensors(temporary / own_name, tensors, metadata)

    def finish(written: list[files.WrittenFile]) -> None:
        if distributed.rank == 0:
            saved_files = {manifest.rank_file(rank): SavedFile(*file[:2]) for rank, file in enumerate(written)}
            parameters = manifest.locate_parameters([part for _, part in model.parts()], written)
            content = Manifest(
                save_id, iteration, distributed.world_size, flatten(config), state, saved_files, parameters
            )
            files.write_text(temporary / manifest.MANIFEST_NAME, manifest.dump(content))
            sync_folder(temporary)
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


def _tensors(model: MultiStage) -> list[files.TensorToWrite]:
    """All shards of this rank, in the order of `manifest.locate_parameters`; none is made before it is written."""
    for index, part in model.parts():
        assert part.frozen or part.has_state, f"stage {index}: a checkpoint needs moments, this model is for inference"
    return [
        files.TensorToWrite(
            manifest.tensor_name(index, part.frozen, kind),
            dtype,
            (part.numel(kind),),
            functools.partial(part.read, kind),
        )
        for index, part in model.parts()
        for kind, dtype in part.kinds().items()
    ]


def _is_checkpoint(folder: Path) -> bool:
    """True for a folder (no link) with a readable manifest of ours for the iteration that it is named after."""
    try:
        return files.is_folder(folder) and manifest.read(folder).iteration == int(folder.name)
    except DamagedError:
        return False


def newest_iteration(root: Path) -> int | None:
    """Of what should be checkpoints, good or not; None: there is nothing to resume.

    Raises:
        CheckpointError: if the directory cannot be read.
    """
    listing = _listing(root)
    if isinstance(listing, str):
        raise CheckpointError(f"cannot read the checkpoints in {root}: {listing}")
    return listing[0][0] if listing else None


def newest_config(root: Path) -> tuple[int, dict[str, Any]] | None:
    """Iteration and flat config of the newest checkpoint with a good manifest; reads and changes nothing else.

    Lets a changed architecture be refused before memory is allocated. None if there is none.

    Raises:
        CheckpointError: if the directory cannot be read.
    """
    try:
        found = find_checkpoints(root)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoints in {root}: {error.strerror or error}") from None
    for iteration, folder in found:
        try:
            content = manifest.read(folder)
        except DamagedError:
            continue
        if content.iteration == iteration:
            return iteration, content.config
    return None


def load_newest(
    root: Path, model: MultiStage, distributed: Distributed, report: Callable[[str], None], optimizer: str = "adamw"
) -> LoadedCheckpoint | None:
    """Fill the shards of the model from the newest good checkpoint; all ranks call this together.

    `report` gets one line, on every rank, for each newer checkpoint that is damaged, and for what had to change:
    moments that start at zero (those of another `optimizer` than that of now do, too), weights that were rounded.
    Padding is not touched. None if there is no checkpoint.

    Raises:
        CheckpointError: on every rank, if there are checkpoints but none is usable, or if the newest good one has
            other parameters than the model. No file is changed.
    """
    listing = distributed.broadcast_object(_listing(root) if distributed.rank == 0 else None)
    if isinstance(listing, str):
        raise CheckpointError(f"cannot read the checkpoints in {root}: {listing}")
    problems = []
    for iteration, name in listing:
        folder = root / name
        content, problem = verify(folder, iteration, distributed)
        if content is not None:
            check_parameters(folder, content, model)
            read = functools.partial(fill, folder, content, model, distributed.rank, optimizer)
            problem = first_problem(distributed, read)
            if problem is None:
                for line in changes(content, model, optimizer):
                    report(f"checkpoint {folder}: {line}")
                return LoadedCheckpoint(iteration, content.state, content.config, folder, content.world_size)
        problems.append(f"{folder}: {problem}")
        report(f"checkpoint {problems[-1]}; skipped, looking for an older one")
    if not problems:
        return None
    raise CheckpointError(
        f"no usable checkpoint in {root}; nothing was changed, and training does not restart from zero by itself. "
        "Restore one of these or choose another --experiment_dir:\n  " + "\n  ".join(problems)
    )


def _listing(root: Path) -> list[tuple[int, str]] | str:
    try:
        return [(iteration, path.name) for iteration, path in find_checkpoints(root)]
    except OSError as error:
        return error.strerror or str(error)


def prune(root: Path, keep: int | None, newest: int | None = None) -> None:
    """Delete all but the `keep` newest checkpoints; for rank 0 alone, after a successful save.

    `newest` is the iteration just saved: checkpoints beyond it are of an abandoned or damaged continuation and are
    neither counted nor deleted, so that what was just saved always stays. Only folders that are complete checkpoints
    of this program count; damaged ones, links and everything else stay. A failure to delete is a warning.
    """
    if keep is None:
        return
    candidates = [
        iteration
        for iteration, folder in find_checkpoints(root)
        if folder.name == str(iteration) and (newest is None or iteration <= newest) and _is_complete(folder)
    ]
    for iteration in checkpoints_to_delete(candidates, keep):
        folder = root / str(iteration)
        trash = files.work_path(folder, "trash", files.new_nonce())
        try:
            os.rename(folder, trash)
        except OSError as error:
            files.logger.warning("cannot delete the old checkpoint %s: %s", folder, error.strerror or error)
            continue
        files.remove_folder(trash)


def _is_complete(folder: Path) -> bool:
    """True for a folder with a good manifest and files of the right sizes."""
    if not _is_checkpoint(folder):
        return False
    try:
        content = manifest.read(folder)
        return all((folder / name).stat().st_size == file.size for name, file in content.files.items())
    except (OSError, DamagedError):
        return False
