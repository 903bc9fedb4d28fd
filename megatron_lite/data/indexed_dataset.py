"""Token files in Megatron-LM's format: `<prefix>.bin` contains all documents' tokens,
`<prefix>.idx` their places.

The index, little-endian: magic (9 bytes), version 1 (u64), dtype code (u8), number of sequences
(u64), length of the document index (u64); then sizes in tokens (i32 each), byte pointers into
`.bin` (i64 each), and the document index (i64 each: first sequence of each document, and the number
of sequences at the end). In splits and error messages a "document" is a sequence, as in Megatron's
GPT data set; writers, ours included, put one sequence into each document.

Fast-LLM's versions 2 and 3 have one or two more bytes after the version: whether spans of tokens
(for loss masks, and for preferences) follow the pointers. Without spans they are read, too.

Documents are contiguous in `.bin`, so any range of them is one stream of tokens that a single read
can cut anywhere.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
import re
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.disk_array import DataFile, DiskArray, unreadable, writing
from megatron_lite.errors import DataError, StorageError
from megatron_lite.run import durable_files

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
# magic, version, dtype code, sequences, entries in the document index
HEADER = struct.Struct("<9sQBQQ")
# in versions 2 and 3: one byte each, after the version
SPANS = ("loss-masking spans", "preference spans")
TOKEN_DTYPES: dict[int, str] = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOAT_CODES = (6, 7)  # valid in the format, but not for tokens
STARTS_PER_READ = 512  # one page of 4 KiB
# entries that are all checked when a data set is opened; with more, `CHECKED_PIECES` pieces
CHECKED = 1 << 17
CHECKED_PIECES = 128

Run = tuple[int, int]  # first token in the file, and number of tokens, all from one document


class IndexedDataset:
    """A checked `.bin`/`.idx` pair, open for reading.

    Opening reads at most 3 MB of an index of any size; other entries are checked when used.

    Attributes: the DiskArrays `sizes` (n,) int32, `pointers` (n,) int64 in bytes, `document_index`
    (m,) int64, and `tokens`; `num_documents` = n; `num_tokens`.
    """

    def __init__(self, prefix: str, is_mask: bool = False) -> None:
        """Open `<prefix>.idx` and `<prefix>.bin` and check the header, the index and both files'
        sizes.

        is_mask: whether it is a loss mask, for the message about a missing one.

        Raises: DataError, one line naming the file and the fact.
        """
        self.prefix = prefix
        index = _open(prefix + ".idx", prefix, is_mask)
        tokens = _open(prefix + ".bin", prefix, is_mask)
        self.index_path = index.path
        dtype, count, num_entries, offset = _read_header(index)
        self.sizes = DiskArray(index, np.dtype("<i4"), count, offset)
        self.pointers = DiskArray(index, np.dtype("<i8"), count, offset + 4 * count)
        self.document_index = DiskArray(index, np.dtype("<i8"), num_entries, offset + 12 * count)
        end = self._check_sequences(dtype.itemsize)
        self._check_document_index()
        index.close()  # few runs reread it, and some have thousands of data sets
        if tokens.size != end:
            raise DataError(
                f"{tokens.path}: {tokens.size:,} bytes, but {index.path} describes {end:,}; copy both files again"
            )
        self.tokens = DiskArray(tokens, dtype, end // dtype.itemsize)

    @property
    def num_documents(self) -> int:
        return len(self.sizes)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def document(self, number: int) -> NDArray[Any]:
        """Read one document's tokens."""
        first = self.first_token(number)
        return self.tokens.read(first, self.first_token(number + 1) - first)

    def first_token(self, document: int) -> int:
        """Return the position in `.bin` of a document's first token; for `num_documents`, the end
        of the file.

        Raises: DataError if the index is damaged there.
        """
        if document == self.num_documents:
            return self.num_tokens
        itemsize = self.tokens.dtype.itemsize
        first = max(document - 1, 0)
        self._check_piece(first, document + 1, itemsize)
        return self.pointers[document] // itemsize

    def locate(self, token: int) -> tuple[int, int]:
        """Return the document that contains a token of `.bin`, and the token's offset in it."""
        assert 0 <= token < self.num_tokens, (token, self.num_tokens)
        document = bisect.bisect_right(self.pointers, token * self.tokens.dtype.itemsize) - 1
        return document, token - self.first_token(document)

    def runs(self, start: int, length: int) -> list[Run]:
        """Cut tokens [start, start + length) of `.bin` into the parts of its documents, in order;
        none is empty.

        Takes a few dozen cached reads of the index: loading it would cost each worker 8 bytes per
        document.

        Raises: DataError if the index cannot be read any more.
        """
        starts = self.pointers
        itemsize = self.tokens.dtype.itemsize
        end = start + length
        borders: list[Any] = [[start]]
        # the first that begins after `start`
        document = bisect.bisect_right(starts, start * itemsize)
        while document < len(starts):
            begins = starts.read(document, min(STARTS_PER_READ, len(starts) - document)) // itemsize
            if begins[0] < borders[-1][-1] or (np.diff(begins) < 0).any():
                raise DataError(
                    f"{self.index_path}: documents from {document} on are not in rising order"
                )
            borders.append(begins[begins < end])
            if begins[-1] >= end:
                break
            document += len(begins)
        cuts = np.unique(np.concatenate([*borders, [end]]))
        return list(zip(cuts.tolist(), np.diff(cuts).tolist(), strict=False))

    def document_sizes(self, documents: range) -> NDArray[np.int32]:
        """Return the number of tokens in each of several consecutive documents.

        Raises: DataError if the index is damaged or cannot be read.
        """
        found = self.sizes.read(documents.start, len(documents))
        expected = self.first_token(documents.stop) - self.first_token(documents.start)
        total = int(found.sum(dtype=np.int64))
        if found.min() < 0 or total != expected:
            raise DataError(
                f"{self.index_path}: documents {documents.start} to {documents.stop - 1} have {total:,} tokens "
                f"together, but take {expected:,}"
            )
        return found

    def check(self) -> None:
        """Check all documents' places. Raises: DataError if the index is damaged."""
        if self.num_documents:
            self._check_piece(0, self.num_documents, self.tokens.dtype.itemsize)

    def parts(self, num_tokens: int) -> Iterator[tuple[int, NDArray[np.int32], NDArray[Any]]]:
        """Read all documents in parts of about `num_tokens` tokens; documents stay whole.

        Yields: the number of a part's first document, each document's size, and their tokens,
        concatenated.
        """
        sizes = self.sizes.read(0, self.num_documents)
        ends = np.cumsum(sizes, dtype=np.int64)
        borders = np.searchsorted(ends, np.arange(num_tokens, self.num_tokens, num_tokens)) + 1
        cuts = np.unique(np.minimum([0, *borders, len(sizes)], len(sizes))).tolist()
        for first, end in itertools.pairwise(cuts):
            start = self.first_token(first)
            yield first, sizes[first:end], self.tokens.read(start, self.first_token(end) - start)

    def _check_sequences(self, itemsize: int) -> int:
        """Check sizes against pointers; return the number of bytes that `.bin` must have."""
        end, number = 0, 0  # end of the last checked piece, and the sequence after it
        for start, stop in _pieces(len(self.sizes)):
            begins = self.pointers[start]
            if begins < end or (start == number and begins != end):
                raise self._misplaced(start, begins, end)
            end, number = self._check_piece(start, stop, itemsize), stop
        return end

    def _check_piece(self, start: int, stop: int, itemsize: int) -> int:
        """Check that sequences [start, stop) are contiguous; return the byte in `.bin` where they
        end."""
        sizes = self.sizes.read(start, stop - start).astype(np.int64)
        pointers = self.pointers.read(start, stop - start)
        if sizes.min() < 0:
            document = start + int(np.argmax(sizes < 0))
            raise DataError(
                f"{self.index_path}: document {document} has a size of {self.sizes[document]} tokens"
            )
        begins = int(pointers[0])
        if begins < 0 or begins % itemsize:
            raise DataError(
                f"{self.index_path}: document {start} begins at byte {begins}, where no token begins"
            )
        ends = begins + np.cumsum(sizes * itemsize)
        wrong = np.flatnonzero(pointers[1:] != ends[:-1])
        if wrong.size:
            document = int(wrong[0])
            raise self._misplaced(
                start + document + 1, int(pointers[document + 1]), int(ends[document])
            )
        return int(ends[-1])

    def _misplaced(self, document: int, found: int, expected: int) -> DataError:
        return DataError(
            f"{self.index_path}: document {document} begins at byte {found} instead of {expected}, where the one "
            "before it ends"
        )

    def _check_document_index(self) -> None:
        entries, num_sequences = self.document_index, len(self.sizes)
        if not len(entries):
            raise DataError(f"{self.index_path}: its document index is empty; it must begin with 0")
        if entries[0] != 0 or entries[len(entries) - 1] != num_sequences:
            raise DataError(
                f"{self.index_path}: its document index runs from {entries[0]} to {entries[len(entries) - 1]} instead "
                f"of from 0 to {num_sequences}"
            )
        last = 0
        for start, stop in _pieces(len(entries)):
            piece = entries.read(start, stop - start)
            if piece[0] < last or (np.diff(piece) < 0).any():
                raise DataError(f"{self.index_path}: its document index is not in rising order")
            last = int(piece[-1])


