"""Read files of folders that others made: what is no regular file, such as a pipe, is refused and
never waited for."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

A_LINK = "a symbolic link, which is not followed here"


def open_regular(path: Path, follow_links: bool = False) -> io.FileIO:
    """Open a regular file for unbuffered reading; never blocks, not even on a pipe.

    follow_links: allow a symbolic link, as in the cache of the Hugging Face hub.

    Raises:
        OSError: if the file cannot be opened or is not a regular file.
    """
    no_links = 0 if follow_links else os.O_NOFOLLOW
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | no_links)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            raise OSError(errno.ELOOP, A_LINK, str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return io.FileIO(descriptor)


def read_bytes(path: Path, limit_bytes: int, follow_links: bool = False) -> bytes:
    """Read a regular file; see `open_regular`.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is larger than `limit_bytes`.
    """
    with open_regular(path, follow_links) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit_bytes:
            raise ValueError(f"{size:,} bytes, at most {limit_bytes:,} are read")
        return file.readall()
