"""From texts to the tokens of documents, many at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.tokenizing import Tokenizer, load_tokenizer

BATCH_CHARACTERS = 1 << 20  # of one call of the tokenizer: its threads share a batch, and its result is in memory
ABSENT = "none"  # of --begin_of_document and --end_of_document


@dataclass(frozen=True)
class Encoding:
    """Which tokenizer makes tokens out of a text, and the tokens around a document (None: none)."""

    tokenizer: str  # `byte`, or the path of a tokenizer.json
    begin: int | None
    end: int | None
    special_tokens: bool
    dtype: str

    def load(self) -> Tokenizer:
        """Load the tokenizer."""
        return load_tokenizer(self.tokenizer, special_tokens=self.special_tokens, needs_end=False)


class DocumentEncoder:
    """A loaded tokenizer that makes documents."""

    def __init__(self, encoding: Encoding) -> None:
        self.tokenizer = encoding.load()
        self.dtype = np.dtype(encoding.dtype)
        self._nothing = np.zeros(0, dtype=np.uint32)
        self._begin, self._end = (
            np.array([] if token is None else [token], dtype=np.uint32) for token in (encoding.begin, encoding.end)
        )

    def encode(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the tokens of all documents in one array, and the size of each, (len(texts),)."""
        documents = self.tokenizer.encode_batch(texts)
        around = len(self._begin) + len(self._end)
        parts = [part for ids in documents for part in (self._begin, ids, self._end)]
        sizes = np.array([len(ids) + around for ids in documents], dtype=np.int64)
        return np.concatenate([self._nothing, *parts]).astype(self.dtype), sizes


def batches(texts: Iterable[str], characters: int = BATCH_CHARACTERS) -> Iterator[list[str]]:
    """Group texts into lists of about so many characters."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