def _pieces(count: int) -> Iterator[tuple[int, int]]:
    """Yield the pieces [start, stop) of `count` entries to check when a data set is opened, first
    and last included."""
    if count <= CHECKED:
        if count:
            yield 0, count
        return
    length = CHECKED // CHECKED_PIECES
    for number in range(CHECKED_PIECES):
        start = (count - length) * number // (CHECKED_PIECES - 1)
        yield start, start + length


def _read_header(file: DataFile) -> tuple[np.dtype[Any], int, int, int]:
    """Return the tokens' dtype, sequences, entries in the document index and bytes of the header,
    all checked."""
    path, size = file.path, file.size
    header = file.read(0, min(size, HEADER.size + len(SPANS)))
    if not MAGIC.startswith(header[: len(MAGIC)]):
        raise DataError(
            f"{path}: not a token index: begins with {header[: len(MAGIC)]!r} instead of {MAGIC!r}"
        )
    version = int.from_bytes(header[len(MAGIC) : len(MAGIC) + 8], "little")
    if len(header) >= len(MAGIC) + 8 and not VERSION <= version <= VERSION + len(SPANS):
        raise DataError(
            f"{path}: format version {version}, but only versions 1 to {1 + len(SPANS)} can be read"
        )
    flags = header[len(MAGIC) + 8 :][: max(version - VERSION, 0)]
    bytes_needed = HEADER.size + len(flags)
    if len(header) < bytes_needed:
        raise DataError(
            f"{path}: {size:,} bytes, but its header alone takes {bytes_needed}; copy it again"
        )
    for name, flag in zip(SPANS, flags, strict=False):
        if flag:
            raise DataError(f"{path}: has {name} (format version {version}), which cannot be read")
    code, num_sequences, num_entries = struct.unpack_from(
        "<BQQ", header, len(MAGIC) + 8 + len(flags)
    )
    if code in FLOAT_CODES:
        raise DataError(
            f"{path}: holds floating point numbers (dtype code {code}), which are not tokens"
        )
    if code not in TOKEN_DTYPES:
        raise DataError(
            f"{path}: unknown dtype code {code} (known: {', '.join(map(str, TOKEN_DTYPES))})"
        )
    described = bytes_needed + 12 * num_sequences + 8 * num_entries  # Python integers: no overflow
    if num_sequences and described + num_sequences == size:
        raise DataError(
            f"{path}: has a mode for each sequence, as data sets of text and images do; only text is read"
        )
    if described != size:
        raise DataError(
            f"{path}: {size:,} bytes, but its header describes {described:,}; copy it again"
        )
    return np.dtype(TOKEN_DTYPES[code]), num_sequences, num_entries, bytes_needed


