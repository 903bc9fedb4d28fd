"""From finished pieces to the pairs: the documents that stay, in order, and the files that appear last."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.corpus.pieces import CHUNK_BYTES, Piece, digest_of, groups
from megatron_lite.data.dataset_writer import IndexedDatasetWriter
from megatron_lite.errors import StorageError

# Tokens that are counted at a time: numpy converts them to 64 bits, which takes ten times as long beyond the caches.
COUNTED = 1 << 18


@dataclass(frozen=True)
class Selection:
    """Which documents stay, and in which pair each goes: pure functions of their order and their hashes."""

    output: NDArray[np.int16]  # (n,) number of the pair, or -1 for a document that is left out
    duplicates: int


@dataclass
class Assembled:
    """Counts of the written pairs."""

    documents: int = 0
    tokens: int = 0
    frequencies: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # by token id
    bin_digests: list[str] = field(default_factory=list)  # of each pair


def select(
    num_documents: int,
    hashes: NDArray[np.uint64] | None,
    most_documents: int | None,
    validation_documents: int,
    shards: int,
) -> Selection:
    """Choose the pair of each document.

    Pairs 0 to `shards` - 1 hold equal numbers of consecutive documents, and the last one the validation documents, if
    there are any, which are spread evenly over the corpus.

    hashes: (n, 2); the first document of each hash stays.
    """
    keep = np.ones(num_documents, dtype=bool)
    duplicates = 0
    if hashes is not None:
        keep = first_occurrences(hashes)
    kept = np.flatnonzero(keep)
    duplicates = num_documents - len(kept)
    kept = kept[:most_documents]
    output = np.full(num_documents, -1, dtype=np.int16)
    count = len(kept)
    is_validation = np.zeros(count, dtype=bool)
    wanted = min(validation_documents, count)
    is_validation[(2 * np.arange(wanted, dtype=np.int64) + 1) * count // (2 * max(wanted, 1))] = True
    training = kept[~is_validation]
    output[training] = np.arange(len(training), dtype=np.int64) * shards // max(len(training), 1)
    output[kept[is_validation]] = shards
    return Selection(output, duplicates)


def first_occurrences(hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which rows of (n, 2) do not occur in an earlier row."""
    order = np.lexsort((hashes[:, 1], hashes[:, 0]))  # stable: equal rows stay in their order
    ordered = hashes[order]
    keep = np.zeros(len(hashes), dtype=bool)
    keep[order[:1]] = True
    keep[order[1:][(ordered[1:] != ordered[:-1]).any(axis=1)]] = True
    return keep


def read_hashes(folder: Path, pieces: Sequence[Piece]) -> NDArray[np.uint64]:
    """Return the hashes of all documents, (n, 2)."""
    parts = [np.fromfile(folder / f"{piece.key}.hashes", dtype="<u8") for piece in pieces]
    return np.concatenate([np.zeros(0, "<u8"), *parts]).reshape(-1, 2)


def write_pairs(
    folder: Path,
    pieces: Sequence[Piece],
    digests: Sequence[dict[str, str]],
    selection: Selection,
    writers: Sequence[IndexedDatasetWriter],
    vocab_size: int,
    on_progress: Callable[[int], None],
) -> Assembled:
    """Copy the documents of all pieces into their pairs, without publishing these.

    Raises:
        StorageError: if a piece is not as it was written, or a pair cannot be written.
    """
    result = Assembled(frequencies=np.zeros(vocab_size, np.int64))
    hashers = [hashlib.sha256() for _ in writers]
    first, itemsize = 0, writers[0].dtype.itemsize
    for piece, expected in zip(pieces, digests, strict=True):
        path = folder / f"{piece.key}.bin"
        if digest_of(folder / f"{piece.key}.sizes") != expected[".sizes"]:
            raise _damaged(path.with_suffix(".sizes"))
        sizes = np.fromfile(folder / f"{piece.key}.sizes", dtype="<i4")
        output = selection.output[first : first + len(sizes)]
        first += len(sizes)
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            for start, end in groups(sizes, CHUNK_BYTES // itemsize):
                count = int(sizes[start:end].sum(dtype=np.int64))
                data = file.read(count * itemsize)
                digest.update(data)
                tokens = np.frombuffer(data, dtype=writers[0].dtype)
                _distribute(tokens, sizes[start:end], output[start:end], writers, hashers, result)
                on_progress(len(data))
        if digest.hexdigest() != expected[".bin"]:
            raise _damaged(path)
    result.bin_digests = [hasher.hexdigest() for hasher in hashers]
    return result


def _distribute(
    tokens: NDArray[Any],
    sizes: NDArray[np.int32],
    output: NDArray[np.int16],
    writers: Sequence[IndexedDatasetWriter],
    hashers: Sequence[Any],
    result: Assembled,
) -> None:
    """Add a group of documents to the pairs."""
    for number in np.unique(output):
        if number < 0:
            continue
        chosen = output == number
        part = tokens if chosen.all() else tokens[np.repeat(chosen, sizes)]
        writers[number].add_documents(part, sizes[chosen])
        hashers[number].update(part)
        result.documents += int(chosen.sum())
        result.tokens += len(part)
        for start in range(0, len(part), COUNTED):
            result.frequencies += np.bincount(part[start : start + COUNTED], minlength=len(result.frequencies))


def _damaged(path: Path) -> StorageError:
    return StorageError(f"{path}: is not as it was written; start the same command again, which makes it anew")
