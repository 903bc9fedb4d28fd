"""One save of a training checkpoint: root/<iteration>/ with one safetensors file per rank and manifest.json.

Every rank writes only its own shards, into a folder `.tmp-<iteration>-<save id>`. Once all have succeeded, rank 0 adds
the manifest, syncs, and renames the folder to its final name: a checkpoint is complete or does not exist.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.blocks import SavedFile, check_sizes
from megatron_lite.checkpoint.files import TensorToWrite, WrittenFile
from megatron_lite.checkpoint.manifest import Manifest, tensor_name
from megatron_lite.checkpoint.names import MANIFEST_NAME, is_folder, new_nonce, rank_file, work_path
from megatron_lite.config import Config, flatten
from megatron_lite.distributed.agreement import write_together
from megatron_lite.errors import DamagedError
from megatron_lite.run.durable_files import sync_folder

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed
    from megatron_lite.zero.multi_stage import MultiStage


class Save:
    """A checkpoint being written; methods are collective, except `write`, `complete` and `abandon`.

    Args:
        state: JSON, the same on every rank.
        check: called by rank 0 before it creates and before it publishes the folder; raises a RunError if the directory
            above `root` no longer belongs to this run.
    """

    def __init__(
        self,
        root: Path,
        iteration: int,
        model: MultiStage,
        state: dict[str, Any],
        config: Config,
        distributed: Distributed,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.root, self.iteration, self.folder = root, iteration, root / str(iteration)
        self.tensors = tensors_of(model)
        self._model, self._state, self._config, self._distributed = model, state, config, distributed
        self._check, self._what = check, f"the checkpoint of iteration {iteration}"
        self._save_id = distributed.broadcast_object(new_nonce())
        self._temporary = work_path(self.folder, "tmp", self._save_id)
        self._own_path = self._temporary / rank_file(distributed.rank)

    def prepare(self) -> Save:
        """Create the temporary folder, delete remains of interrupted saves, and return self.

        Raises:
            StorageError: on every rank, if the folder cannot be created.
        """

        def prepare() -> None:
            if self._distributed.rank == 0:
                self._check()
                self.root.mkdir(exist_ok=True)
                files.recover(self.root)
                self._temporary.mkdir()

        write_together(self._distributed, self._what, self.root, prepare)
        return self

    def write(self) -> WrittenFile:
        """Write and sync this rank's file; any thread may call this, and retry after a failure.

        Raises:
            OSError: if it cannot be written.
        """
        if not self._temporary.is_dir():
            raise OSError(errno.ENOENT, "the folder is not visible here, all ranks need the same file system")
        self._own_path.unlink(missing_ok=True)
        metadata = manifest.file_metadata(self._save_id, self.iteration, self._distributed.rank)
        return files.write_tensors(self._own_path, self.tensors, metadata)

    def gather(self, write: Callable[[], WrittenFile]) -> list[WrittenFile]:
        """Gather the files of all ranks; `write` returns this rank's.

        Raises:
            StorageError: on every rank, if any rank cannot write; older checkpoints are untouched.
        """
        own_bytes = sum(tensor.num_bytes for tensor in self.tensors)
        gathered = write_together(self._distributed, self._what, self._own_path, write, own_bytes)
        return [WrittenFile(SavedFile(*saved), data_start) for saved, data_start in gathered]

    def confirm(self, complete: Callable[[], None]) -> None:
        """Run or await `self.complete` on all ranks. Raise as `gather` does."""
        write_together(self._distributed, self._what, self.folder, complete)

    def complete(self, written: list[WrittenFile]) -> None:
        """Add the manifest and rename, on rank 0; any thread may call this, and retry after a failure.

        Raises:
            OSError: if it cannot be written.
            RunError: from `check`.
        """
        if self._distributed.rank != 0 or self._is_published():
            return
        parts = [part for _, part in self._model.parts()]  # every rank has these
        content = Manifest(
            save_id=self._save_id,
            iteration=self.iteration,
            world_size=self._distributed.world_size,
            config=flatten(self._config),
            state=self._state,
            files={rank_file(rank): file.saved for rank, file in enumerate(written)},
            parameters=manifest.locate_parameters([(parts, file) for file in written]),
        )
        path = self._temporary / MANIFEST_NAME
        path.unlink(missing_ok=True)
        files.write_text(path, manifest.dump(content))
        sync_folder(self._temporary)
        self._check()
        files.publish(self._temporary, self.folder, is_checkpoint)

    def _is_published(self) -> bool:
        """Whether a failed attempt has published the checkpoint; undo a half-finished one."""
        if is_folder(self._temporary):
            return False
        content = good_manifest(self.folder)
        if content is not None and content.save_id == self._save_id:
            sync_folder(self.root)
            return True
        os.rename(work_path(self.folder, "ready", self._save_id), self._temporary)
        return False

    def abandon(self) -> None:
        """Delete what was written. Not collective; never fails."""
        if self._distributed.rank == 0:
            files.remove_folder(self._temporary)


def write_now(save: Save) -> int:
    """Write and publish a checkpoint; return the bytes of all ranks' files. See `Save`."""
    try:
        written = save.prepare().gather(save.write)
        save.confirm(lambda: save.complete(written))
        return sum(file.saved.size for file in written)
    except Exception:
        save.abandon()
        raise


def tensors_of(model: MultiStage) -> list[TensorToWrite]:
    """List a rank's shards in the order of `manifest.locate_parameters`; writing reads them one at a time."""
    for index, part in model.parts():
        assert part.frozen or part.has_state, f"stage {index}: a checkpoint needs moments, this model is for inference"
    return [
        TensorToWrite(tensor_name(index, part.frozen, kind), dtype, (part.numel(kind),), partial(part.read, kind))
        for index, part in model.parts()
        for kind, dtype in part.kinds().items()
    ]


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder (not a link) has a good manifest for the iteration in its name."""
    return good_manifest(folder) is not None


def good_manifest(folder: Path, with_files: bool = False) -> Manifest | None:
    """Return the manifest of a folder as in `is_checkpoint`, or None.

    with_files: None also if a file is missing or has another size.
    """
    try:
        content = manifest.read(folder, int(folder.name)) if is_folder(folder) else None
        if content is not None and with_files:
            check_sizes(folder, content)
        return content
    except DamagedError:
        return None
