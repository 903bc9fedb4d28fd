"""Files that are never visible half written, and folders whose entries survive a power cut."""

from __future__ import annotations

import errno
import os
from pathlib import Path


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
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_folder(path.parent)


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
