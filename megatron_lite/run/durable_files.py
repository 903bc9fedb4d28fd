"""Files that are never visible half written or written by two processes, and folders that survive a power cut."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # on Windows, where nothing keeps two processes apart
    fcntl = None  # type: ignore[assignment]


def lock_file(descriptor: int, path: Path | None = None) -> bool:
    """Lock an open file until it is closed, or the process ends; return False if another process has the lock.

    A file system without locks refuses nobody.

    path: if given, return False also if another file, or none, has this name by now: the holder before has renamed or
        removed the file between our `open` and our lock.
    """
    try:
        if fcntl is not None:
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
    """Write `data` to a temporary file and rename it to `path`. `sync`: return only once it is on disk.

    Raises:
        OSError: if it cannot be written.
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
    """Write `data` over a file, in the space that it has: a full disk gives no other.

    Readers never see a mixture: one call writes the data and blanks out what was longer.

    Raises:
        OSError: if there is no such file, or it cannot be written.
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
    """Make the entries of a folder durable, where the file system can sync folders."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
