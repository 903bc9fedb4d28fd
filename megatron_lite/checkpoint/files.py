"""Tensors in files, and folders that survive crashes.

Reading any bytes of a checkpoint reads and checks the blocks that contain them. This module writes
ordinary safetensors files (a length, a JSON header, raw little-endian values) in one pass: without
a copy of the tensors, with an fsync, and a file mode that follows the umask. Folders are written to
a temporary name, synced, then renamed into place.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpoint.blocks import (
    BLOCK_BYTES,
    DIFFERS,
    SHORTER,
    BlockSums,
    SavedFile,
    crc32,
)
from megatron_lite.checkpoint.names import OUR_FILE, reason, work_folders, work_path
from megatron_lite.checkpoint.rotation import pinned
from megatron_lite.errors import DamagedError
from megatron_lite.parameter import SAFETENSORS_NAMES
from megatron_lite.run.durable_files import sync_folder
from megatron_lite.run.regular_files import open_regular

logger = logging.getLogger("megatron_lite")

CHUNK_BYTES = 64 * 2**20  # memory for one read, and for one copy from a device
LARGEST_BLOCK_BYTES = (
    CHUNK_BYTES  # most that a reader keeps in memory; older versions have larger blocks
)
AHEAD_BYTES = 32 * 2**20  # read-ahead of the disk while a processor sums earlier blocks
FLUSH_BYTES = 16 * 2**20  # written back at a time, so that little is left for the final sync

# -- writing
# -----------------------------------------------------------------------------------------------------------


class WrittenFile(NamedTuple):
    """A file just written."""

    saved: SavedFile
    data_start: int  # offset of the first tensor's bytes


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a manifest."""
    return str(dtype).removeprefix("torch.")


class TensorToWrite(NamedTuple):
    """A tensor to write; `read` is called once and may create the values only then."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def chunks(tensor: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes in chunks of at most `CHUNK_BYTES`; copies only from devices."""
    flat = tensor.detach().contiguous().view(-1)
    step = CHUNK_BYTES // flat.element_size()
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step].cpu().view(torch.uint8).numpy().data


def write_tensors(
    path: Path,
    tensors: Sequence[TensorToWrite],
    metadata: dict[str, str],
    progress: Callable[[int], None],
) -> WrittenFile:
    """Write a new safetensors file and sync it, one tensor in memory at a time. progress: gets each
    tensor's bytes.

    Raises:
        OSError: if the file exists or cannot be written.
    """
    header = safetensors_header(
        {tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}, metadata
    )
    sums = BlockSums()
    with new_file(path) as append:

        def write(data: memoryview) -> None:
            append(data)
            sums.add(data)

        write(memoryview(header))
        for tensor in tensors:
            _write_tensor(tensor, write)
            progress(tensor.num_bytes)
    return WrittenFile(sums.file(), len(header))


def safetensors_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
) -> bytes:
    """Return a safetensors header: its length and a JSON object. The values follow without gaps."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _write_tensor(tensor: TensorToWrite, write: Callable[[memoryview], None]) -> None:
    """Write a tensor's bytes. A separate function, so that its locals free the tensor."""
    values = tensor.read()
    found, wanted = (tuple(values.shape), values.dtype), (tensor.shape, tensor.dtype)
    assert found == wanted, (tensor.name, found, wanted)
    for chunk in chunks(values):
        for start in range(0, len(chunk), BLOCK_BYTES):
            write(chunk[start : start + BLOCK_BYTES])


def write_text(path: Path, text: str) -> None:
    """Write a new text file and sync it."""
    with new_file(path) as write:
        write(memoryview(text.encode()))


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Callable[[memoryview], None]]:
    """Create a file and yield a function that appends to it; sync the file at the end."""
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
    )
    size = flushed = 0

    def write(data: memoryview) -> None:
        nonlocal size, flushed
        while data:
            count = os.write(descriptor, data)
            data, size = data[count:], size + count
        if size - flushed >= FLUSH_BYTES and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # a hint, which the system may not support
                os.posix_fadvise(descriptor, flushed, size - flushed, os.POSIX_FADV_DONTNEED)
            flushed = size

    try:
        yield write
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- reading
# -----------------------------------------------------------------------------------------------------------


