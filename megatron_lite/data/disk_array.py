"""Integers in a file, read with `pread`: a file cut short during a run gives a clear error, where mmap gives SIGBUS."""

from __future__ import annotations

import os
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.errors import DataError


class DiskArray:
    """An array of integers in a file, opened at the first read so that it can be sent to a worker."""

    def __init__(self, path: str, dtype: str, length: int, file_bytes: int, offset: int = 0) -> None:
        """file_bytes: size of the whole file when the run began; offset: of the first element, in bytes."""
        self.path = path
        self.dtype = np.dtype(dtype)
        self.length = length
        self.file_bytes = file_bytes
        self.offset = offset
        self._file: IO[bytes] | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(self.read(index, 1)[0])

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Read elements [start, start + count) into (count,) of the file's dtype.

        Raises: DataError if the file cannot be read or is shorter than it was.
        """
        assert 0 <= start and 0 <= count and start + count <= self.length, (start, count, self.length)
        wanted = count * self.dtype.itemsize
        try:
            if self._file is None:
                self._file = open(self.path, "rb", buffering=0)
            data = _read_fully(self._file.fileno(), self.offset + start * self.dtype.itemsize, wanted)
            size = os.fstat(self._file.fileno()).st_size if len(data) < wanted else None
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror}") from error
        if size is not None:
            raise DataError(
                f"{self.path}: {size:,} bytes, but it had {self.file_bytes:,} when the run began: "
                "it was cut short or replaced"
            )
        return np.frombuffer(data, dtype=self.dtype)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}  # an open file stays with its process


def _read_fully(descriptor: int, offset: int, count: int) -> bytes:
    """Read `count` bytes, or fewer at the end of the file; one `pread` reads at most 2 GiB."""
    data = os.pread(descriptor, count, offset)
    while len(data) < count:
        more = os.pread(descriptor, count - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data
