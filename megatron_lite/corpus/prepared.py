"""Show and verify a prepared pair, with its summary and tokenizer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_lite.config import Config, JsonObject
from megatron_lite.config.training import NO_MASK
from megatron_lite.corpus.pieces import RULES, digest_of
from megatron_lite.data.disk_array import reading
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.open_data import prefixes
from megatron_lite.data.tokenizing import (
    JsonTokenizer,
    has_tokenizer,
    read_object,
    read_tokenizer_file,
    tokenizer_json,
)
from megatron_lite.errors import DataError, spelled

TOKENS_PER_READ = 1 << 22
SUMMARY, TOKENIZER = ".summary.json", ".tokenizer.json"  # after a prefix
MOST_COUNTED = 100_000_000  # tokens; the first ones in a larger pair
FREQUENT = 10
LARGEST_TOKEN = 1 << 26
SHOWN_CHARACTERS = 160
SHOWN_TOKENS = 1000  # decoded at each end of a document
BAR_WIDTH = 40
# in a corpus: the end of a prefix
_PART = re.compile(r"(-[0-9]{5}-of-[0-9]{5}|_validation)?(_mask)?\Z")


def _summary_of(prefix: str) -> tuple[str, JsonObject]:
    """Return the prefix of a pair's corpus, and its summary; {} if it cannot be read."""
    candidates = prefix, _PART.sub("", prefix)
    base = next((base for base in candidates if Path(base + SUMMARY).exists()), prefix)
    return base, read_object(Path(base + SUMMARY))


def files_beside(prefix: str) -> list[str]:
    """Return the files that may accompany a pair: its loss mask, and its own or its corpus's
    summary and tokenizer."""
    ends = (SUMMARY, TOKENIZER, ".tokenizer_config.json")
    corpora = dict.fromkeys([prefix, _PART.sub("", prefix)])
    return [
        f"{prefix}_mask.idx",
        f"{prefix}_mask.bin",
        *(corpus + end for corpus in corpora for end in ends),
    ]


def older_summary(prefix: str) -> JsonObject:
    """Return the summary of a pair prepared under older rules; {} for any other pair."""
    summary = _summary_of(prefix)[1]
    return {} if summary.get("rules") == RULES else summary


def outdated(prefixes: Iterable[str]) -> Iterator[str]:
    """Yield warnings about pairs whose tokens may differ under today's rules."""
    for prefix in dict.fromkeys(prefixes):
        if older_summary(prefix):
            yield f"{prefix}: older rules prepared it, perhaps with other tokens; for a new run, prepare it again"


class KnownTokenizer(NamedTuple):
    name: str
    sha256: str
    size: int  # of the vocabulary
    file: Path  # possibly missing
    source: str = ""  # digest of the tokenizer.json that this one was made from
    end: int | None = None  # the token that ends a document; None: unknown, or none

    def __str__(self) -> str:
        return f"{self.name} ({self.size:,} tokens, SHA-256 {self.sha256[:8]})"

    def encodes_like(self, other: KnownTokenizer) -> bool:
        """Return whether both give a text the same ids; files that differ in form are compared by
        content."""
        same = self.sha256 in (other.sha256, other.source)
        if same or not (has_tokenizer(self.file) and has_tokenizer(other.file)):
            return same
        own, others = (
            json.loads(read_tokenizer_file(file).to_str()) for file in (self.file, other.file)
        )
        return all(own[part] == others[part] for part in ("normalizer", "pre_tokenizer", "model"))


def known_tokenizer(file: str, name: str) -> KnownTokenizer:
    """Describe a tokenizer.json, or `byte`. Raises: DataError if it cannot be read."""
    digest = hashlib.sha256(tokenizer_json(file)).hexdigest()
    opened = JsonTokenizer(file, needs_end=False)
    return KnownTokenizer(name, digest, opened.vocab_size, Path(file), end=opened.end_of_document)


def check_tokenizer(
    prefixes: Iterable[str], vocab_size: int, expected: KnownTokenizer | None
) -> tuple[KnownTokenizer | None, list[str]]:
    """Compare each pair's tokenizer, by its summary, with the expected one, or else with the first
    pair's.

    Returns: the latter, and the pairs without a summary. Raises: DataError: one line that names
    both tokenizers.
    """
    first, unknown = None, list[str]()
    for prefix in dict.fromkeys(prefixes):
        base, summary = _summary_of(prefix)
        try:
            digest, size = str(summary["tokenizer_sha256"]), int(summary["vocab_size"])
        except (KeyError, TypeError, ValueError):
            unknown.append(prefix)
            continue
        file, source = Path(base + TOKENIZER), str(summary.get("tokenizer_source"))
        found = KnownTokenizer(
            f"of the data {prefix}", digest, size, file, source, summary.get("end_of_document")
        )
        first = first or found
        if not (expected or first).encodes_like(found):
            fix = f"which is {found.file}; use data and a model with the same tokenizer"
            raise DataError(f"the tokenizer {expected or first} differs from that {found}, {fix}")
        if found.size > vocab_size:
            raise DataError(f"the tokenizer {found} has more tokens than --vocab_size={vocab_size}")
    return first, unknown


