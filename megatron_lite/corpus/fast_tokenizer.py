"""Compute the ids of `tokenizers`, many times as fast, with the library fastokens; each use proves
that they match.

fastokens encodes BPE whose parts are on a list. Before the work, both libraries encode over 400
fixed texts; during the work, both encode the first text of each piece, and every 1,000th after it.
`UnfitError` explains why a tokenizer needs `tokenizers` instead.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite.data.tokenizing import JsonTokenizer

FAST = "fastokens"
# In rules such as (?i:'s) a contraction for Oniguruma, but not for fastokens: `tokenizers` encodes
# texts that contain it.
ODD = "'\u017f"
CHECKED_EVERY = 1000  # texts
# For longer texts, both libraries encode this much of the beginning: a folder of books would be no
# faster otherwise.
CHECKED_CHARACTERS = 1 << 16
# Characters after which fastokens is reloaded: it caches every word that it has seen, 0.3 bytes per
# byte of text.
LOADED_CHARACTERS = 1 << 27
TEXTS, PARTS = (Path(__file__).with_name(name) for name in ("proof_texts.txt", "exact_parts.txt"))
# The texts' ids, concatenated, and where each text begins, then the end, (texts + 1,).
Flat = tuple[NDArray[Any], NDArray[np.int64]]


class UnfitError(Exception):
    """Why a tokenizer's ids cannot come from fastokens, in words for the user."""


class FastTokenizer(JsonTokenizer):
    """A `JsonTokenizer` whose `encode` and `encode_flat` use fastokens."""

    def __init__(self, reference: JsonTokenizer) -> None:
        """Load fastokens. Raises: UnfitError if it cannot, or some parts of the tokenizer have not
        been compared."""
        vars(self).update(vars(reference))
        if unknown := ", ".join(_unknown(self.library)):
            raise UnfitError(f"{FAST} is not known to be exact for {unknown}")
        self._numbers = itertools.count()  # of the texts passed to `encode`
        self._load()

    def _load(self) -> None:
        try:
            from fastokens import Tokenizer

            # without dropout, truncation and padding
            self._fast = Tokenizer.from_json_str(self.library.to_str())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic in the library is no Exception
            raise UnfitError(f"{FAST} cannot load it: {error}") from error
        self._room = LOADED_CHARACTERS

    def prove(self) -> None:
        """Compare both libraries on a file's texts, and on every special token spelled out.

        Raises: UnfitError at the first difference.
        """
        texts = [*map(json.loads, listed(TEXTS))]
        for word in map(str, self.library.get_added_tokens_decoder().values()):
            texts += [f"a{word}b {word} {word * 2}\n{word[:-1]}"]
        ids, places = self._encode(texts)
        self._compare(texts, np.split(ids, places[1:-1]))

    def encode(self, text: str, template: bool = False) -> list[int]:
        """Encode the next text of a stream. Raises: UnfitError, see `encode_flat`."""
        if template or ODD in text:
            return super().encode(text, template)
        return self.encode_flat([text], next(self._numbers))[0].tolist()

    def encode_flat(self, texts: Sequence[str], before: int) -> Flat:
        """Encode a list of texts without ODD, after `before` others.

        Raises: UnfitError if fastokens fails, or has other ids for the first or every 1,000th text.
        """
        ids, places = self._encode(texts)
        for number in range(-before % CHECKED_EVERY, len(texts), CHECKED_EVERY):
            text, found = texts[number], ids[places[number] : places[number + 1]]
            if len(text) > CHECKED_CHARACTERS:
                text = text[:CHECKED_CHARACTERS]
                found, _ = self._encode([text])
            self._compare([text], [found])
        return ids, places

    def _encode(self, texts: Sequence[str]) -> Flat:
        self._room -= sum(map(len, texts))
        if self._room < 0:
            del self._fast  # before the next one is loaded: memory for one
            self._load()
        try:
            ids, places = self._fast.encode_batch_flat(
                texts, split_special_tokens=self.library.encode_special_tokens
            )
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # see `_load`
            raise UnfitError(f"{FAST} failed: {error}") from error
        return np.frombuffer(ids, np.uint32), np.frombuffer(places, np.int64)

    def _compare(self, texts: Sequence[str], found: Sequence[Any]) -> None:
        for text, expected, ids in zip(texts, self.encode_batch(texts), found, strict=True):
            if not np.array_equal(expected, ids):
                text = shortened(text, lambda part: not np.array_equal(*self._both(part)))
                wrong, right = self._both(text)
                raise UnfitError(
                    f"{FAST} has the ids {wrong[:9]} for {text[:80]!r}, where tokenizers has {right[:9]}"
                )

    def _both(self, text: str) -> tuple[list[int], list[int]]:
        return self._encode([text])[0].tolist(), super().encode(text)


def shortened(text: str, differs: Callable[[str], bool]) -> str:
    """Shorten a text as far as it still `differs`, by halves, quarters, ..., characters."""
    size = len(text)
    while size := size // 2:
        for start in range(len(text) - size, -1, -size):
            rest = text[:start] + text[start + size :]
            if differs(rest):
                text = rest
    return text


def _unknown(library: Any) -> Iterator[str]:
    """Yield the parts of a tokenizer not known to behave the same in both libraries."""
    from tokenizers import pre_tokenizers

    model, parts = library.model, (library.normalizer, library.pre_tokenizer)
    states = [part.__getstate__().decode() if part else "null" for part in parts]
    yield from {*states} - {*listed(PARTS)}
    # which represent bytes that UTF-8 lacks
    alphabet = {*pre_tokenizers.ByteLevel.alphabet()} - {*"ÀÁõö÷øùúûüýþÿ"}
    if type(model).__name__ != "BPE" or not (
        alphabet <= library.get_vocab().keys() if "ByteLevel" in states[1] else model.unk_token
    ):
        yield "models other than BPE with every byte in their vocabulary"


def listed(file: Path) -> list[str]:
    """Return the lines in TEXTS or PARTS."""
    return [line for line in file.read_text("utf-8").splitlines() if not line.startswith("#")]
