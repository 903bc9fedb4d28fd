"""Save a training checkpoint: root/<iteration>/ with one safetensors file per rank and
manifest.json.

Every rank writes only its own shards, into a folder `.tmp-<iteration>-<save id>`. Once all have
succeeded, rank 0 adds the manifest, syncs, and renames the folder to its final name: a checkpoint
is complete or does not exist.

With --async_checkpoint, a thread per rank copies the shards into host memory and writes the files.
Only an update changes shards, so training continues with the next forward and backward pass while
they are copied, and the update waits for the rest of the copy. The threads do not communicate:
between two iterations the main threads agree, over the CPU group, on whether all files are written;
then they gather sizes and checksums, and rank 0's thread publishes.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.blocks import SavedFile, Slice, check_sizes
from megatron_lite.checkpoint.files import TensorToWrite, WrittenFile, dtype_name, logger
from megatron_lite.checkpoint.manifest import Manifest, SavedParameter, tensor_name
from megatron_lite.checkpoint.names import (
    MANIFEST_NAME,
    is_folder,
    new_nonce,
    rank_file,
    reason,
    work_path,
)
from megatron_lite.config import Config, flatten
from megatron_lite.config.dimensions import DATA, RankGrid
from megatron_lite.distributed.agreement import together, write_together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import DamagedError, OutOfMemoryError
from megatron_lite.kernels.weight_shard import weights_of
from megatron_lite.run.durable_files import pause_s, sync_folder
from megatron_lite.run.host import available_bytes
from megatron_lite.run.progress_line import ByteProgress
from megatron_lite.zero.flat_shard import FlatShard
from megatron_lite.zero.layout import round_up
from megatron_lite.zero.multi_stage import MultiStage

_GIB = 2**30
_ALIGNMENT = 128  # bytes: the tensors of a copy start where a GPU copies fast
_DONE, _WORKING, _FAILED = range(3)
T = TypeVar("T")


class Save:
    """A checkpoint being written; methods are collective, except `write`, `complete` and `abandon`.

    Args:
        state: JSON, the same on every rank.
        check: called by rank 0 before it creates and before it publishes the folder; raises a
            RunError if the directory above `root` no longer belongs to this run.
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
        self.root = root
        self.iteration = iteration
        self.folder = root / str(iteration)
        self.tensors = tensors_of(model.parts())
        self._model = model
        self._state = state
        self._config = config
        self._distributed = distributed
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
                self.root.mkdir(parents=True, exist_ok=True)
                files.recover(self.root)
                self._temporary.mkdir()

        write_together(self._distributed, self._what, self.root, prepare)
        return self

    def write(self, shown: bool = False) -> WrittenFile:
        """Write and sync this rank's file; any thread may call this, and retry after a failure.

        shown: whether rank 0 shows its progress.

        Raises:
            OSError: if it cannot be written.
        """
        if not self._temporary.is_dir():
            raise OSError(
                errno.ENOENT, "the folder is not visible here, all ranks need the same file system"
            )
        self._own_path.unlink(missing_ok=True)
        metadata = manifest.file_metadata(self._save_id, self.iteration, self._distributed.rank)
        shown = shown and self._distributed.rank == 0
        with ByteProgress(f"saving {self.folder}", _num_bytes(self.tensors), shown) as progress:
            return files.write_tensors(self._own_path, self.tensors, metadata, progress.add)

    def gather(self, write: Callable[[], WrittenFile]) -> list[WrittenFile]:
        """Gather all ranks' files; `write` returns this rank's.

        Raises:
            StorageError: on every rank, if any rank cannot write; older checkpoints are untouched.
        """
        gathered = write_together(
            self._distributed, self._what, self._own_path, write, _num_bytes(self.tensors)
        )
        return [WrittenFile(SavedFile(*saved), data_start) for saved, data_start in gathered]

    def confirm(self, complete: Callable[[], None]) -> None:
        """Run or await `self.complete` on all ranks. Raises like `gather`."""
        write_together(self._distributed, self._what, self.folder, complete)

    def complete(self, written: list[WrittenFile]) -> None:
        """Add the manifest and rename, on rank 0; any thread may call this, and retry after a
        failure.

        Raises:
            OSError: if it cannot be written.
            RunError: from `check`.
        """
        if self._distributed.rank != 0 or self._is_published():
            return
        rank_of, parts = self._model.pipeline.rank_of, self._model.all_parts()
        content = Manifest(
            save_id=self._save_id,
            iteration=self.iteration,
            world_size=self._distributed.world_size,
            config=flatten(self._config),
            state=self._state,
            files={rank_file(rank): file.saved for rank, file in enumerate(written)},
            parameters=locate_parameters(
                [(rank_of[stage], part) for stage, part in parts], self._distributed.grid, written
            ),
        )
        path = self._temporary / MANIFEST_NAME
        path.unlink(missing_ok=True)
        files.write_text(path, manifest.dump(content))
        sync_folder(self._temporary)
        self._check()
        files.publish(
            self._temporary, self.folder, lambda folder: good_manifest(folder) is not None
        )

    def _is_published(self) -> bool:
        """Return whether a failed attempt has published the checkpoint; undo it if it is
        incomplete."""
        if is_folder(self._temporary):
            return False
        content = good_manifest(self.folder)
        if content is not None and content.save_id == self._save_id:
            sync_folder(self.root)
            return True
        os.rename(work_path(self.folder, "ready", self._save_id), self._temporary)
        return False

    def abandon(self) -> None:
        """Delete what was written. Not collective; never raises."""
        if self._distributed.rank == 0:
            files.remove_folder(self._temporary)


