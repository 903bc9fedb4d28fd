"""Atomic and durable file writes, and file locks."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path


def lock_file(descriptor: int, path: Path | None = None) -> bool:
    """Lock an open file until it is closed or the process ends; return False if another process has
    the lock.

    On a file system without locks every process succeeds.

    path: if given, also return False if this name no longer refers to the open file: the previous
        holder may have renamed or removed it between our `open` and our lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    try:
        return path is None or os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def replace_file(path: Path, data: bytes, sync: bool = False) -> None:
    """Write `data` to a temporary file and rename it to `path`. sync: return only once the file is
    on disk.

    Raises:
        OSError: if the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if error.filename is None:  # the system names no file when a write fails
            error.filename = str(path)
        raise
    if sync:
        sync_folder(path.parent)


def overwrite_file(path: Path, data: bytes) -> None:
    """Overwrite a file in place, for a full disk.

    Readers never see a mixture: one call writes the data, padded with spaces to the old length.

    Raises:
        OSError: if the file does not exist or cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size = max(os.fstat(descriptor).st_size, len(data))
        if os.write(descriptor, data.ljust(size)) < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        os.ftruncate(descriptor, len(data))
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder to disk, if the file system supports it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> None:
    """Flush the files of a folder, and the folder itself, to disk."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    sync_folder(folder)


def pause_s(attempt: int) -> float:
    """Return the pause after failed attempt 1, 2, 3, ... to write or read: 1, 4, 16, then 60 s."""
    return float(min(4 ** (attempt - 1), 60))
