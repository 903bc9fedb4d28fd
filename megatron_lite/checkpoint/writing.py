"""Save a training checkpoint: root/<iteration>/ with one safetensors file per rank and
manifest.json.

Every rank writes only its own shards, into a folder `.tmp-<iteration>-<save id>`. Once all have
succeeded, rank 0 adds the manifest, syncs, and renames the folder to its final name: a checkpoint
is complete or does not exist.

A thread per rank does the work, step by step: prepare, write, complete. The threads do not
communicate: after each step the main threads exchange results over the CPU group. They wait at
once, or with --async_checkpoint agree between two iterations on whether all threads are done. Then
the thread first copies the shards into host memory. Only an update changes shards, so training
continues with the next forward and backward pass while they are copied, and the update waits for
the rest of the copy.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_lite.checkpoint import files, manifest
from megatron_lite.checkpoint.blocks import SavedFile, Slice, check_sizes
from megatron_lite.checkpoint.files import TensorToWrite, WrittenFile, dtype_name, logger
from megatron_lite.checkpoint.manifest import Manifest, SavedParameter, tensor_name
from megatron_lite.checkpoint.names import (
    MANIFEST_NAME,
    new_nonce,
    rank_file,
    work_path,
)
from megatron_lite.config import Config, flatten
from megatron_lite.config.dimensions import DATA, EXPERT_PARTS, RankGrid
from megatron_lite.distributed.agreement import together, write_together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import DamagedError, FolderLostError, OutOfMemoryError, StorageError
from megatron_lite.kernels.weight_shard import weights_of
from megatron_lite.run.durable_files import pause_s, sync_folder
from megatron_lite.run.host import available_bytes
from megatron_lite.run.progress_line import ByteProgress
from megatron_lite.zero.flat_shard import FlatShard
from megatron_lite.zero.layout import round_up
from megatron_lite.zero.multi_stage import MultiStage

if TYPE_CHECKING:
    from megatron_lite.run.stop_signal import StopSignal

_GIB = 2**30
_ALIGNMENT = 128  # bytes: the tensors of a copy start where a GPU copies fast
_LOOK_S = 0.01  # between looks at the thread while waiting for it


class Save:
    """A checkpoint to write: the three steps of `Saving`, which the threads of all ranks take.

    Args:
        state: JSON, the same on every rank.
        check: called by rank 0 before it creates and before it publishes the folder, and by a rank
            that fails; raises a RunError if the directory above `root` no longer belongs to this
            run.
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
        self.tensors = tensors_of(model.saved_parts())
        self._model = model
        self._state = state
        self._config = config
        self.distributed = distributed
        self.check, self.what = check, f"the checkpoint of iteration {iteration}"

    def draw_id(self) -> None:
        """Name the temporary folder of the next attempt. Collective."""
        self._save_id = self.distributed.broadcast_object(new_nonce())
        self._temporary = work_path(self.folder, "tmp", self._save_id)
        self.own_path = self._temporary / rank_file(self.distributed.rank)

    def prepare(self) -> None:
        """Create the temporary folder and delete remains of interrupted saves, on rank 0.

        Raises:
            OSError: if the folder cannot be created.
            RunError: from `check`.
        """
        if self.distributed.rank == 0:
            self.check()
            self.root.mkdir(parents=True, exist_ok=True)
            files.recover(self.root)
            self._temporary.mkdir()

    def write(self, shown: bool = False) -> WrittenFile:
        """Write and sync this rank's file.

        shown: whether rank 0 shows its progress.

        Raises:
            OSError: if it cannot be written.
        """
        if not self._temporary.is_dir():
            raise OSError(
                errno.ENOENT, "the folder is not visible here, all ranks need the same file system"
            )
        metadata = manifest.file_metadata(self._save_id, self.iteration, self.distributed.rank)
        shown = shown and self.distributed.rank == 0
        with ByteProgress(f"saving {self.folder}", num_bytes(self.tensors), shown) as progress:
            return files.write_tensors(self.own_path, self.tensors, metadata, progress.add)

    def complete(self, written: Sequence[WrittenFile]) -> None:
        """Add the manifest and rename, on rank 0. written: each rank's file.

        Raises:
            OSError: if it cannot be written.
            RunError: from `check`.
        """
        if self.distributed.rank != 0:
            return
        rank_of, parts = self._model.pipeline.rank_of, self._model.saved_parts(of_all=True)
        content = Manifest(
            save_id=self._save_id,
            iteration=self.iteration,
            world_size=self.distributed.world_size,
            config=flatten(self._config),
            state=self._state,
            files={rank_file(rank): file.saved for rank, file in enumerate(written)},
            parameters=locate_parameters(
                [(rank_of[stage], part) for stage, part in parts], self.distributed.grid, written
            ),
        )
        files.write_text(self._temporary / MANIFEST_NAME, manifest.dump(content))
        sync_folder(self._temporary)
        self.check()
        files.publish(
            self._temporary, self.folder, lambda folder: good_manifest(folder) is not None
        )

    def abandon(self) -> None:
        """Delete what was written. Not collective; never raises."""
        if self.distributed.rank == 0:
            files.remove_folder(self._temporary)


