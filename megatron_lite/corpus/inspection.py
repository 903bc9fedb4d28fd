"""Show what is in a prepared pair: counts, lengths, frequent tokens, some documents as text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megatron_lite.corpus.prepared import PreparedPair
from megatron_lite.data.tokenizing import JsonTokenizer
from megatron_lite.errors import DataError

MOST_COUNTED = 100_000_000  # tokens; the first ones of a larger pair
FREQUENT = 10
LARGEST_TOKEN = 1 << 26
SHOWN_CHARACTERS = 160
SHOWN_TOKENS = 1000  # decoded at each end of a document
BAR_WIDTH = 40


def inspect(prefix: str) -> Iterator[str]:
    """Yield lines about a pair.

    Raises:
        DataError: if it is damaged.
    """
    pair = PreparedPair(prefix)
    dataset, tokenizer = pair.dataset, pair.tokenizer()
    sizes = pair.sizes
    yield f"documents         {dataset.num_documents:,}"
    yield f"tokens            {dataset.num_tokens:,} ({dataset.tokens.dtype.name})"
    if pair.summary is not None and pair.base == prefix and "bytes_per_token" in pair.summary:
        yield f"bytes per token   {pair.summary['bytes_per_token']:.3f}"
    if not len(sizes):
        return
    quarters = np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1], method="nearest").tolist()
    yield "tokens/document   " + ", ".join(f"{q:,}" for q in quarters) + " (least, quarter, half, three quarters, most)"
    yield from _histogram(sizes)
    yield from _frequent(pair, tokenizer)
    yield from _documents(pair, tokenizer)


def _histogram(sizes: np.ndarray) -> Iterator[str]:
    classes = np.bincount(np.ceil(np.log2(np.maximum(sizes, 1))).astype(int))
    yield "\nlength of documents, in tokens"
    for power in range(int(np.flatnonzero(classes)[0]), len(classes)):
        bar = "#" * round(BAR_WIDTH * int(classes[power]) / int(classes.max()))
        yield f"  up to {2**power:>11,}  {int(classes[power]):>12,}  {bar}".rstrip()


def _frequent(pair: PreparedPair, tokenizer: JsonTokenizer | None) -> Iterator[str]:
    counts, seen = np.zeros(1, dtype=np.int64), 0
    for start, end in pair.reads():
        tokens = pair.tokens(start, end)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) <= LARGEST_TOKEN:
            raise DataError(f"{pair.prefix}.bin: holds {tokens.min():,} to {tokens.max():,}, which are no tokens")
        found = np.bincount(tokens, minlength=len(counts))
        found[: len(counts)] += counts
        counts, seen = found, seen + len(tokens)
        if seen >= MOST_COUNTED:
            break
    part = f" of the first {seen:,}" if seen < pair.dataset.num_tokens else ""
    yield f"\nmost frequent tokens{part}: {np.count_nonzero(counts):,} different ones"
    for number in np.argsort(-counts, kind="stable")[:FREQUENT].tolist():
        if counts[number]:
            text = f"  '{_spelled(tokenizer.decode_all([number]))}'" if tokenizer is not None else ""
            yield f"  {number:>8}  {counts[number] / max(seen, 1):>7.2%}{text}"


def _documents(pair: PreparedPair, tokenizer: JsonTokenizer | None) -> Iterator[str]:
    count = pair.dataset.num_documents
    for number in sorted({0, count // 2, count - 1}):
        tokens = pair.dataset.document(number).tolist()
        yield f"\ndocument {number:,}: {len(tokens):,} tokens"
        if tokenizer is None:
            yield f"  {tokens[:16]}"
            continue
        half = SHOWN_CHARACTERS // 2
        text = _spelled(tokenizer.decode_all(tokens[:SHOWN_TOKENS]))
        last = text if len(tokens) <= SHOWN_TOKENS else _spelled(tokenizer.decode_all(tokens[-SHOWN_TOKENS:]))
        whole = last is text and len(text) <= SHOWN_CHARACTERS
        yield f"  {text}" if whole else f"  {text[:half]} ... {last[-half:]}"


def _spelled(text: str) -> str:
    """Return a text on one line, with control characters spelled: a document must not steer a terminal."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