def write_now(save: Save) -> int:
    """Write and publish a checkpoint; return the bytes of all ranks' files. See `Save`."""
    try:
        written = save.prepare().gather(partial(save.write, shown=True))
        save.confirm(lambda: save.complete(written))
        return sum(file.saved.size for file in written)
    except Exception:
        save.abandon()
        raise


def tensors_of(parts: Iterable[tuple[int, FlatShard]]) -> list[TensorToWrite]:
    """List a rank's shards in the order of `locate_parameters`; writing reads them one at
    a time.

    parts: with their stages.
    """
    found = []
    for index, part in parts:
        assert part.frozen or part.has_state, (
            f"stage {index}: a checkpoint needs moments, this model is for inference"
        )
        for kind, dtype in part.kinds().items():
            name, read = tensor_name(index, part.frozen, kind), partial(part.read, kind)
            found.append(TensorToWrite(name, dtype, (part.numel(kind),), read))
    return found


def locate_parameters(
    parts: Sequence[tuple[int, FlatShard]], grid: RankGrid, written: Sequence[WrittenFile]
) -> dict[str, SavedParameter]:
    """Return every parameter's slices, in the order of the model.

    A file holds the shards part by part, kind by kind. Replicated elements are those of their first
    holder.

    parts: of the whole model, each with its pipeline rank. written: each rank's file.
    """
    parameters: dict[str, SavedParameter] = {}
    for _, part in parts:
        for slot in part.layout.slots:
            empty: dict[str, list[Slice]] = {
                kind: [] for kind in part.kinds() if part.has(kind, slot.spec)
            }
            parameters[slot.spec.name] = SavedParameter(
                dtype_name(part.kinds()["weights"]), tuple(slot.spec.shape), empty
            )
    for rank, file in enumerate(written):
        place = grid.place(rank)
        offset = file.data_start
        for part in [part for pipeline_rank, part in parts if pipeline_rank == place["pipeline"]]:
            for kind, dtype in part.kinds().items():
                for spec, tile in part.layout.tiles(place[DATA], place["tensor"]):
                    if part.has(kind, spec) and tile.holders[0] == place["tensor"]:
                        start, num_bytes = (
                            count * dtype.itemsize for count in (tile.offset, tile.numel)
                        )
                        piece = Slice(
                            rank_file(rank), offset + start, num_bytes, tile.first, tile.width
                        )
                        parameters[spec.name].slices[kind].append(piece)
                offset += part.numel(kind) * dtype.itemsize
    for parameter in parameters.values():
        for pieces in parameter.slices.values():
            pieces.sort(key=lambda piece: piece.first)
    return parameters


def good_manifest(folder: Path, with_files: bool = False) -> Manifest | None:
    """Return a folder's manifest if it is good and matches the folder's name; None otherwise, or
    for a link.

    with_files: None also if a file is missing or has another size.
    """
    try:
        content = manifest.read(folder, int(folder.name))
        if with_files:
            check_sizes(folder, content.files)
        return content
    except DamagedError:
        return None


# -- sizes
# ------------------------------------------------------------------------------------------------------------


def shards_bytes(model: MultiStage, ranks: int) -> int:
    """Return the bytes of all ranks' shards in a checkpoint, 0 for inference; headers and manifest
    add little.

    ranks: with the same layers.
    """
    return ranks * _num_bytes(tensors_of(model.all_parts())) if model.training else 0


