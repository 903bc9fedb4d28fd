"""Write token files so that a pair appears complete or not at all; see indexed_dataset.py for the format."""

from __future__ import annotations

import contextlib
import hashlib
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.indexed_dataset import HEADER, MAGIC, TOKEN_DTYPES, VERSION
from megatron_lite.errors import DataError, StorageError
from megatron_lite.run import durable_files


class IndexedDatasetWriter:
    """A context manager that publishes a pair at a clean exit and discards it after an exception.

    Tokens stream into `<prefix>.bin.tmp`; `commit` syncs both files, then renames `.bin` first and `.idx` last. A
    killed process leaves only `.tmp` files, which no reader opens and the next writer replaces. An older pair of the
    same name stays until just before the renames, which begin with the removal of its `.idx`.

    Raises: StorageError from every method if the disk is full or not writable, or another writer is at work.
    """

    def __init__(self, prefix: str, dtype: str) -> None:
        self.prefix = prefix
        self.dtype = np.dtype(dtype)
        codes = {np.dtype(name): code for code, name in TOKEN_DTYPES.items()}
        assert self.dtype in codes, f"{dtype} is not a token dtype"
        self._code = codes[self.dtype]
        self._sizes = array("i")
        self.num_tokens = 0
        self._digest = hashlib.sha256()
        self._is_written = False
        self._bin_tmp, self._index_tmp = Path(prefix + ".bin.tmp"), Path(prefix + ".idx.tmp")
        with writing(self._bin_tmp):
            self._bin: IO[bytes] = open(self._bin_tmp, "ab")
            if not durable_files.lock_file(self._bin.fileno(), self._bin_tmp):
                self._bin.close()
                raise StorageError(
                    f"{self._bin_tmp}: another process is writing it; wait for it or take another prefix"
                )
            self._bin.truncate(0)  # after the lock, to spare the file of another writer

    @property
    def num_documents(self) -> int:
        return len(self._sizes)

    @property
    def digest(self) -> str:
        """SHA-256 of the tokens so far, in hexadecimal."""
        return self._digest.hexdigest()

    def add_document(self, tokens: NDArray[Any]) -> None:
        """Append a document of (k,) token ids; k may be 0.

        Raises: DataError if a token or the length does not fit.
        """
        limits = np.iinfo(self.dtype)
        if tokens.size and (int(tokens.min()) < limits.min or int(tokens.max()) > limits.max):
            raise DataError(f"{self.prefix}: a token id of document {len(self._sizes)} does not fit {self.dtype.name}")
        if tokens.size > np.iinfo(np.int32).max:
            raise DataError(f"{self.prefix}: document {len(self._sizes)} has {tokens.size:,} tokens, over 2**31 - 1")
        self.add_documents(tokens.astype(self.dtype, copy=False), np.array([tokens.size], dtype=np.int32))

    def add_documents(self, tokens: NDArray[Any], sizes: NDArray[np.int32]) -> None:
        """Append documents that lie back to back in `tokens`, already of the pair's dtype, with these sizes."""
        assert tokens.dtype == self.dtype and sizes.dtype == np.int32, (tokens.dtype, sizes.dtype)
        data = tokens.tobytes()
        with writing(self._bin_tmp):
            self._bin.write(data)
        self._digest.update(data)
        self._sizes.frombytes(sizes.tobytes())
        self.num_tokens += tokens.size

    def write_index(self) -> Path:
        """Write and sync both files under their temporary names; return that of the index."""
        if not self._is_written:
            count = self.num_documents
            sizes = np.array(self._sizes, dtype="<i4")
            ends = np.cumsum(sizes, dtype="<i8")
            with writing(self.prefix), open(self._index_tmp, "wb") as index:
                index.write(HEADER.pack(MAGIC, VERSION, self._code, count, count + 1))
                for table in (sizes, (ends - sizes) * self.dtype.itemsize, np.arange(count + 1, dtype="<i8")):
                    index.write(table.tobytes())
                for file in (self._bin, index):
                    file.flush()
                    os.fsync(file.fileno())
            self._is_written = True
        return self._index_tmp

    def commit(self) -> None:
        """Write the index and publish both files, at the latest at the end of a `with` block without errors."""
        self.write_index()
        with writing(self.prefix):
            bin_path, index_path = Path(self.prefix + ".bin"), Path(self.prefix + ".idx")
            index_path.unlink(missing_ok=True)  # so that a new .bin never lies beside an old .idx
            os.replace(self._bin_tmp, bin_path)
            os.replace(self._index_tmp, index_path)
            self._bin.close()
            durable_files.sync_folder(index_path.parent)

    def discard(self) -> None:
        """Delete the files, unless they are published."""
        if self._bin.closed:
            return
        self._bin.close()
        for path in (self._bin_tmp, self._index_tmp):
            path.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self._bin.closed:
                self.commit()
        finally:
            self.discard()


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Turn errors of the file system into a StorageError that names `path`."""
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
