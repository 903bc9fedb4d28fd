"""Fill-in-the-middle: some documents become prefix, suffix and middle, each after a sentinel, as in
Fast-LLM.

A document is cut between characters, as an editor's cursor cuts a line, and the text around a cut
is tokenized again. No character is lost or added: where a tokenizer cannot cut, the cut moves to a
token boundary. Sentinels make samples longer; their last tokens no longer fit.

Source: Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle".
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite.config.training import DataConfig
from megatron_lite.data.sampling import sample_words
from megatron_lite.data.tokenizing import JsonTokenizer
from megatron_lite.errors import DataError, UsageError

SPELLINGS = ("<{}>", "<|{}|>")  # StarCoder's and Qwen's
_LOST = "\ufffd"  # bytes that are not a character: a sample may begin inside one


class _Sentinels(NamedTuple):
    prefix: int
    middle: int
    suffix: int
    pad: int


class _Run(NamedTuple):
    """Tokens of a document that are cut together, or one special token, which is never cut."""

    ids: list[int]
    text: str
    length: int  # in characters; a special token counts as one


class Draws:
    """A sample's random numbers: a pure function of key and sample index."""

    def __init__(self, key: int, index: int) -> None:
        self._words = _words(key, index)

    def below(self, limit: int) -> int:
        """Draw an integer from range(limit)."""
        return (next(self._words) >> 11) * limit >> 53

    def happens(self, probability: float) -> bool:
        """Return True with a probability; 0 is never, 1 is always."""
        return (next(self._words) >> 11) < probability * 2**53


def _words(key: int, index: int) -> Iterator[int]:
    used, count = 0, 64
    while True:
        yield from sample_words(np.array([index]), count, key)[0, used:].tolist()
        used, count = count, 2 * count