class RunTokenizer(NamedTuple):
    """The tokenizer of a run's data, samples and exports."""

    file: str | None
    identity: JsonObject  # recorded in checkpoints
    warnings: tuple[str, ...]
    unknown: list[str]  # pairs without a summary


def run_tokenizer(config: Config) -> RunTokenizer:
    """Compare --tokenizer_file and --vocab_size with the data, which are pairs by now.

    Raises: DataError like `check_tokenizer`.
    """
    file, vocab_size = config.data.tokenizer_file, config.model.vocab_size
    paths = [] if config.data.dataset_source == "random" else prefixes(vars(config.data))
    warnings = [*outdated(paths)]
    own = None if file is None else known_tokenizer(file, f"--tokenizer_file={file}")
    found, unknown = check_tokenizer(paths, vocab_size, own)
    if found is not None and own is not None:
        has_other_end = found.end not in (None, own.end)
        # the data decide
        if found.file.is_file() and (has_other_end or own.sha256 == found.source != found.sha256):
            file = str(found.file)
            own = known_tokenizer(file, f"--tokenizer_file={file}")
        if found.end not in (None, own.end):
            warnings.append(
                f"{own.name} ends documents with token {own.end}, the data with {found.end}, which was trained: "
                "what exports generate may not stop; prepare the data again"
            )
    identity = {}
    if (tokenizer := found or own) is not None:
        identity = {"tokenizer_sha256": tokenizer.sha256, "tokenizer_size": tokenizer.size}
        if 2 * tokenizer.size < vocab_size:
            fix = f"the tokenizer has {tokenizer.size} tokens; --vocab_size={tokenizer.size} is smaller and faster"
            warnings.append(f"--vocab_size={vocab_size}: {fix}")
    return RunTokenizer(file, identity, tuple(warnings), unknown)


def stated(prefixes: Iterable[str]) -> dict[str, str | tuple[str, ...]]:
    """Return --loss_mask and --tokenizer_file for these pairs, if their summaries name them."""
    found, masks = dict[str, str | tuple[str, ...]](), list[str]()
    for prefix in prefixes:
        base, summary = _summary_of(prefix)
        files = summary.get("files", ())  # which may have had another name when written
        masked = any(file.removesuffix(".bin") + "_mask.bin" in files for file in files)
        masks.append(f"{prefix}_mask" if masked else NO_MASK)
        if "tokenizer_sha256" in summary:
            found.setdefault("tokenizer_file", base + TOKENIZER)
    return found | ({"loss_mask": tuple(masks)} if {*masks} - {NO_MASK} else {})


def is_complete(prefix: str, fingerprints: Collection[str]) -> JsonObject | None:
    """Return the summary of a corpus prepared with one of these fingerprints, if all its files
    exist, else None."""
    summary = read_object(Path(prefix + SUMMARY))
    if summary.get("fingerprint") not in fingerprints:
        return None
    try:
        for name, described in summary["files"].items():
            if Path(prefix).with_name(name).stat().st_size != described["bytes"]:
                return None
    except (OSError, KeyError, TypeError, AttributeError):
        return None
    return summary


def inspect(prefix: str) -> Iterator[str]:
    """Yield lines about a pair.

    Raises: DataError if it is damaged.
    """
    dataset, (base, summary) = IndexedDataset(prefix), _summary_of(prefix)
    sizes, file = dataset.sizes.read(0, dataset.num_documents), Path(base + TOKENIZER)
    tokenizer = JsonTokenizer(str(file), needs_end=False) if file.is_file() else None
    yield f"documents         {dataset.num_documents:,}"
    yield f"tokens            {dataset.num_tokens:,} ({dataset.tokens.dtype.name})"
    if base == prefix and "bytes_per_token" in summary:
        yield f"bytes per token   {summary['bytes_per_token']:.3f}"
    if len(sizes):
        quarters = ", ".join(
            f"{q:,}" for q in np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1], method="nearest").tolist()
        )
        yield f"tokens/document   {quarters} (least, quarter, half, three quarters, most)"
        yield from _histogram(sizes)
        yield from _frequent(dataset, tokenizer)
        yield from _documents(dataset, tokenizer)


def _histogram(sizes: np.ndarray) -> Iterator[str]:
    classes = np.bincount(np.ceil(np.log2(np.maximum(sizes, 1))).astype(int))
    yield "\nlength of documents, in tokens"
    for power in range(int(np.flatnonzero(classes)[0]), len(classes)):
        bar = "#" * round(BAR_WIDTH * int(classes[power]) / int(classes.max()))
        yield f"  up to {2**power:>11,}  {int(classes[power]):>12,}  {bar}".rstrip()


