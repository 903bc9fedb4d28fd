"""Content of input files: compressed streams, rows of parquet and arrow files, and the packages that these need.

A file that was cut short is an error, never a shorter text."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

from megatron_lite.corpus.inputs import InputFile
from megatron_lite.errors import DataError, UsageError

CHUNK_BYTES = 1 << 17
ROWS_PER_READ = 1024
# By kind or compression of a file: the package that reads it, and why.
PACKAGES = {
    ".zst": ("zstandard", "is compressed with zstd"),
    "parquet": ("pyarrow.parquet", "is a parquet file"),
    "arrow": ("pyarrow", "is an arrow file"),
}


def package_for(kind: str, path: str) -> Any:
    """Import the package of PACKAGES that a file needs.

    Raises: UsageError if it is not installed; the message names the file and the command that helps.
    """
    name, reason = PACKAGES[kind]
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise UsageError(f"{path} {reason}, which needs the package {package}: pip install '.[data]'") from error


def check_packages(files: Iterable[InputFile]) -> None:
    """Check, before any work, that every file can be read.

    Raises: UsageError for the first file of a kind whose package is not installed.
    """
    for kind in PACKAGES:
        first = next((file for file in files if kind in (file.kind, file.compression)), None)
        if first is not None:
            package_for(kind, first.path)


@contextlib.contextmanager
def opened(file: IO[bytes], described: InputFile) -> Iterator[Any]:
    """Open the decompressed content of an open file, a binary stream, for a block.

    Raises: DataError from the block too, if the compressed data are damaged or incomplete.
    """
    ending = described.compression
    openers: dict[str, Callable[[IO[bytes]], Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    damage: tuple[type[BaseException], ...] = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)
    if ending == ".zst":
        zstandard = package_for(ending, described.path)
        openers[ending] = lambda file: io.BufferedReader(_ZstdStream(file, zstandard), CHUNK_BYTES)
        damage += (zstandard.ZstdError,)
    try:
        yield openers[ending](file) if ending else file
    except Exception as error:
        # An OSError without a number is the only sign that bz2 gives.
        of_bz2 = ending == ".bz2" and isinstance(error, OSError) and error.errno is None
        if not of_bz2 and not isinstance(error, damage):
            raise
        raise DataError(f"{described.path}: damaged or incomplete compressed data: {error}") from error


class _ZstdStream(io.RawIOBase):
    """The content of all frames of a zstd file; the library's own reader takes a cut file for a complete one."""

    def __init__(self, file: IO[bytes], library: Any) -> None:
        self._parts, self._part = _zstd_parts(file, library), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer.

        Raises: EOFError if the file ends inside a frame.
        """
        self._part = self._part or next(self._parts, b"")
        count = min(len(buffer), len(self._part))
        buffer[:count] = self._part[:count]
        self._part = self._part[count:]
        return count


def _zstd_parts(file: IO[bytes], library: Any) -> Iterator[bytes]:
    """Decompress frame after frame."""
    frame = None
    while data := file.read(CHUNK_BYTES):
        while data:
            frame = frame or library.ZstdDecompressor().decompressobj()
            if part := frame.decompress(data):
                yield part
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the file ends inside a frame")


def row_group_bytes(path: str) -> list[int]:
    """Return the size on disk of each row group of a parquet file, from its footer.

    Raises: DataError if the file is damaged.
    """
    parquet = package_for("parquet", path)
    with _damage(path):
        metadata = parquet.read_metadata(path)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        return [
            sum(group.column(column).total_compressed_size for column in range(group.num_columns)) for group in groups
        ]


def table_rows(file: IO[bytes], described: InputFile, keys: Sequence[str], start: int, end: int) -> Iterator[Any]:
    """Yield the rows of row groups [start, end) of a parquet file, or of a whole arrow file.

    An arrow file is a stream of batches, as `datasets` writes it, or has a footer.

    Raises: DataError if the file is damaged or lacks the columns.
    """
    path = described.path
    package = package_for(described.kind, path)
    with _damage(path):
        batches: Iterable[Any]
        if described.kind == "parquet":
            table = package.ParquetFile(file)
            columns, groups = _columns(path, keys, table.schema_arrow.names), list(range(start, end))
            batches = table.iter_batches(ROWS_PER_READ, row_groups=groups, columns=columns, use_threads=False)
        else:
            has_footer = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = package.ipc.open_file(file) if has_footer else package.ipc.open_stream(file)
            whole = map(reader.get_batch, range(reader.num_record_batches)) if has_footer else reader
            columns = _columns(path, keys, reader.schema.names)
            # Rows become Python objects a few at a time.
            parts = ((batch.select(columns), range(0, batch.num_rows, ROWS_PER_READ)) for batch in whole)
            batches = (batch.slice(first, ROWS_PER_READ) for batch, starts in parts for first in starts)
        for batch in batches:
            yield from batch.to_pylist()


def _columns(path: str, keys: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the columns of a table that hold the keys: no others need to be read."""
    wanted = {key if key in columns else key.partition(".")[0] for key in keys}
    if not wanted.intersection(columns):
        raise DataError(f"{path}: has no column {' or '.join(keys)} (--json_key), but {', '.join(columns)}")
    return [column for column in columns if column in wanted]


@contextlib.contextmanager
def _damage(path: str) -> Iterator[None]:
    """Turn an error of pyarrow, which has many classes, into an error of the file."""
    try:
        yield
    except Exception as error:
        own = type(error).__module__.startswith("pyarrow") or (isinstance(error, OSError) and error.errno is None)
        if not own:
            raise
        text = " ".join(str(error).split())
        raise DataError(f"{path}: damaged or not what its name says: {text}") from error