class Saving:
    """A save under way: a thread writes, and the caller waits at once, with `finish`, or calls
    `advance` from time to time.

    Without a copy, and in a hurry, each rank waits for its own thread, and then in an exchange for
    the others: a rank whose file system hangs ends the run once the exchange times out.

    copy: lets training continue; call `wait_for_copy` before anything changes the shards.
    retries: attempts after the first, with growing pauses. A lost directory is not retried.
    """

    is_published = False
    num_bytes = 0  # of all ranks' files, once published
    seconds = 0.0  # from the start until then
    _failure: Exception | None = None

    def __init__(self, save: Save, retries: int = 0, copy: HostCopy | None = None) -> None:
        self.save = save
        self._retries, self._copy = retries, copy
        self._distributed = save.distributed
        self._start_s = time.perf_counter()
        self._distributed.wait_for_device()  # the thread's stream does not wait for the update's
        self.blocked_s = time.perf_counter() - self._start_s  # time that training waited
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._hurry = threading.Event()
        self._copying = None if copy is None else self._pool.submit(copy.fill)
        if copy is not None:
            save.tensors = copy.tensors(save.tensors)
        self._jobs = self._attempts()
        self._job: Future[Any] | None = None if copy is None else next(self._jobs)

    def wait_for_copy(self) -> None:
        """Wait until the shards may change."""
        if self._copying is not None and not self._copying.done():
            start_s = time.perf_counter()
            wait([self._copying])
            self.blocked_s += time.perf_counter() - start_s

    def advance(self, hurry: bool = False) -> bool:
        """Go on, without waiting if there is a copy; return whether the checkpoint is published.
        Collective.

        hurry: end the pauses, and wait; the same on every rank.

        Raises:
            StorageError: on every rank, if any rank could not write; older checkpoints are
                untouched. Later calls raise it again.
        """
        if self._failure is not None:
            raise self._failure
        if hurry:
            self._hurry.set()
        job = self._job
        if not self.is_published and (
            hurry or job is None or not self._distributed.agree_max(not job.done())
        ):
            try:
                self._job = next(self._jobs, None)
            except Exception as error:
                self._failure = error
                self._pool.shutdown(wait=False)
                raise
        return self.is_published

    def finish(self, hurry: bool = False, stop: StopSignal | None = None) -> None:
        """Wait until the checkpoint is published; raises like `advance`. Collective.

        While a copy is written and during pauses the ranks keep agreeing, so that no exchange times
        out. stop: at a signal to any rank, all hurry.
        """
        start_s = time.perf_counter()
        while not self.advance(hurry):
            assert self._job is not None
            wait([self._job], _LOOK_S)
            hurry = hurry or bool(self._distributed.agree_max(stop.received if stop else 0))
        self.blocked_s += time.perf_counter() - start_s

    def _attempts(self) -> Iterator[Future[Any]]:
        """Yield the thread's jobs, and go on with the next once all ranks are done with one."""
        is_last = False
        for attempt in itertools.count(1):
            try:
                yield from self._attempt()
                self.seconds = time.perf_counter() - self._start_s
                self.is_published = True
                return self._pool.shutdown()
            except FolderLostError:
                raise
            except StorageError as error:
                if attempt > self._retries or is_last:
                    raise
                training = "Training waits" if self._copy is None else "Training continues"
                text = "%s\n%s; trying again in %.0f s (%d of %d, --save_retries)"
                logger.warning(text, error, training, pause_s(attempt), attempt, self._retries)
            yield self._pool.submit(self._hurry.wait, pause_s(attempt))
            is_last = self._hurry.is_set()

    def _attempt(self) -> Iterator[Future[Any]]:
        save = self.save
        save.draw_id()
        try:
            yield from self._step(save.prepare, save.root)
            rows = yield from self._step(self._write, save.own_path, num_bytes(save.tensors))
            written = [WrittenFile(SavedFile(*saved), data_start) for saved, data_start in rows]
            yield from self._step(partial(save.complete, written), save.folder)
            self.num_bytes = sum(file.saved.size for file in written)
        except Exception:
            save.abandon()
            raise

    def _step(
        self, action: Callable[[], Any], path: Path, bytes_needed: int = 0
    ) -> Generator[Future[Any], None, list[Any]]:
        """Run an action in the thread; return its results on all ranks."""

        def act() -> Any:
            try:
                return action()
            except OSError:
                with contextlib.suppress(OSError):  # an unresponsive file system
                    self.save.check()  # a lost directory explains the failure
                raise

        job = self._pool.submit(act)
        if self._copy is not None and not self._hurry.is_set():
            yield job
        what = self.save.what
        return write_together(self._distributed, what, path, job.result, bytes_needed)

    def _write(self) -> WrittenFile:
        if self._copying is not None:
            self._copying.result()  # raises its error
        return self.save.write(shown=self._copying is None)