def _frequent(dataset: IndexedDataset, tokenizer: JsonTokenizer | None) -> Iterator[str]:
    counts, seen = np.zeros(1, dtype=np.int64), 0
    for _, _, tokens in dataset.parts(TOKENS_PER_READ):
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) <= LARGEST_TOKEN:
            raise DataError(
                f"{dataset.tokens.path}: holds {tokens.min():,} to {tokens.max():,}, which are not tokens"
            )
        found = np.bincount(tokens, minlength=len(counts))
        found[: len(counts)] += counts
        counts, seen = found, seen + len(tokens)
        if seen >= MOST_COUNTED:
            break
    part = f" of the first {seen:,}" if seen < dataset.num_tokens else ""
    yield f"\nmost frequent tokens{part}: {np.count_nonzero(counts):,} different ones"
    for number in np.argsort(-counts, kind="stable")[:FREQUENT].tolist():
        if counts[number]:
            text = (
                f"  '{spelled(tokenizer.decode([number], with_end=True))}'"
                if tokenizer is not None
                else ""
            )
            yield f"  {number:>8}  {counts[number] / max(seen, 1):>7.2%}{text}"


def _documents(dataset: IndexedDataset, tokenizer: JsonTokenizer | None) -> Iterator[str]:
    count = dataset.num_documents
    for number in sorted({0, count // 2, count - 1}):
        tokens = dataset.document(number).tolist()
        yield f"\ndocument {number:,}: {len(tokens):,} tokens"
        if tokenizer is None:
            yield f"  {tokens[:16]}"
            continue
        half = SHOWN_CHARACTERS // 2
        text = spelled(tokenizer.decode(tokens[:SHOWN_TOKENS], True))
        last = (
            text
            if len(tokens) <= SHOWN_TOKENS
            else spelled(tokenizer.decode(tokens[-SHOWN_TOKENS:], True))
        )
        whole = last is text and len(text) <= SHOWN_CHARACTERS
        yield f"  {text}" if whole else f"  {text[:half]} ... {last[-half:]}"


def verify(prefix: str) -> str:
    """Check everything that can be checked; return a line that lists it.

    Raises: DataError at the first wrong fact.
    """
    dataset, (base, summary) = IndexedDataset(prefix), _summary_of(prefix)
    dataset.check()  # opening a large index checks a sample of its entries
    if "files" not in summary:
        return f"{prefix}: sizes and index fit; no {base}.summary.json holds digests"
    try:
        described = {
            ending: summary["files"][Path(prefix).name + ending] for ending in (".bin", ".idx")
        }
        vocab_size = summary["vocab_size"]
        begin = summary["begin_of_document"]
        end = summary["end_of_document"]
        digests = {prefix + ending: str(entry["sha256"]) for ending, entry in described.items()}
        digests[base + TOKENIZER] = str(summary["tokenizer_sha256"])
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{base}.summary.json: does not describe {prefix}: {error!r} is missing"
        ) from error
    for path, expected in digests.items():
        with reading(path):
            digest = digest_of(Path(path))
        if digest != expected:
            raise DataError(
                f"{path}: its SHA-256 is {digest[:16]}..., but {expected[:16]}... was written; copy it again"
            )
    for first, sizes, tokens in dataset.parts(TOKENS_PER_READ):
        _check_tokens(
            f"{prefix}.bin", first, sizes, tokens, vocab_size, {"begin": begin, "end": end}
        )
    counts = f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens"
    return f"{prefix}: {counts}: index, digests, tokens and tokenizer are as they were written"


def _check_tokens(
    path: str,
    first: int,
    sizes: NDArray[np.int32],
    tokens: NDArray[Any],
    vocab_size: int,
    marks: dict[str, int | None],
) -> None:
    """Check documents from number `first` on. marks: the tokens that begin and end each, None:
    none."""
    ends = np.cumsum(sizes, dtype=np.int64)
    bad = np.flatnonzero((tokens >= vocab_size) | (tokens < 0))
    if bad.size:
        document = int(np.searchsorted(ends, bad[0], side="right"))
        raise DataError(
            f"{path}: token {int(tokens[bad[0]])} of document {first + document} is not below the vocabulary of "
            f"{vocab_size}"
        )
    for place, wanted in marks.items():
        if wanted is None:
            continue
        positions = ends - sizes if place == "begin" else ends - 1
        wrong = np.flatnonzero(
            (sizes == 0) | (tokens[np.clip(positions, 0, max(len(tokens) - 1, 0))] != wanted)
        )
        if wrong.size:
            raise DataError(
                f"{path}: document {first + int(wrong[0])} does not {place} with token {wanted}"
            )