class FillInTheMiddle:
    """Transforms samples."""

    def __init__(self, options: DataConfig, vocab_size: int, key: int) -> None:
        """Load the tokenizer. options: `fim_*` and the tokenizer. key: of the draws.

        Raises: DataError if the tokenizer cannot be read or has no sentinels; UsageError if its
            tokens exceed the vocabulary, or lack --fim_split_sample's.
        """
        path, border = options.tokenizer_file, options.fim_split_sample
        assert path is not None, "checked by validation"
        self.options = options
        self.key = key
        self.tokenizer = JsonTokenizer(path, needs_end=False)
        if self.tokenizer.vocab_size > vocab_size:
            largest = self.tokenizer.vocab_size
            raise UsageError(
                f"--vocab_size={vocab_size}: {path} (--tokenizer_file) has ids up to {largest - 1}, which --fim_rate "
                f"may produce; write {largest} or more"
            )
        self.sentinels = _Sentinels(*(self._sentinel(name) for name in _Sentinels._fields))
        self.border = None if border is None else self.tokenizer.token_id(border)
        if border is not None and self.border is None:
            raise UsageError(
                f"--fim_split_sample={border}: not a token of {path} (--tokenizer_file)"
            )

    def _sentinel(self, name: str) -> int:
        spellings = [spelling.format(f"fim_{name}") for spelling in SPELLINGS]
        for number in map(self.tokenizer.token_id, spellings):
            if number is not None:
                return number
        raise DataError(
            f"{self.tokenizer.path} (--tokenizer_file): has no {' or '.join(spellings)}, which --fim_rate needs"
        )

    def sample(
        self, tokens: NDArray[Any], pieces: NDArray[np.int32], index: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.bool_]]:
        """Transform one sample.

        tokens: (s + 1,). pieces: lengths of its pieces of documents. index: of the sample in its
        phase.

        Returns: (s + 1,) tokens, their pieces' lengths, and which tokens are padding, (s + 1,).
        """
        draws = Draws(self.key, index)
        parts = [
            self.document(piece.tolist(), draws)
            for piece in np.split(tokens, np.cumsum(pieces)[:-1])
        ]
        pad, size = self.sentinels.pad, len(tokens)
        filled = np.array([token for part in parts for token in part][:size], dtype=np.int64)
        result = np.pad(filled, (0, size - len(filled)), constant_values=pad)
        ends = np.unique(
            [*np.minimum(np.cumsum([len(part) for part in parts]), size).tolist(), size]
        )
        return result, np.diff(ends, prepend=0).astype(np.int32), result == pad

    def document(self, ids: list[int], draws: Draws) -> list[int]:
        """Transform a document or a piece of one; an end-of-document token inside separates two."""
        return _each_part(
            ids, self.tokenizer.end_of_document, lambda part: self._ordered(part, draws)
        )

    def _ordered(self, ids: list[int], draws: Draws) -> list[int]:
        """Transform a document without its end; a token that begins documents stays in front."""
        if ids and ids[0] == self.tokenizer.begin_of_document:
            return [ids[0], *self._ordered(ids[1:], draws)]
        border = self.border
        if border is None or border not in ids:
            return self._permuted(ids, self.options.fim_rate, draws)
        if not draws.happens(self.options.fim_rate):
            return ids
        return _each_part(
            ids, border, lambda part: self._permuted(part, self.options.fim_fragment_rate, draws)
        )

    def _permuted(self, ids: list[int], rate: float, draws: Draws) -> list[int]:
        """Transform the tokens with a probability of `rate`."""
        if not ids or not draws.happens(rate):
            return ids
        options, sentinels = self.options, self.sentinels
        runs = self._runs(ids)
        if options.fim_ignore_prefix and "".join(run.text for run in runs).startswith(
            options.fim_ignore_prefix
        ):
            return ids
        prefix, middle, suffix = self._cut(
            runs, self._boundaries(sum(run.length for run in runs), draws)
        )
        if options.fim_truncate_or_pad:
            too_long = len(prefix) + len(middle) + len(suffix) + 3 - len(ids)
            if too_long > 0 and len(suffix) <= too_long:
                return ids
            suffix = (
                suffix[: len(suffix) - too_long]
                if too_long > 0
                else [*suffix, *[sentinels.pad] * -too_long]
            )
        if draws.happens(options.fim_spm_rate):
            return [sentinels.prefix, sentinels.suffix, *suffix, sentinels.middle, *prefix, *middle]
        return [sentinels.prefix, *prefix, sentinels.suffix, *suffix, sentinels.middle, *middle]

    def _boundaries(self, length: int, draws: Draws) -> list[int]:
        """Draw where the middle of a text of `length` characters begins and ends; each part may be
        empty."""
        if self.options.fim_max_middle_len is None:
            return sorted((draws.below(length + 1), draws.below(length + 1)))
        middle = draws.below(min(self.options.fim_max_middle_len, length) + 1)
        first = draws.below(length - middle + 1)
        return [first, first + middle]

    def _runs(self, ids: list[int]) -> list[_Run]:
        """Separate special tokens from text."""
        tokenizer = self.tokenizer
        special = np.isin(ids, list(tokenizer.special_ids)) | (
            np.array(ids) >= tokenizer.vocab_size
        )
        borders = (np.flatnonzero(special[1:] | special[:-1]) + 1).tolist()
        runs: list[_Run] = []
        for first, last in itertools.pairwise([0, *borders, len(ids)]):
            text = tokenizer.decode(ids[first:last])
            runs.append(_Run(ids[first:last], text, 1 if special[first] else len(text)))
        return runs

    def _cut(self, runs: Sequence[_Run], boundaries: Sequence[int]) -> list[list[int]]:
        """Cut at two places, counted in characters; return the tokens of the three parts."""
        parts: list[list[int]] = [[], [], []]
        start = 0
        for run in runs:
            end = start + run.length
            part = sum(boundary <= start for boundary in boundaries)
            for tokens in self._cut_run(
                run, [place - start for place in boundaries if start < place < end]
            ):
                parts[part] += tokens
                part += 1
            start = end
        return parts

    def _cut_run(self, run: _Run, places: list[int]) -> list[list[int]]:
        """Cut a run's text at ascending places, or between tokens if tokenizing the parts would
        change the text."""
        if not places:
            return [run.ids]
        tokenizer = self.tokenizer
        texts = [run.text[first:last] for first, last in itertools.pairwise([0, *places, None])]
        if _LOST not in run.text:
            parts = [tokenizer.encode(text) for text in texts]
            # Any token: text at the beginning may be decoded without a space before it.
            before = run.ids[-1:]
            if tokenizer.decode(sum(parts, before)) == tokenizer.decode(before + run.ids):
                return parts
        counts = range(1, len(run.ids) + 1)
        borders = [
            bisect.bisect_right(counts, place, key=lambda n: len(tokenizer.decode(run.ids[:n])))
            for place in places
        ]
        return [run.ids[first:last] for first, last in itertools.pairwise([0, *borders, None])]


def _each_part(ids: list[int], border: int, change: Callable[[list[int]], list[int]]) -> list[int]:
    """Split at each `border`, change the parts in order, and rejoin them."""
    result, start = list[int](), 0
    for place in [*(place for place, token in enumerate(ids) if token == border), len(ids)]:
        result += [*change(ids[start:place]), *ids[place : place + 1]]
        start = place + 1
    return result