def write_now(save: Save) -> None:
    """Write and publish a checkpoint. See `Saving`."""
    Saving(save).finish()


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
            name = tensor_name(index, part.frozen, part.is_state, kind, part.has_experts)
            read = partial(part.read, kind)
            found.append(TensorToWrite(name, dtype, (part.numel(kind),), read))
        assert len({tensor.name for tensor in found}) == len(found), "a file needs other names"
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
            owner, number = place[DATA], place["tensor"]
            if part.has_experts:
                owner, number = owner // grid.sizes["expert"], place[EXPERT_PARTS]
            for kind, dtype in part.kinds().items():
                for spec, tile in part.layout.tiles(owner, number):
                    if part.has(kind, spec) and tile.holders[0] == number:
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
    return ranks * num_bytes(tensors_of(model.saved_parts(of_all=True))) if model.training else 0


def num_bytes(tensors: Iterable[TensorToWrite]) -> int:
    """Return the bytes of some tensors."""
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
            part for part in model.saved_parts(of_all=True) if rank_of[part[0]] == pipeline_rank
        )
        shapes = {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}
        metadata = manifest.file_metadata(new_nonce(), iteration, 10**digits - 1)
        total += ranks * (len(files.safetensors_header(shapes, metadata)) + num_bytes(tensors))
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
        for _, part in model.saved_parts()
        for kind in part.kinds()
    ]


# -- a copy of the shards
# ------------------------------------------------------------------------------------------------------


class HostCopy:
    """Host memory for a copy of the shards, from which --async_checkpoint writes."""

    def __init__(self, model: MultiStage, distributed: Distributed) -> None:
        self._model, self._device = model, distributed.device
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

    def fill(self) -> None:
        """Copy this rank's shards."""
        _copy_all(self._copies, _stored(self._model), self._device)

    def tensors(self, tensors: Sequence[TensorToWrite]) -> list[TensorToWrite]:
        """Return this rank's `tensors_of` as the copy has them."""
        pairs = zip(self._copies, tensors, strict=True)
        return [tensor._replace(read=partial(weights_of, copy)) for copy, tensor in pairs]


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


def open_host_copy(config: Config, model: MultiStage, distributed: Distributed) -> HostCopy | None:
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
    return together(distributed, lambda: HostCopy(model, distributed))