class Files:
    """A folder's files as they are now; caches the latest open file and the latest partially read
    block.

    saved: files whose blocks are checked when read.
    follow_links: see `open_regular`.
    """

    def __init__(
        self,
        folder: Path,
        saved: Mapping[str, SavedFile] = MappingProxyType({}),
        follow_links: bool = False,
    ) -> None:
        self._folder = folder
        self._saved = saved
        self._follow_links = follow_links
        self.check = pinned(folder)
        self._name = ""
        self._file: io.FileIO | None = None
        self._block, self._block_number = memoryview(b""), -1
        # In the open file: start and end of the current sequential read, and the end of the
        # read-ahead.
        self._start = self._end = self._asked = 0
        self.checked: dict[str, list[list[int]]] = {}  # by file, ranges of blocks read and verified

    def read(self, name: str, offset: int, dtype: torch.dtype, target: Tensor) -> None:
        """Read elements of this dtype into a tensor (n,), rounding to nearest if its dtype differs.

        Raises:
            DamagedError, OSError: if a checksum differs, the file is too short or it cannot be
                opened.
            RotatedError: if the folder is gone or was replaced: two checkpoints are never mixed.
        """
        if self._file is None or name != self._name:
            self.close()
            try:
                self._name, self._file = name, open_regular(self._folder / name, self._follow_links)
            finally:
                self.check()
            self._start = self._end = self._asked = 0
        for part in target.split(CHUNK_BYTES // dtype.itemsize):
            is_direct = part.dtype == dtype and part.device.type == "cpu"
            values = part if is_direct else torch.empty(part.numel(), dtype=dtype)
            self._read(offset, values.view(torch.uint8).numpy().data)
            if not is_direct:
                part.copy_(values)
            offset += values.nbytes

    def _read(self, offset: int, target: memoryview) -> None:
        saved, end = self._saved.get(self._name), offset + len(target)
        if saved is None or saved.block_bytes > LARGEST_BLOCK_BYTES:
            self._fill(offset, target)
            return
        for number in saved.blocks_around(offset, end):
            start, stop, expected = saved.block(number)
            low, high = max(start, offset), min(stop, end)
            part = target[low - offset : high - offset]
            if number == self._block_number:
                part[:] = self._block[low - start : high - start]
                continue
            is_whole = high - low == stop - start
            block = part if is_whole else memoryview(bytearray(stop - start))
            self._fill(start, block)
            if crc32(block) != expected:
                raise DamagedError(f"{self._name}: {DIFFERS}")
            self._note(number)
            if not is_whole:
                self._block, self._block_number = block, number
                part[:] = block[low - start : high - start]

    def _fill(self, offset: int, target: memoryview) -> None:
        """Read bytes without checking them."""
        assert self._file is not None
        self._file.seek(offset)
        if offset != self._end:
            self._start = self._end = self._asked = offset
        while target:
            count = self._file.readinto(target[:BLOCK_BYTES])
            if not count:
                raise DamagedError(f"{self._name}: {SHORTER}")
            target = target[count:]
            self._end += count
            self._read_ahead(self._file.fileno())

    def _read_ahead(self, descriptor: int) -> None:
        """Ask the system to read ahead, farther the longer a file is read sequentially.

        The kernel itself often reads only 128 KiB ahead, so the disk idles while a processor sums.
        """
        wanted = self._end + min(self._end - self._start, AHEAD_BYTES)
        if wanted - self._asked >= AHEAD_BYTES // 4 and hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):
                os.posix_fadvise(
                    descriptor, self._asked, wanted - self._asked, os.POSIX_FADV_WILLNEED
                )
            self._asked = wanted

    def _note(self, number: int) -> None:
        """Record a good block."""
        ranges = self.checked.setdefault(self._name, [])
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file, self._block_number = None, -1


# -- folders
# -----------------------------------------------------------------------------------------------------------


def publish(temporary: Path, directory: Path, is_ours: Callable[[Path], bool]) -> None:
    """Rename a complete, synced folder to its final name. A valid copy exists at all times.

    Replaces an older folder of that name if `is_ours`, otherwise renames it to
    `<name>.aside-<nonce>`. A rename cannot replace a folder with files, so the new folder waits as
    `.ready-<name>-<nonce>` while the old one is moved. After a crash in between, `recover`
    completes the replacement.
    """
    nonce = temporary.name[-16:]
    if not os.path.lexists(directory):
        os.rename(temporary, directory)
        sync_folder(directory.parent)
        return
    ready, old = work_path(directory, "ready", nonce), work_path(directory, "trash", nonce)
    ours = is_ours(directory)
    if not ours:
        old = directory.with_name(f"{directory.name}.aside-{nonce}")
        logger.warning(
            "%s is not a complete checkpoint or export of this program; moved to %s",
            directory,
            old.name,
        )
    os.rename(temporary, ready)
    sync_folder(directory.parent)
    os.rename(directory, old)
    try:
        os.rename(ready, directory)
    except OSError:
        os.rename(old, directory)
        raise
    sync_folder(directory.parent)
    if ours:
        remove_folder(old)


def recover(root: Path, only: str | None = None) -> None:
    """Finish interrupted replacements in `root` and delete the remains of interrupted saves.

    only: one folder's final name, if `root` also contains other programs' files; None: all.
    """
    for path, name in work_folders(root, "ready"):
        if only in (None, name) and not os.path.lexists(root / name):
            os.rename(path, root / name)
            sync_folder(root)
    for kind in ("ready", "tmp", "trash"):
        for path, name in work_folders(root, kind):
            if only in (None, name):
                remove_folder(path)


def remove_folder(path: Path) -> None:
    """Delete our files in a folder, then the folder, unless it contains anything else.

    Links are unlinked, never followed. Failures only log a warning, because nothing depends on the
    deletion.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            foreign = []
            for name in sorted(os.listdir(descriptor)):
                if OUR_FILE.fullmatch(name) and not stat.S_ISDIR(
                    os.lstat(name, dir_fd=descriptor).st_mode
                ):
                    os.unlink(name, dir_fd=descriptor)
                else:
                    foreign.append(name)
        finally:
            os.close(descriptor)
        if not foreign:
            os.rmdir(path)
        elif not path.name.startswith(".trash-"):
            logger.warning("%s keeps files of other programs: %s", path, ", ".join(foreign[:5]))
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("cannot delete %s: %s", path, reason(error))