def _open(path: str, prefix: str, is_mask: bool) -> DataFile:
    try:
        return DataFile(path)
    except FileNotFoundError as error:
        said = f"{path}: no such file"
        if prefix.endswith((".bin", ".idx")):
            said += f"; give the prefix without its ending: {prefix[:-4]}"
        elif Path(prefix).is_dir():
            said += f"; {prefix} is a folder: give the prefix of the .bin/.idx pair in it"
        elif Path(prefix).is_file():
            said += f"; {prefix} is a file: prepare_data writes the pair of a text, and evaluate --text reads a text"
        elif is_mask:
            said += "; this loss mask is missing: prepare_data --chat_template writes one, --loss_mask=none does without"
        elif path.endswith(".idx"):
            said = f"{prefix}: no such file, folder or pair (scripts/prepare_data.py writes pairs)"
            if re.fullmatch(r"\w[\w.-]*(/[\w.-]+){1,2}", prefix):  # owner/name/configuration
                said += (
                    f"; if this is the name of a data set on the hub, write hf://datasets/{prefix}"
                )
        raise DataError(said) from error
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def smallest_dtype(vocab_size: int) -> str:
    """Return the format's smallest dtype for every token id below `vocab_size`."""
    for dtype in ("|u1", "<u2", "<i4", "<i8"):
        if vocab_size - 1 <= np.iinfo(dtype).max:
            return dtype
    raise DataError(f"no dtype holds a vocabulary of {vocab_size}")


