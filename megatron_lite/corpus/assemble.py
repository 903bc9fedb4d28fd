"""From finished pieces to the pairs: the documents that stay, in order, and the files that appear last."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_lite.corpus.pieces import CHUNK_BYTES, Piece, digest_of
from megatron_lite.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_lite.errors import StorageError

# Tokens that are counted at a time: numpy converts them to 64 bits, which takes ten times as long beyond the caches.
COUNTED = 1 << 18


def select(
    num_documents: int,
    hashes: NDArray[np.uint64] | None,
    most_documents: int | None,
    validation_documents: int,
    shards: int,
) -> tuple[NDArray[np.int16], int]:
    """Choose the pair of each document: a pure function of the documents' order and hashes.

    Pairs 0 to `shards` - 1 hold equal numbers of consecutive documents. The last one holds the validation documents, if
    there are any, spread evenly over the corpus.

    hashes: (n, 2); the first document of each hash stays.

    Returns: (n,) the number of the pair, or -1 for a document that is left out; and the number of duplicates.
    """
    kept = np.arange(num_documents) if hashes is None else np.flatnonzero(first_occurrences(hashes))
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
    return output, duplicates


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
    output: NDArray[np.int16],
    writers: Sequence[IndexedDatasetWriter],
    vocab_size: int,
    on_progress: Callable[[int], None],
) -> NDArray[np.int64]:
    """Copy the documents of all pieces into the pairs that `output` names, without publishing these.

    Returns: how often each token id occurs in the pairs, (vocab_size,).

    Raises: StorageError if a piece is not as it was written, or a pair cannot be written.
    """
    frequencies, done = np.zeros(vocab_size, np.int64), 0
    for piece, expected in zip(pieces, digests, strict=True):
        prefix, digest = str(folder / piece.key), hashlib.sha256()
        if digest_of(Path(prefix + ".idx")) != expected[".idx"]:
            raise _damaged(prefix + ".idx")
        dataset = IndexedDataset(prefix)
        for first, sizes, tokens in dataset.parts(CHUNK_BYTES // dataset.tokens.dtype.itemsize):
            digest.update(tokens.tobytes())
            pairs = output[done + first : done + first + len(sizes)]
            for number in np.unique(pairs[pairs >= 0]).tolist():
                chosen = pairs == number
                part = tokens if chosen.all() else tokens[np.repeat(chosen, sizes)]
                writers[number].add_documents(part, sizes[chosen])
                for start in range(0, len(part), COUNTED):
                    frequencies += np.bincount(part[start : start + COUNTED], minlength=vocab_size)
            on_progress(tokens.nbytes)
        if digest.hexdigest() != expected[".bin"]:
            raise _damaged(prefix + ".bin")
        done += dataset.num_documents
    return frequencies


def _damaged(path: str) -> StorageError:
    return StorageError(f"{path}: has changed since it was written; start the same command again to make it anew")
