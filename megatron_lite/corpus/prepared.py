"""A pair that was prepared, with the summary and the tokenizer beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.corpus import corpus_manifest
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.tokenizing import JsonTokenizer

TOKENS_PER_READ = 1 << 22
_PART = re.compile(r"(.+?)(-[0-9]{5}-of-[0-9]{5}|_validation)")


class PreparedPair:
    """One pair of a corpus, open.

    Attributes: `sizes` (n,) int32 of the documents; `base`, the prefix of the whole corpus; `summary`, None if there is
    none; `tokenizer_file`.
    """

    def __init__(self, prefix: str) -> None:
        """Open a pair.

        Raises:
            DataError: if it is damaged.
        """
        self.prefix = prefix
        self.dataset = IndexedDataset(prefix)
        self.sizes = self.dataset.sizes.read(0, self.dataset.num_documents)
        part = _PART.fullmatch(prefix)
        candidates = [prefix, *([part[1]] if part else [])]
        self.base = next((base for base in candidates if Path(base + corpus_manifest.ENDING).exists()), prefix)
        self.summary: dict[str, Any] | None = corpus_manifest.read_summary(self.base)
        self.tokenizer_file = Path(self.base + ".tokenizer.json")

    def tokenizer(self) -> JsonTokenizer | None:
        """Load the tokenizer beside the pair; None if there is none."""
        return JsonTokenizer(str(self.tokenizer_file), needs_end=False) if self.tokenizer_file.is_file() else None

    def reads(self) -> list[tuple[int, int]]:
        """Return ranges of documents that cover the pair, each of about TOKENS_PER_READ tokens."""
        ends = np.cumsum(self.sizes, dtype=np.int64)
        borders = np.searchsorted(ends, np.arange(TOKENS_PER_READ, self.dataset.num_tokens, TOKENS_PER_READ)) + 1
        count = self.dataset.num_documents
        cuts = np.unique(np.minimum(np.concatenate([[0], borders, [count]]), count)).tolist()
        return list(zip(cuts[:-1], cuts[1:], strict=True))

    def tokens(self, start: int, end: int) -> NDArray[Any]:
        """Read the tokens of documents [start, end)."""
        first = self.dataset.first_token(start)
        return self.dataset.tokens.read(first, self.dataset.first_token(end) - first)
