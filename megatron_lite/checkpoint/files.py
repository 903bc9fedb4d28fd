"""Crash-safe files and folders: written to a temporary name, synced, then renamed into place.

This module writes ordinary safetensors files (a length, a JSON header, raw little-endian values) in one pass: without a
copy of the tensors, with checksums of the bytes written, an fsync, and a file mode that follows the umask.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.checkpoint import blocks
from megatron_lite.checkpoint.blocks import BlockSums, SavedFile
from megatron_lite.checkpoint.names import OUR_FILE, open_regular, reason, work_folders, work_path
from megatron_lite.parameter import SAFETENSORS_NAMES
from megatron_lite.run.durable_files import sync_folder

logger = logging.getLogger("megatron_lite")

FLUSH_BYTES = 16 * 2**20  # written back at a time, so that little is left for the final sync


class WrittenFile(NamedTuple):
    """A file just written."""

    saved: SavedFile
    data_start: int  # offset of the first tensor's bytes


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
    step = blocks.CHUNK_BYTES // flat.element_size()
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step].cpu().view(torch.uint8).numpy().data


def write_tensors(path: Path, tensors: Sequence[TensorToWrite], metadata: dict[str, str]) -> WrittenFile:
    """Write a new safetensors file and sync it; holds one tensor at a time.

    Raises:
        OSError: if the file exists or cannot be written.
    """
    header = safetensors_header({tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}, metadata)
    sums = BlockSums()
    with new_file(path) as append:

        def write(data: memoryview) -> None:
            append(data)
            sums.add(data)

        write(memoryview(header))
        for tensor in tensors:
            _write_tensor(tensor, write)
    return WrittenFile(sums.file(), len(header))


def safetensors_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """Return a safetensors header: its length and a JSON object. The values follow without gaps."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
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
        for start in range(0, len(chunk), blocks.BLOCK_BYTES):
            write(chunk[start : start + blocks.BLOCK_BYTES])


def write_text(path: Path, text: str) -> None:
    """Write a new text file and sync it."""
    with new_file(path) as write:
        write(memoryview(text.encode()))


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Callable[[memoryview], None]]:
    """Create a file and yield a function that appends to it; sync the file at the end."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
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


def sync_file(path: Path) -> None:
    """Make the content of an existing file durable."""
    with open_regular(path) as file:
        os.fsync(file.fileno())


def publish(temporary: Path, directory: Path, is_ours: Callable[[Path], bool]) -> None:
    """Rename a complete, synced folder to its final name. A valid copy exists at all times.

    Replace an older folder of that name if `is_ours`, otherwise move it to `<name>.aside-<nonce>` and keep it. A rename
    cannot replace a folder that has files, so the new folder waits as `.ready-<name>-<nonce>` while the old one moves
    away. After a crash in between, `recover` completes the replacement.
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
        logger.warning("%s is not a complete checkpoint or export of this program; moved to %s", directory, old.name)
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

    only: the final name of one folder, if `root` also holds files of other programs; None: all.
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
    """Delete our files in a folder, then the folder, unless it holds anything else.

    Links are unlinked, never followed. Failures only log a warning, because nothing depends on the deletion.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            foreign = []
            for name in sorted(os.listdir(descriptor)):
                if OUR_FILE.fullmatch(name) and not stat.S_ISDIR(os.lstat(name, dir_fd=descriptor).st_mode):
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
