"""Rows of parquet and arrow files, with only the columns that hold text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import IO, Any

from megatron_lite.corpus.fields import top_columns
from megatron_lite.corpus.packages import arrow_package, parquet_package
from megatron_lite.errors import DataError

ROWS_PER_READ = 1024


def row_group_bytes(path: str) -> list[int]:
    """Return the size on disk of each row group of a parquet file, from its footer.

    Raises:
        DataError: if the file is damaged.
    """
    parquet = parquet_package(path)
    with _damage(path):
        metadata = parquet.read_metadata(path)
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        return [
            sum(group.column(column).total_compressed_size for column in range(group.num_columns)) for group in groups
        ]


def parquet_rows(file: IO[bytes], path: str, keys: Sequence[str], start: int, end: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of row groups [start, end).

    Raises:
        DataError: if the file is damaged or lacks the columns.
    """
    parquet = parquet_package(path)
    with _damage(path):
        table = parquet.ParquetFile(file)
        columns = _columns(path, keys, table.schema_arrow.names)
        groups = list(range(start, end))
        for batch in table.iter_batches(ROWS_PER_READ, row_groups=groups, columns=columns, use_threads=False):
            yield from batch.to_pylist()


def arrow_rows(file: IO[bytes], path: str, keys: Sequence[str], start: int, end: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of an arrow file, which is a stream of batches (as `datasets` writes) or has a footer.

    Raises:
        DataError: if the file is damaged or lacks the columns.
    """
    arrow = arrow_package(path)
    magic = file.read(6)
    file.seek(0)
    with _damage(path):
        if magic == b"ARROW1":
            reader = arrow.ipc.open_file(file)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            reader = arrow.ipc.open_stream(file)
            batches = iter(reader)
        columns = _columns(path, keys, reader.schema.names)
        for batch in batches:
            for first in range(0, batch.num_rows, ROWS_PER_READ):
                yield from batch.select(columns).slice(first, ROWS_PER_READ).to_pylist()


def _columns(path: str, keys: Sequence[str], columns: Sequence[str]) -> list[str]:
    found = top_columns(keys, columns)
    if not found:
        raise DataError(f"{path}: has no column {' or '.join(keys)} (--json_key), but {', '.join(columns)}")
    return found


class _damage:  # noqa: N801 - reads as a statement
    """A block in which an error of pyarrow, which has many classes, is an error of the file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and type(error).__module__.startswith("pyarrow"):
            text = " ".join(str(error).split())
            raise DataError(f"{self.path}: damaged or not what its name says: {text}") from error
        if isinstance(error, OSError) and error.errno is None:  # pyarrow's own
            raise DataError(f"{self.path}: damaged or not what its name says: {error}") from error
