"""Streams of bytes out of compressed files; a file that was cut short is an error, never a shorter text."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import IO, Any

from megatron_lite.corpus.inputs import InputFile
from megatron_lite.corpus.packages import zstd_package
from megatron_lite.errors import DataError

CHUNK_BYTES = 1 << 17


@contextlib.contextmanager
def opened(file: IO[bytes], described: InputFile) -> Iterator[Any]:
    """Open the decompressed content of an open file, a binary stream, for a block.

    Raises:
        DataError: from the block too, if the compressed data are damaged or incomplete.
    """
    ending = described.compression
    damage: tuple[type[BaseException], ...] = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
    try:
        if ending == ".gz":
            yield gzip.GzipFile(fileobj=file, mode="rb")
        elif ending == ".bz2":
            yield bz2.BZ2File(file)
        elif ending == ".xz":
            yield lzma.LZMAFile(file)
        elif ending == ".zst":
            zstandard = zstd_package(described.path)
            damage += (zstandard.ZstdError,)
            yield io.BufferedReader(_ZstdStream(file, zstandard), CHUNK_BYTES)
        else:
            yield file
    except damage as error:
        raise DataError(f"{described.path}: damaged or incomplete compressed data: {error}") from error
    except OSError as error:
        if ending == ".bz2" and error.errno is None:  # the only sign that bz2 gives
            raise DataError(f"{described.path}: damaged or incomplete compressed data: {error}") from error
        raise


class _ZstdStream(io.RawIOBase):
    """The content of all frames of a zstd file; the library's own reader takes a cut file for a complete one."""

    def __init__(self, file: IO[bytes], library: Any) -> None:
        self._file, self._library = file, library
        self._frame: Any = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer.

        Raises:
            EOFError: if the file ends inside a frame.
        """
        while not self._output:
            if not self._input:
                self._input = self._file.read(CHUNK_BYTES)
                if not self._input:
                    if self._frame is not None:
                        raise EOFError("the file ends inside a frame")
                    return 0
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor().decompressobj()
            self._output = self._frame.decompress(self._input)
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count