class IndexedDatasetWriter:
    """A context manager that publishes a pair at a clean exit and discards it after an exception.

    Tokens stream into `<prefix>.bin.tmp`; `commit` syncs both files, then renames `.bin` first and
    `.idx` last. A killed process produces only `.tmp` files, which no reader opens and the next
    writer replaces. An older pair of the same name is kept until just before the renames, which
    begin by removing its `.idx`.

    Raises: StorageError from every method if the disk is full or not writable, or another writer is
    at work.
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
        self.mask: IndexedDatasetWriter | None = None  # the loss mask of the same documents
        self._bin_tmp, self._index_tmp = Path(prefix + ".bin.tmp"), Path(prefix + ".idx.tmp")
        with writing(self._bin_tmp):
            self._bin: IO[bytes] = open(self._bin_tmp, "ab")
            if not durable_files.lock_file(self._bin.fileno(), self._bin_tmp):
                self._bin.close()
                raise StorageError(
                    f"{self._bin_tmp}: another process is writing it; wait for it or take another prefix"
                )
            self._bin.truncate(0)  # after the lock, to spare another writer's file

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
            raise DataError(
                f"{self.prefix}: a token id of document {len(self._sizes)} does not fit {self.dtype.name}"
            )
        if tokens.size > np.iinfo(np.int32).max:
            raise DataError(
                f"{self.prefix}: document {len(self._sizes)} has {tokens.size:,} tokens, over 2**31 - 1"
            )
        self.add_documents(
            tokens.astype(self.dtype, copy=False), np.array([tokens.size], dtype=np.int32)
        )

    def add_documents(self, tokens: NDArray[Any], sizes: NDArray[np.int32]) -> None:
        """Append documents concatenated in `tokens`, already in the pair's dtype, with these
        sizes."""
        assert tokens.dtype == self.dtype and sizes.dtype == np.int32, (tokens.dtype, sizes.dtype)
        data = tokens.tobytes()
        with writing(self._bin_tmp):
            self._bin.write(data)
        self._digest.update(data)
        self._sizes.frombytes(sizes.tobytes())
        self.num_tokens += tokens.size

    def write_index(self) -> Path:
        """Write and sync both files under temporary names; return the index's."""
        if not self._is_written:
            count = self.num_documents
            sizes = np.array(self._sizes, dtype="<i4")
            ends = np.cumsum(sizes, dtype="<i8")
            with writing(self.prefix), open(self._index_tmp, "wb") as index:
                index.write(HEADER.pack(MAGIC, VERSION, self._code, count, count + 1))
                for table in (
                    sizes,
                    (ends - sizes) * self.dtype.itemsize,
                    np.arange(count + 1, dtype="<i8"),
                ):
                    index.write(table.tobytes())
                for file in (self._bin, index):
                    file.flush()
                    os.fsync(file.fileno())
            self._is_written = True
        return self._index_tmp

    def commit(self) -> None:
        """Write the index and publish both files; called at the end of a `with` block without
        errors."""
        self.write_index()
        with writing(self.prefix):
            bin_path, index_path = Path(self.prefix + ".bin"), Path(self.prefix + ".idx")
            index_path.unlink(missing_ok=True)  # never pair a new .bin with an old .idx
            os.replace(self._bin_tmp, bin_path)
            os.replace(self._index_tmp, index_path)
            self._bin.close()
            durable_files.sync_folder(index_path.parent)

    def discard(self) -> None:
        """Delete the files, unless published."""
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
