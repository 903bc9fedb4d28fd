"""Files and folders that survive a crash: written aside, synced, then renamed into place.

Safetensors files are written here by hand (a length, a JSON header, raw little-endian values) because one pass then
does everything: no copy of the tensors, the CRC-32 of what was written, an fsync, and a file mode that follows the
umask. The result is an ordinary safetensors file.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import math
import os
import re
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_lite.run.durable_files import sync_folder

logger = logging.getLogger("megatron_lite")

CHUNK_BYTES = 64 * 2**20  # of memory for one read or write
SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# .tmp: being written. .ready: complete, about to replace an older folder of that name. .trash: being deleted.
# Every name that checkpoints and exports give their files: nothing else is ever deleted.
_OUR_FILE = re.compile(
    r"rank_[0-9]{3,7}\.safetensors|manifest\.json"
    r"|model(-[0-9]{5}(-of-[0-9]{5})?)?\.safetensors|model\.safetensors\.index\.json"
    r"|(config|generation_config)\.json"
    # Of a tokenizer: data/tokenizing.py copies these.
    r"|(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json"
    r"|(vocab|merges)\.txt|chat_template\.jinja"
)
_WORK_NAME = re.compile(r"\.(tmp|ready|trash)-([^/]+)-([0-9a-f]{16})")


class WrittenFile(NamedTuple):
    """What is known of a file just written: bytes, CRC-32 of all of them, and where the tensors' bytes begin."""

    size: int
    crc32: int
    data_start: int


class TensorToWrite(NamedTuple):
    """A tensor that need not exist before `read` is called, once, to write it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> TensorToWrite:
        """One that exists already."""
        return cls(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def new_nonce() -> str:
    """16 hexadecimal digits that no other save uses."""
    return secrets.token_hex(8)


def work_path(directory: Path, kind: str, nonce: str) -> Path:
    """The name beside `directory` under which it is written (`tmp`), swapped in (`ready`) or deleted (`trash`)."""
    return directory.with_name(f".{kind}-{directory.name}-{nonce}")


def work_folders(root: Path, kind: str) -> list[tuple[Path, str]]:
    """Folders of that kind in `root`, each with the name it stands for; links are not folders."""
    found = []
    for path in sorted(root.iterdir()):
        match = _WORK_NAME.fullmatch(path.name)
        if match and match[1] == kind and is_folder(path):
            found.append((path, match[2]))
    return found


def has_only_our_files(folder: Path) -> bool:
    """True for a folder (no link) in which every name is one of ours."""
    return is_folder(folder) and all(_OUR_FILE.fullmatch(path.name) for path in folder.iterdir())


def is_folder(path: Path) -> bool:
    """True for a directory that is not a symbolic link."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except OSError:
        return False


def chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in pieces of at most `CHUNK_BYTES`; only pieces of device tensors are copied."""
    flat = tensor.detach().contiguous().view(-1)
    step = CHUNK_BYTES // flat.element_size()
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step].cpu().view(torch.uint8).numpy().data


def write_tensors(path: Path, tensors: Sequence[TensorToWrite], metadata: dict[str, str]) -> WrittenFile:
    """Write a new safetensors file and sync it; each tensor is read once and let go before the next one is.

    Raises:
        OSError: if the file exists or cannot be written.
    """
    header = safetensors_header({tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors}, metadata)
    crc = zlib.crc32(header)
    with new_file(path) as write:
        write(memoryview(header))
        for tensor in tensors:
            crc = _write_tensor(tensor, write, crc)
    num_bytes = sum(tensor.num_bytes for tensor in tensors)
    return WrittenFile(size=len(header) + num_bytes, crc32=crc, data_start=len(header))


def safetensors_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """What stands before the values of tensors, which follow without gaps: its length and a JSON object."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _write_tensor(tensor: TensorToWrite, write: Callable[[memoryview], None], crc: int) -> int:
    """Write the bytes and return the CRC-32 with them. A function of its own: its locals end with the tensor."""
    values = tensor.read()
    found, wanted = (tuple(values.shape), values.dtype), (tensor.shape, tensor.dtype)
    assert found == wanted, (tensor.name, found, wanted)
    for chunk in chunks(values):
        write(chunk)
        crc = zlib.crc32(chunk, crc)
    return crc


def write_text(path: Path, text: str) -> None:
    """Write a new text file and sync it."""
    with new_file(path) as write:
        write(memoryview(text.encode()))


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Callable[[memoryview], None]]:
    """A function that appends to a new file; the file is synced at the end."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)

    def write(data: memoryview) -> None:
        while data:
            data = data[os.write(descriptor, data) :]

    try:
        yield write
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the content of a file durable that another function has written."""
    with open_regular(path) as file:
        os.fsync(file.fileno())


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file for reading, unbuffered; never waits (as on a pipe).

    Raises:
        OSError: if it cannot be opened or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return io.FileIO(descriptor)


def read_into(file: io.FileIO, offset: int, target: Tensor) -> None:
    """Read bytes of a file into a tensor (n,) uint8 on any device, at most `CHUNK_BYTES` at a time.

    Raises:
        EOFError: if the file is shorter.
    """
    file.seek(offset)
    for chunk in target.split(CHUNK_BYTES):
        host = chunk if chunk.device.type == "cpu" else torch.empty(chunk.numel(), dtype=torch.uint8)
        view = host.numpy().data
        while view:
            count = file.readinto(view)
            if not count:
                raise EOFError
            view = view[count:]
        if host is not chunk:
            chunk.copy_(host)


def publish(temporary: Path, directory: Path, is_ours: Callable[[Path], bool]) -> None:
    """Give a complete, synced folder its final name, so that a valid copy exists at every moment.

    An older folder of that name is replaced if `is_ours`, otherwise moved to `<name>.aside-<nonce>` and kept. Rename
    cannot replace a folder that has files, so the new one waits as `.ready-<name>-<nonce>` while the old one moves
    away; `recover` finishes what a crash in between leaves.
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
        logger.warning("%s is not a complete checkpoint or export of this program: moved to %s", directory, old.name)
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
    """Finish interrupted replacements in `root` and delete what interrupted saves have left there.

    `only`: of the folder of that name, where `root` is not ours alone.
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
    """Delete our files in a folder, then the folder; anything else in it stays, and then the folder too.

    Links are unlinked, never followed. A failure is a warning: nothing depends on the deletion.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            foreign = []
            for name in sorted(os.listdir(descriptor)):
                if _OUR_FILE.fullmatch(name) and not stat.S_ISDIR(os.lstat(name, dir_fd=descriptor).st_mode):
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
        logger.warning("cannot delete %s: %s", path, error.strerror or error)
