"""Token files in Megatron-LM's format: `<prefix>.bin` holds the tokens of all documents, `<prefix>.idx` their places.

The index, little-endian: magic (9 bytes), version 1 (u64), dtype code (u8), number of sequences (u64), length of the
document index (u64); then sizes in tokens (i32 each), byte pointers into `.bin` (i64 each), and the document index (i64
each: first sequence of each document, and the number of sequences at the end). In splits and error messages a
"document" is a sequence, as in Megatron's GPT data set; writers, ours included, put one sequence into each document.

Documents lie back to back in `.bin`, so any range of them is one stream of tokens that a single read can cut anywhere.
"""

from __future__ import annotations

import bisect
import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.disk_array import DiskArray
from megatron_lite.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, entries of the document index
TOKEN_DTYPES: dict[int, str] = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOAT_CODES = (6, 7)  # valid in the format, but not for tokens
STARTS_PER_READ = 512  # one page of 4 KiB
CHUNK = 1 << 20  # index entries to check or write at a time, which bounds the memory


class IndexedDataset:
    """A checked `.bin`/`.idx` pair, open for reading.

    Attributes: `sizes` (n,) int32, `pointers` (n,) int64 in bytes and `document_index` (m,) int64, memory-mapped; the
    DiskArrays `tokens` (all tokens) and `starts` (the pointers again); `num_documents` = n; `num_tokens`.
    """

    def __init__(self, prefix: str) -> None:
        """Open `<prefix>.idx` and `<prefix>.bin` and check everything but the tokens themselves.

        Raises: DataError, one line naming the file and the fact.
        """
        self.prefix = prefix
        self.index_path, bin_path = prefix + ".idx", prefix + ".bin"
        index_bytes, bin_bytes = _size(self.index_path, prefix), _size(bin_path, prefix)
        dtype, num_sequences, num_entries = self._read_header(index_bytes)
        offset = HEADER.size
        self.sizes = self._map("<i4", num_sequences, offset)
        self.pointers = self._map("<i8", num_sequences, offset + 4 * num_sequences)
        self.document_index = self._map("<i8", num_entries, offset + 12 * num_sequences)
        itemsize = np.dtype(dtype).itemsize
        end = self._check_sequences(itemsize)
        self._check_document_index()
        if bin_bytes != end:
            raise DataError(
                f"{bin_path}: {bin_bytes:,} bytes, but {self.index_path} describes {end:,}; copy both files again"
            )
        self.tokens = DiskArray(bin_path, dtype, end // itemsize, end)
        self.starts = DiskArray(self.index_path, "<i8", num_sequences, index_bytes, offset + 4 * num_sequences)

    @property
    def num_documents(self) -> int:
        return len(self.sizes)

    @property
    def num_tokens(self) -> int:
        return self.tokens.length

    def document(self, number: int) -> NDArray[Any]:
        """Read all tokens of one document."""
        first = self.first_token(number)
        return self.tokens.read(first, self.first_token(number + 1) - first)

    def first_token(self, document: int) -> int:
        """Return the position in `.bin` of a document's first token; for `num_documents`, the end of the file."""
        if document == self.num_documents:
            return self.num_tokens
        return int(self.pointers[document]) // self.tokens.dtype.itemsize

    def locate(self, token: int) -> tuple[int, int]:
        """Return the document that holds a token of `.bin`, and the token's offset in it."""
        assert 0 <= token < self.num_tokens, (token, self.num_tokens)
        document = bisect.bisect_right(self.pointers, token * self.tokens.dtype.itemsize) - 1
        return document, token - self.first_token(document)

    def _read_header(self, index_bytes: int) -> tuple[str, int, int]:
        """Return (dtype, sequences, entries of the document index), checked against the size of the file."""
        path = self.index_path
        try:
            with open(path, "rb") as file:
                header = file.read(HEADER.size)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        if not MAGIC.startswith(header[: len(MAGIC)]):
            raise DataError(f"{path}: not a token index: begins with {header[: len(MAGIC)]!r} instead of {MAGIC!r}")
        if len(header) < HEADER.size:
            raise DataError(f"{path}: {index_bytes:,} bytes, but its header alone takes {HEADER.size}; copy it again")
        _, version, code, num_sequences, num_entries = HEADER.unpack(header)
        if version != VERSION:
            raise DataError(f"{path}: format version {version}, but only version {VERSION} can be read")
        if code in FLOAT_CODES:
            raise DataError(f"{path}: holds floating point numbers (dtype code {code}), which are not tokens")
        if code not in TOKEN_DTYPES:
            raise DataError(f"{path}: unknown dtype code {code} (known: {', '.join(map(str, TOKEN_DTYPES))})")
        described = HEADER.size + 12 * num_sequences + 8 * num_entries  # Python integers: no overflow
        if described != index_bytes:
            raise DataError(f"{path}: {index_bytes:,} bytes, but its header describes {described:,}; copy it again")
        return TOKEN_DTYPES[code], num_sequences, num_entries

    def _map(self, dtype: str, count: int, offset: int) -> NDArray[Any]:
        if count == 0:
            return np.empty(0, dtype)  # mmap refuses an empty range
        try:
            return np.memmap(self.index_path, dtype, mode="r", offset=offset, shape=(count,))
        except (OSError, ValueError) as error:
            raise DataError(f"{self.index_path}: cannot be mapped: {error}") from error

    def _check_sequences(self, itemsize: int) -> int:
        """Check sizes and pointers against each other; return the number of bytes that `.bin` must have."""
        end = 0
        for start in range(0, len(self.sizes), CHUNK):
            sizes = np.asarray(self.sizes[start : start + CHUNK]).astype(np.int64)
            if sizes.min() < 0:
                document = start + int(np.argmax(sizes < 0))
                raise DataError(f"{self.index_path}: document {document} has a size of {self.sizes[document]} tokens")
            ends = end + np.cumsum(sizes * itemsize)
            expected = ends - sizes * itemsize
            wrong = np.flatnonzero(self.pointers[start : start + CHUNK] != expected)
            if wrong.size:
                document = start + int(wrong[0])
                raise DataError(
                    f"{self.index_path}: document {document} begins at byte {self.pointers[document]} instead of "
                    f"{expected[wrong[0]]}, where the one before it ends"
                )
            end = int(ends[-1])
        return end

    def _check_document_index(self) -> None:
        entries, num_sequences = self.document_index, len(self.sizes)
        if not len(entries):
            raise DataError(f"{self.index_path}: its document index is empty; it must begin with 0")
        if entries[0] != 0 or entries[-1] != num_sequences:
            raise DataError(
                f"{self.index_path}: its document index runs from {entries[0]} to {entries[-1]} instead of from 0 to "
                f"{num_sequences}"
            )
        for start in range(0, len(entries), CHUNK):
            if (np.diff(entries[start : start + CHUNK + 1]) < 0).any():
                raise DataError(f"{self.index_path}: its document index is not in rising order")


@dataclass(frozen=True)
class DocumentBorders:
    """Borders of the documents of one data set, looked up in its index on disk: a few dozen cached reads per sample.

    Loading the index, or mapping it, would cost each worker 8 bytes per document, or a SIGBUS if it is cut short.
    """

    starts: DiskArray  # (n,) first byte of each document in `.bin`, rising; an empty document shares the next one's
    dtype: np.dtype[Any]  # of the tokens in `.bin`

    def pieces(self, start: int, length: int) -> NDArray[np.int32]:
        """Return the lengths of the pieces of documents in tokens [start, start + length) of the file, in order.

        The lengths are positive, since empty documents have no piece, and add up to `length`.

        Raises: DataError if the index cannot be read any more.
        """
        itemsize, end = self.dtype.itemsize, start + length
        borders: list[Any] = [[start]]
        document = bisect.bisect_right(self.starts, start * itemsize)  # the first that begins after `start`
        while document < len(self.starts):
            begins = self.starts.read(document, min(STARTS_PER_READ, len(self.starts) - document)) // itemsize
            borders.append(begins[begins < end])
            if begins[-1] >= end:
                break
            document += len(begins)
        return np.diff(np.unique(np.concatenate([*borders, [end]]))).astype(np.int32)


def _size(path: str, prefix: str) -> int:
    try:
        if os.path.isdir(path):
            raise DataError(f"{path}: is a folder, not a file")
        return os.stat(path).st_size
    except FileNotFoundError as error:
        hint = "; give the prefix of a .bin/.idx pair, which scripts/prepare_data.py writes"
        if prefix.endswith((".bin", ".idx")):
            hint = f"; give the prefix without its ending: {prefix[:-4]}"
        raise DataError(f"{path}: no such file{hint}") from error
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise DataError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def smallest_dtype(vocab_size: int) -> str:
    """Return the smallest dtype of the format that holds every token id below `vocab_size`."""
    for dtype in ("|u1", "<u2", "<i4", "<i8"):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return dtype
    raise DataError(f"no dtype holds a vocabulary of {vocab_size}")
