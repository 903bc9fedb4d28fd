"""Check a prepared pair from end to end: index, sizes, digests, every token, the ends of documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.corpus.pieces import digest_of
from megatron_lite.corpus.prepared import PreparedPair
from megatron_lite.errors import DataError


def verify(prefix: str) -> str:
    """Check everything that can be checked; return one line that says what was.

    Raises:
        DataError: at the first fact that is not as it should be.
    """
    pair = PreparedPair(prefix)
    dataset, summary = pair.dataset, pair.summary
    _check_index(pair)
    if summary is None or "files" not in summary:
        return f"{prefix}: sizes and index fit; no {pair.base}.summary.json holds digests"
    try:
        described = {ending: summary["files"][Path(prefix).name + ending] for ending in (".bin", ".idx")}
        vocab_size, begin, end = summary["vocab_size"], summary["begin_of_document"], summary["end_of_document"]
        digests = {prefix + ending: str(entry["sha256"]) for ending, entry in described.items()}
        digests[str(pair.tokenizer_file)] = str(summary["tokenizer_sha256"])
    except (KeyError, TypeError) as error:
        raise DataError(f"{pair.base}.summary.json: does not describe {prefix}: {error!r} is missing") from error
    for path, expected in digests.items():
        _check_digest(path, expected)
    for start, stop in pair.reads():
        _check_tokens(prefix, pair.tokens(start, stop), pair.sizes[start:stop], start, vocab_size, begin, end)
    counts = f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens"
    return f"{prefix}: {counts}: index, digests, tokens and tokenizer are as they were written"


def _check_index(pair: PreparedPair) -> None:
    """Check all entries of the index, of which opening a large one checks a sample."""
    itemsize, ends = pair.dataset.tokens.dtype.itemsize, np.cumsum(pair.sizes, dtype=np.int64)
    pointers = pair.dataset.pointers.read(0, len(ends))
    wrong = np.flatnonzero((pair.sizes < 0) | (pointers != (ends - pair.sizes) * itemsize))
    if wrong.size:
        raise DataError(f"{pair.prefix}.idx: document {int(wrong[0])} does not begin where the one before it ends")


def _check_digest(path: str, expected: str) -> None:
    try:
        found = digest_of(Path(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if found != expected:
        raise DataError(f"{path}: its SHA-256 is {found[:16]}..., but {expected[:16]}... was written; copy it again")


def _check_tokens(
    prefix: str,
    tokens: NDArray[Any],
    sizes: NDArray[np.int32],
    first: int,
    vocab_size: int,
    begin: int | None,
    end: int | None,
) -> None:
    """Check the tokens of documents that lie back to back; `first`: number of the first one."""
    ends = np.cumsum(sizes, dtype=np.int64)
    bad = np.flatnonzero((tokens >= vocab_size) | (tokens < 0))
    if bad.size:
        document = int(np.searchsorted(ends, bad[0], side="right"))
        raise DataError(
            f"{prefix}.bin: token {int(tokens[bad[0]])} of document {first + document} is not below the vocabulary of "
            f"{vocab_size}"
        )
    for wanted, positions, place in ((begin, ends - sizes, "begin"), (end, ends - 1, "end")):
        if wanted is None:
            continue
        wrong = np.flatnonzero((sizes == 0) | (tokens[np.clip(positions, 0, max(len(tokens) - 1, 0))] != wanted))
        if wrong.size:
            raise DataError(f"{prefix}.bin: document {first + int(wrong[0])} does not {place} with token {wanted}")