def _num_bytes(tensors: Iterable[TensorToWrite]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def files_bytes(model: MultiStage, world_size: int, iteration: int) -> int:
    """Return the bytes of all ranks' files in a checkpoint, including headers; without
    --pipeline_first."""
    total = 0
    peers = world_size // model.ranks.world_size
    rank_of = model.pipeline.rank_of
    # digits of the rank in the header
    kinds = Counter((rank // peers, len(str(rank))) for rank in range(world_size))
    for (pipeline_rank, digits), ranks in kinds.items():
        tensors = tensors_of(
            part for part in model.all_parts() if rank_of[part[0]] == pipeline_rank
        )
        shapes = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
        metadata = manifest.file_metadata(new_nonce(), iteration, 10**digits - 1)
        total += ranks * (len(files.safetensors_header(shapes, metadata)) + _num_bytes(tensors))
    return total


def host_copy_bytes(config: Config, model: MultiStage) -> int:
    """Return the host memory in bytes that a rank needs for --async_checkpoint; 0 without it."""
    if not (
        config.checkpoint.async_checkpoint
        and config.run.experiment_dir is not None
        and model.training
    ):
        return 0
    held = [
        [round_up(tensor.nbytes, _ALIGNMENT) for tensor in tensors] for tensors in _stored(model)
    ]
    # one at a time, when written
    joined = max((sum(sizes) for sizes in held if len(sizes) > 1), default=0)
    return sum(map(sum, held)) + joined


def _stored(model: MultiStage) -> list[tuple[Tensor, ...]]:
    """List the tensors behind each of a rank's `tensors_of`: the two halves of split weights,
    otherwise the shard.

    Joining the halves on the GPU would take memory there, which a side stream's pool never returns
    to training.
    """
    return [
        part.weights.stored if kind == "weights" else (part.read(kind),)
        for _, part in model.parts()
        for kind in part.kinds()
    ]


# -- in a thread
# ------------------------------------------------------------------------------------------------------


@dataclass
class _Pending:
    save: Save
    job: Future[Any]  # writes this rank's file; then, on rank 0, publishes
    start_s: float
    copied: threading.Event
    blocked_s: float = 0.0
    written: list[WrittenFile] | None = None  # all ranks' files; None while being written


class Finished(NamedTuple):
    """A published checkpoint."""

    folder: Path
    iteration: int
    num_bytes: int
    seconds: float  # since its start
    blocked_s: float  # time that training waited


class BackgroundSaves:
    """Asynchronous checkpointing: a copy of the shards in host memory, and at most one save in
    flight.

    Call `wait_for_copy` before anything changes the shards.

    retries: attempts to write a file after the first.
    """

    def __init__(self, model: MultiStage, distributed: Distributed, retries: int) -> None:
        self._distributed, self._retries = distributed, retries
        self._model = model
        stored = _stored(model)
        places = [round_up(tensor.nbytes, _ALIGNMENT) for tensor in chain.from_iterable(stored)]
        slab = _host_memory(sum(places), distributed.device)
        if distributed.device.type == "cuda" and _pin(slab, distributed.device):
            weakref.finalize(
                self, _unpin, slab
            ).atexit = False  # the driver does it, even if the GPU hangs
        pieces = iter(slab.split(places))
        self._copies = [
            [next(pieces)[: one.nbytes].view(one.dtype) for one in tensors] for tensors in stored
        ]
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending: _Pending | None = None
        self._hurry = threading.Event()

    @property
    def is_pending(self) -> bool:
        return self._pending is not None

    def begin(self, save: Save) -> None:
        """Start copying and writing the shards in the thread. `save` must be prepared."""
        assert self._pending is None, "finish the save before"
        start_s, copied = time.perf_counter(), threading.Event()
        self._distributed.wait_for_device()  # the thread's stream does not wait for the update's
        job = self._pool.submit(self._copy_and_write, save, copied)
        self._pending = _Pending(save, job, start_s, copied, time.perf_counter() - start_s)

    def wait_for_copy(self) -> None:
        """Wait until the shards may change."""
        if self._pending is not None and not self._pending.copied.is_set():
            start_s = time.perf_counter()
            self._pending.copied.wait()
            self._pending.blocked_s += time.perf_counter() - start_s

    def advance(self) -> bool:
        """Advance the save without waiting; return whether `finish` would not wait. Collective."""
        if self._pending is None:
            return False
        job = self._pending.job
        state = _WORKING if not job.done() else _DONE if job.exception() is None else _FAILED
        state = self._distributed.agree_max(state)
        if state == _DONE and self._pending.written is None:
            self._publish(self._pending)
            return False
        return state != _WORKING

    def finish(self, hurry: bool = False) -> Finished | None:
        """Wait until the checkpoint is published; None if no save is pending. Collective.

        hurry: retry failed writes without a pause.

        Raises:
            StorageError: on every rank, if any rank could not write; older checkpoints are
                untouched.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        if hurry:
            self._hurry.set()
        save = pending.save
        try:
            written = self._publish(pending) if pending.written is None else pending.written
            save.confirm(pending.job.result)
        except Exception:
            save.abandon()
            raise
        num_bytes = sum(file.saved.size for file in written)
        seconds = time.perf_counter() - pending.start_s
        return Finished(save.folder, save.iteration, num_bytes, seconds, pending.blocked_s)

    def _copy_and_write(self, save: Save, copied: threading.Event) -> WrittenFile:
        """Copy this rank's shards and write its file, in the thread."""
        try:
            _copy_all(self._copies, _stored(self._model), self._distributed.device)
            pairs = zip(self._copies, save.tensors, strict=True)
            save.tensors = [
                tensor._replace(read=partial(weights_of, copy)) for copy, tensor in pairs
            ]
        finally:
            copied.set()
        return self._insist(save, save.write)

    def _publish(self, pending: _Pending) -> list[WrittenFile]:
        """Gather sizes and checksums, and let rank 0's thread publish."""
        written = pending.written = pending.save.gather(pending.job.result)
        pending.job = self._pool.submit(
            self._insist, pending.save, partial(pending.save.complete, written)
        )
        return written

    def _insist(self, save: Save, action: Callable[[], T]) -> T:
        """Run an action in the thread; retry it after a system error."""
        for attempt in range(1, self._retries + 1):
            try:
                return action()
            except OSError as error:
                text = "cannot write the checkpoint of iteration %d: %s; trying again in %.0f s (%d of %d)"
                logger.warning(
                    text, save.iteration, reason(error), pause_s(attempt), attempt, self._retries
                )
            self._hurry.wait(pause_s(attempt))
        return action()


def _copy_all(
    copies: Sequence[Sequence[Tensor]], stored: Sequence[Sequence[Tensor]], device: torch.device
) -> None:
    """Copy tensors into host memory; on a GPU, on the thread's own stream, overlapped with
    training."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    with torch.cuda.stream(stream):  # None: nothing changes
        for copy, tensor in zip(
            chain.from_iterable(copies), chain.from_iterable(stored), strict=True
        ):
            copy.copy_(tensor, non_blocking=True)
        if stream is not None:
            stream.synchronize()


def _host_memory(num_bytes: int, device: torch.device) -> Tensor:
    """Return committed host memory, (num_bytes,) uint8; for a GPU, on its own pages."""
    if device.type != "cuda":
        return torch.zeros(num_bytes, dtype=torch.uint8).fill_(1)
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # a forked loader would get a copy of pages that a device may write
    pages.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(pages, dtype=torch.uint8).fill_(1)


def _pin(slab: Tensor, device: torch.device) -> bool:
    """Pin host memory, or warn if the driver refuses. torch's own pinned tensors take up to twice
    their size."""
    error = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 0))
    if error:
        text = "asynchronous checkpoints: CUDA cannot pin %.2f GiB of host memory (error %d); copies will be slower"
        logger.warning(text, slab.nbytes / _GIB, error)
        # CUDA keeps the error for the next kernel, which torch checks
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
    return not error


def _unpin(slab: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())


def open_background(
    config: Config, model: MultiStage, distributed: Distributed
) -> BackgroundSaves | None:
    """Allocate the host memory of --async_checkpoint; None without it. Collective.

    Raises:
        OutOfMemoryError: on every rank, if the ranks of a machine need more than is free.
    """
    if not (own := host_copy_bytes(config, model)):
        return None

    def check_memory() -> None:
        needed, free = own * distributed.local_world_size, available_bytes()
        facts = f"{own / _GIB:.2f} GiB per rank, {needed / _GIB:.2f} GiB on this machine, of {free / _GIB:.2f} GiB free"
        if needed > free:
            raise OutOfMemoryError(
                f"--async_checkpoint=1 copies the weights and the optimizer state into host memory: {facts}; leave it "
                "out, or use more machines"
            )
        logger.info("asynchronous checkpoints: a copy in host memory, %s", facts)

    together(distributed, check_memory)  # no rank allocates before all have checked
    return together(
        distributed, lambda: BackgroundSaves(model, distributed, config.checkpoint.save_retries)
    )
