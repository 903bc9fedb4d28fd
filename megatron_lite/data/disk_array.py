"""Integers in a file, read with `pread`: a file truncated during a run gives a clear error, where
mmap gives SIGBUS.

A read takes 1 to 2 microseconds longer than from a memory map. Checking that a file is unchanged
takes as long again, once per micro-batch.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import resource
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_lite.errors import DataError, StorageError
from megatron_lite.run import durable_files

T = TypeVar("T")
RETRIES = 3  # of a failed read
BLOCKS = 8  # blocks of a file, from its first to its last byte, that identify its content
BLOCK_BYTES = 4096


class DataFile:
    """A file that must not change while a run reads it; opened at the first read, so that workers
    can receive it."""

    def __init__(self, path: str) -> None:
        """Record the file's state now.

        Raises: OSError if it cannot be read; DataError if it is not a regular file.
        """
        self.path = path
        self._file: IO[bytes] | None = None
        self._passed: str | None = None  # a failure since the last check that a retry resolved
        self._mark = self._look()
        self._digest = sample_of(path)

    @property
    def size(self) -> int:
        """The file's size in bytes when it was opened."""
        return self._mark[2]

    def read(self, offset: int, count: int) -> bytes:
        """Read `count` bytes from `offset`.

        Raises: DataError if the file cannot be read, after `RETRIES` more tries, or is shorter than
        it was.
        """
        return self._patiently(lambda: self._read(offset, count))

    def _read(self, offset: int, count: int) -> bytes:
        if self._file is None:
            self._file = open(self.path, "rb", buffering=0)
        descriptor = self._file.fileno()
        data = os.pread(descriptor, count, offset)
        # One `pread` reads at most 2 GiB.
        while len(data) < count and (
            more := os.pread(descriptor, count - len(data), offset + len(data))
        ):
            data += more
        if len(data) < count:
            raise self._resized(os.fstat(descriptor).st_size)
        return data

    def _patiently(self, action: Callable[[], T], number: int = 1) -> T:
        """Return the result of an action on the file; after a failure reopen the file and retry.

        A server that fails over or a stale handle then costs a pause and not the run. number: of
        this try.

        Raises: DataError if the file is gone, or after the last try.
        """
        try:
            return action()
        except FileNotFoundError as error:
            raise DataError(
                f"{self.path}: is gone: it was deleted or moved while the run reads it"
            ) from error
        except OSError as error:
            problem = unreadable(self.path, error)
            if number > RETRIES:
                raise DataError(f"{problem}; tried {number} times, with pauses") from error
        self.close()
        time.sleep(pause := durable_files.pause_s(number))
        self._passed = f"{problem}; tried again after {pause:.0f} s"
        return self._patiently(action, number + 1)

    def check(self) -> str | None:
        """Check that the path still names the file that was opened; call this after reading from
        it.

        A file with another date or another place on the disk may contain the same data: `touch`
        preserves files where old ones are deleted, and a copy may be restored. The size and eight
        blocks decide.

        Returns: a warning if only date or place differ, once for each change, or if a failed read
        was retried.

        Raises: DataError if the file is gone, cannot be read or contains other data.
        """
        now, same = self._patiently(self._compare)
        passed, self._passed = self._passed, None
        if now == self._mark:
            return passed
        if now[2] != self.size:
            raise self._resized(now[2])
        if not same:
            raise DataError(
                f"{self.path}: it holds other data than when the run began; a run needs the same data from its first "
                "to its last batch: restore the file, then start again"
            )
        change = "modified" if now[:2] == self._mark[:2] else "replaced"
        self._mark = now
        self.close()
        return (
            f"{self.path}: {change} while the run reads it; its size and {BLOCKS} blocks of it are the same, so the "
            "run continues"
        )

    def _compare(self) -> tuple[tuple[int, ...], bool]:
        """Return what `_look` finds now, and whether the file's blocks are the same."""
        now = self._look()
        return now, now == self._mark or sample_of(self.path) == self._digest

    def close(self) -> None:
        """Close the file until the next read."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _look(self) -> tuple[int, ...]:
        """Return device, inode, size and time, which differ once the file is written or
        replaced."""
        found = os.stat(self.path)
        if not stat.S_ISREG(found.st_mode):
            raise DataError(
                f"{self.path}: is a {'folder' if stat.S_ISDIR(found.st_mode) else 'device'}, not a file"
            )
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def _resized(self, now: int) -> DataError:
        return DataError(
            f"{self.path}: {now:,} bytes, but it had {self.size:,} when the run began: it was cut short or replaced"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}  # an open file stays with its process


@dataclass(frozen=True)
class DiskArray:
    """An array of integers in a file."""

    file: DataFile
    dtype: np.dtype[Any]
    length: int
    offset: int = 0  # of the first element, in bytes

    @property
    def path(self) -> str:
        return self.file.path

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(self.read(index, 1)[0])

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Read elements [start, start + count) into (count,) of the file's dtype.

        Raises: DataError if the file cannot be read or is shorter than it was.
        """
        assert 0 <= start and 0 <= count and start + count <= self.length, (
            start,
            count,
            self.length,
        )
        itemsize = self.dtype.itemsize
        data = self.file.read(self.offset + start * itemsize, count * itemsize)
        return np.frombuffer(data, dtype=self.dtype)


def allow_open_files(count: int) -> None:
    """Allow this process and its future workers `count` open files, as far as the system permits.

    A blend keeps its data sets' files open; many systems begin with a limit of 1,024, which a
    program may raise.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and wanted > soft:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def sample_of(*paths: str) -> str:
    """Return a digest of each file's size and `BLOCKS` blocks, evenly spaced from the first to the
    last byte.

    Raises: OSError.
    """
    digest = hashlib.blake2b(digest_size=8)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(size.to_bytes(8, "little"))
            last = max(0, size - BLOCK_BYTES)
            for start in sorted({last * number // (BLOCKS - 1) for number in range(BLOCKS)}):
                digest.update(os.pread(file.fileno(), BLOCK_BYTES, start))
    return digest.hexdigest()


def unreadable(path: str | Path, error: Exception) -> DataError:
    """Return the error that names an unreadable file; it may not be UTF-8, or its name may be
    invalid."""
    hint = (
        "; raise the limit with ulimit -n" if getattr(error, "errno", None) == errno.EMFILE else ""
    )
    return DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}{hint}")


@contextlib.contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Convert file system errors to a DataError that names `path`."""
    try:
        yield
    except OSError as error:
        raise unreadable(path, error) from error


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Convert file system errors to a StorageError that names `path`."""
    try:
        yield
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file that is never visible half written.

    Raises: StorageError.
    """
    with writing(path):
        durable_files.replace_file(path, data, sync=True)


def replace_json(path: Path, values: Any) -> None:
    """Write a small JSON file like `replace_file`."""
    replace_file(path, (json.dumps(values, indent=2) + "\n").encode())
