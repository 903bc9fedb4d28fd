"""Convert other programs' token files, and pairs whose index lacks document boundaries, to a pair
with these.

Reads pairs; datatrove's files: `x.ds`, with the end of each document, in tokens, as 64-bit integers
in `x.ds.index`; and flat files, whose documents end with a token: raw integers, as nanoGPT and
OLMo-core write them, and files written by numpy's `save`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from megatron_lite.corpus.inputs import find_inputs
from megatron_lite.corpus.prepare import check_free
from megatron_lite.corpus.prepared import SUMMARY, TOKENIZER
from megatron_lite.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_lite.errors import DataError, UsageError

# of tokens in files without a header
TYPES = ("uint8", "uint16", "int32", "uint32", "int64", "uint64")
SUFFIXES = (".ds", ".npy", ".bin")
TOKENS_PER_READ = 1 << 22


def convert(
    names: Sequence[str], prefix: str, kind: str | None, end: int | None, overwrite: bool
) -> str:
    """Write all files' tokens, in order, into a pair; return a summary line.

    kind: one of TYPES. end: the token after which documents end, even inside known ones.

    Raises: RunError: usage, data or storage.
    """
    files = [(file, *_opened(file.path, kind)) for file in find_inputs(names, SUFFIXES)]
    if not overwrite:
        check_free([prefix])
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    fits = all(tokens.itemsize <= 2 for _, tokens, _ in files)
    with IndexedDatasetWriter(prefix, "<u2" if fits else "<i4") as writer:
        for file, tokens, ends in files:
            starts = range(0, len(tokens), TOKENS_PER_READ)
            cuts = [
                start + 1 + np.flatnonzero(tokens[start : start + TOKENS_PER_READ] == end)
                for start in starts
            ]
            if file.compression or not any(map(len, cuts if end is not None else [ends])):
                fix = "give its type with --from_tokens, and the token that ends documents with --split_documents_at"
                raise UsageError(
                    f"{file.path}: cannot tell where its documents end; decompress it if it is compressed, {fix}"
                )
            borders = np.unique(np.concatenate([[0, len(tokens)], ends, *cuts]).astype(np.int64))
            for first, stop in itertools.pairwise(borders.tolist()):
                document = tokens[first:stop]
                if document.min(initial=0) < 0:
                    raise DataError(f"{file.path}: a token id is negative: {document.min()}")
                writer.add_document(document)
        for ending in (SUMMARY, TOKENIZER):
            Path(prefix + ending).unlink(missing_ok=True)  # of an earlier pair
    return f"{prefix}.bin: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens ({writer.dtype.name})"


def _opened(path: str, kind: str | None) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return a file's tokens, and the known ends of its documents."""
    ends = np.array([], np.int64)
    if path.endswith(".bin") and Path(path[:-4] + ".idx").exists():
        pair = IndexedDataset(path[:-4])
        kind = kind or pair.tokens.dtype.str
        ends = np.cumsum(pair.sizes.read(0, pair.num_documents), dtype=np.int64)
    try:
        if Path(path + ".index").exists():
            ends = np.fromfile(path + ".index", "<i8")
        has_header = np.fromfile(path, "S6", 1).tolist() == [b"\x93NUMPY"]
        tokens = open_memmap(path, mode="r") if has_header else np.memmap(path, np.dtype(kind), "r")
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"{tokens.dtype.name}, not integers")
        if ends[-1:].tolist() not in ([], [len(tokens)]) or Path(path + ".loss").exists():
            raise ValueError(
                f"{len(tokens):,} tokens, documents that end at {ends[-1:]}, no loss mask (.loss)"
            )
    except ValueError as error:
        raise DataError(
            f"{path}: is not what its name, its index or --from_tokens say: {error}"
        ) from error
    return tokens.reshape(-1), ends
