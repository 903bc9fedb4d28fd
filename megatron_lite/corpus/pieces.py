"""Make pieces of the work: parts of the input of a fixed size, whatever the number of processes.

A finished piece is a pair in the work folder, `<key>.bin` and `<key>.idx`, with `<key>.hashes` (128
bits of each document's text, if duplicates are to be removed) and the record `<key>.json`, which
appears last and contains the other files' digests. The key depends on everything that the tokens
depend on, so a later start keeps every piece that it needs, even if other files or options have
changed.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import numpy as np

from megatron_lite.corpus.documents import (
    BadDocument,
    Fault,
    Findings,
    Reading,
    Span,
    TextFields,
    cut_file,
)
from megatron_lite.corpus.fast_tokenizer import FAST, ODD, FastTokenizer, Flat
from megatron_lite.corpus.inputs import InputFile, check_packages
from megatron_lite.data.disk_array import replace_file, replace_json
from megatron_lite.data.indexed_dataset import IndexedDatasetWriter, smallest_dtype
from megatron_lite.data.tokenizing import JsonTokenizer, MarkedText, load_tokenizer
from megatron_lite.data.workers import end_with_parent, how_it_ended, ignore_signals, signals_held
from megatron_lite.errors import DataError, PeerError
from megatron_lite.run.host import limit_tokenizer_threads

# Characters per call of the tokenizer: its threads share a batch, and its result is in memory.
BATCH_CHARACTERS = 1 << 20
ABSENT = "none"  # value of --begin_of_document and --end_of_document
SMALLEST_PIECE_BYTES = 2 << 20
LARGEST_PIECE_BYTES = 512 << 20
USUAL_PIECES = 4096  # in a corpus between 8 GB and 2 TB
MOST_SPANS = 4096  # per piece
LIGHT_BYTES = 200_000_000  # Size of an input for which fastokens needs no workers: a few seconds.
# Version of the rules by which files become documents and these become tokens. Raise it with every
# change that can give other tokens: work and text caches from older rules are then not found, and
# their pairs are recognized by their summary.
RULES = 2
HASH_BYTES = 16
CHUNK_BYTES = 1 << 24
Progress = Callable[[int, int, int], None]  # bytes read, documents and tokens since the last call
# A worker's process, the input file that it reads, and the arguments of a `Progress`.
Message = tuple[int, str, int, int, int]
POLL_S = 0.1
_WORKER: ContextVar[tuple[PieceWriter, SimpleQueue[Message]]] = ContextVar(
    "the writer and queue of this worker"
)


@dataclass(frozen=True)
class Encoding:
    """A tokenizer, as a file that no longer changes, and its tokens around a document (None: no
    token)."""

    file: str  # in the work folder
    is_byte: bool  # whether it is the built-in tokenizer, which needs no file
    digest: str
    vocab_size: int
    begin: int | None
    end: int | None
    special_tokens: bool
    unknown: int | None = None  # token for text unknown to the tokenizer

    @property
    def dtype(self) -> str:
        """The smallest dtype of token files for every token id."""
        return smallest_dtype(self.vocab_size)


def batches(texts: Iterable[str], characters: int = BATCH_CHARACTERS) -> Iterator[list[str]]:
    """Group texts into lists of about this many characters."""
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


@dataclass(frozen=True)
class Recipe:
    """Everything that a piece's content depends on, except the input."""

    encoding: Encoding
    versions: dict[str, str]  # of everything that determines the ids; of fastokens if it is used
    fields: TextFields
    strict: bool
    hashes: bool
    most_documents: int | None  # the most that any piece needs


@dataclass(frozen=True)
class Piece:
    """A part of the work: consecutive spans."""

    key: str
    spans: tuple[Span, ...]


@dataclass
class Record:
    """A piece's result; if --strict stopped it, only what was found."""

    documents: int
    tokens: int
    text_bytes: int
    found: Findings
    digests: dict[str, str]  # of the files, by their ending
    silent: int = 0  # conversations without an answer


def plan_pieces(
    files: Sequence[InputFile], recipe: Recipe, piece_bytes: int | None = None
) -> list[Piece]:
    """Cut the input into pieces: a pure function of the files, their sizes and the recipe.

    Raises:
        DataError: if a parquet file is damaged.
        UsageError: if a package that a file needs is not installed.
    """
    check_packages(files)
    total = sum(file.size_bytes for file in files)
    goal = piece_bytes or min(max(total // USUAL_PIECES, SMALLEST_PIECE_BYTES), LARGEST_PIECE_BYTES)
    parts, size = list[list[Span]](), 0
    for span in (span for file in files for span in cut_file(file, goal)):
        if not parts or size + span.size_bytes > goal or len(parts[-1]) == MOST_SPANS:
            parts.append([])
            size = 0
        parts[-1].append(span)
        size += span.size_bytes
    return [_piece(spans, recipe) for spans in parts]


def _piece(spans: list[Span], recipe: Recipe) -> Piece:
    content = json.dumps([RULES, asdict(recipe), [asdict(span) for span in spans]], sort_keys=True)
    return Piece(hashlib.sha256(content.encode()).hexdigest()[:32], tuple(spans))


def finished(folder: Path, key: str) -> Record | None:
    """Return the record of a finished piece whose files are unchanged, else None."""
    try:
        values = json.loads((folder / f"{key}.json").read_bytes())
        faults = [Fault(**fault) for fault in values["found"].pop("first_faults")]
        record = Record(**{**values, "found": Findings(**values["found"], first_faults=faults)})
        whole = all(
            digest_of(folder / f"{key}{ending}") == value
            for ending, value in record.digests.items()
        )
        return record if whole else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


class PieceWriter:
    """Makes pieces in a work folder."""

    def __init__(self, folder: Path, recipe: Recipe, fast: FastTokenizer | None = None) -> None:
        """fast: the tokenizer, if the recipe names fastokens and it is already loaded."""
        self.folder = folder
        self.recipe = recipe
        self.fast = fast
        # see `JsonTokenizer.encode_marked`
        self._dtype = "<i4" if recipe.fields.marked else recipe.encoding.dtype

    @functools.cached_property
    def _tokenizer(self) -> JsonTokenizer:
        if self.fast:
            return self.fast
        encoding = self.recipe.encoding
        name = "byte" if encoding.is_byte else str(self.folder / encoding.file)
        found = load_tokenizer(name, special_tokens=encoding.special_tokens, needs_end=False)
        return FastTokenizer(found) if FAST in self.recipe.versions else found

    def make(self, piece: Piece, on_progress: Progress) -> Record:
        """Return a piece's record, making the piece unless it is finished. on_progress: called
        after each batch.

        Raises:
            DataError: if an input cannot be read.
            StorageError: if the work folder cannot be written.
        """
        record = finished(self.folder, piece.key)
        if record is not None:
            on_progress(
                sum(span.size_bytes for span in piece.spans), record.documents, record.tokens
            )
            return record
        reading = Reading(piece.spans, self.recipe.fields, self.recipe.strict)
        try:
            record = self._write(str(self.folder / piece.key), reading, on_progress)
        except BadDocument:
            return Record(0, 0, 0, reading.findings, {})
        replace_json(self.folder / f"{piece.key}.json", asdict(record))
        return record

    def _write(self, prefix: str, reading: Reading, on_progress: Progress) -> Record:
        """Write a piece's files; return its record."""
        text_bytes = 0
        read_bytes = 0
        silent = 0
        hashes = list[bytes]()
        most = self.recipe.most_documents
        with IndexedDatasetWriter(prefix, self._dtype) as writer:
            for texts in batches(reading.documents()):
                if most is not None:
                    texts = texts[: most - writer.num_documents]
                tokens, sizes = self._encode(texts, writer.num_documents)
                if len(sizes) and sizes.max() > np.iinfo(np.int32).max:
                    path = reading.spans[0].file.path
                    raise DataError(
                        f"{path}: a document has {sizes.max():,} tokens, over 2**31 - 1"
                    )
                writer.add_documents(tokens, sizes.astype(np.int32))
                encoded = [text.encode() for text in texts]
                text_bytes += sum(map(len, encoded))
                silent += sum(isinstance(text, MarkedText) and not text.spans for text in texts)
                if self.recipe.hashes:
                    hashes += [
                        hashlib.blake2b(text, digest_size=HASH_BYTES).digest() for text in encoded
                    ]
                on_progress(reading.read_bytes - read_bytes, len(texts), len(tokens))
                read_bytes = reading.read_bytes
                if writer.num_documents == most:
                    break
        digests = {".bin": writer.digest, ".idx": digest_of(Path(prefix + ".idx"))}
        if self.recipe.hashes:
            replace_file(Path(prefix + ".hashes"), b"".join(hashes))
            digests[".hashes"] = digest_of(Path(prefix + ".hashes"))
        total = sum(span.size_bytes for span in reading.spans)
        # trailing faults, and documents beyond --max_documents
        on_progress(total - read_bytes, 0, 0)
        return Record(
            writer.num_documents,
            writer.num_tokens,
            text_bytes,
            reading.findings,
            digests,
            silent=silent,
        )

    def _encode(self, texts: Sequence[str], before: int) -> Flat:
        """Return the tokens of documents, after `before` others, in one array, and their sizes,
        (len(texts),)."""
        tokenizer, encoding = self._tokenizer, self.recipe.encoding
        if isinstance(tokenizer, FastTokenizer) and not any(ODD in text for text in texts):
            ids, places = tokenizer.encode_flat(texts, before)
        else:
            if self.recipe.fields.marked:
                encoded = list(tokenizer.encode_marked(texts))
            else:
                encoded = tokenizer.encode_batch(texts)
            parts = [np.empty(0, np.uint8), *encoded]
            ids, places = np.concatenate(parts), np.cumsum([*map(len, parts)])
        ids = ids.astype(self._dtype)
        marks = ((places[:-1], encoding.begin), (places[1:], encoding.end))
        if used := [mark for mark in marks if mark[1] is not None]:
            where, marking = zip(*used, strict=True)
            ids = np.insert(ids, np.stack(where, 1).ravel(), marking * len(texts))
        return ids, np.diff(places) + len(used)


def make_pieces(
    pieces: Sequence[Piece], writer: PieceWriter, num_processes: int, on_progress: Progress
) -> Iterator[Record]:
    """Yield each piece's record, in order; close the generator to stop the workers.

    A single piece is worked on in this process, whose tokenizer uses all cores. With fastokens, so
    is a small input; a large one has half as many workers, of two threads each, because each loads
    both libraries.

    Raises:
        UnfitError: if fastokens does not match `tokenizers`.
        DataError: the first failed piece's.
        StorageError: if the work folder cannot be written.
        PeerError: if a worker dies.
    """
    # workers would not have them
    pipes = any(not span.file.regular for piece in pieces for span in piece.spans)
    is_fast = writer.fast is not None
    size_bytes = sum(span.size_bytes for piece in pieces for span in piece.spans)
    count = min(num_processes // (1 + is_fast), len(pieces))
    if pipes or len(pieces) <= 1 or (is_fast and (count <= 1 or size_bytes < LIGHT_BYTES)):
        yield from (writer.make(piece, on_progress) for piece in pieces)
        return
    # A fork would copy the threads' locks in their current state.
    context = multiprocessing.get_context("spawn")
    messages: SimpleQueue[Message] = context.SimpleQueue()
    places: dict[int | None, str] = {}  # by process: the file that it reads
    setup = (writer.folder, writer.recipe, max(1, num_processes // count), messages)
    pool = ProcessPoolExecutor(count, context, _begin, setup)
    try:
        with signals_held():
            records = [pool.submit(_make, piece) for piece in pieces]
        for record in records:
            while not record.done() or not messages.empty():
                concurrent.futures.wait([record], POLL_S if messages.empty() else 0)
                while not messages.empty():
                    process, places[process], *numbers = messages.get()
                    if any(numbers):
                        on_progress(*numbers)
            yield record.result()
    except BrokenProcessPool:
        raise _lost(list(pool._processes.values()), places) from None
    finally:
        for worker in pool._processes.values():
            worker.kill()  # even in the middle of its work
        pool.shutdown(cancel_futures=True)


def _begin(folder: Path, recipe: Recipe, threads: int, messages: SimpleQueue[Message]) -> None:
    """Set up a worker, which ends when the main process does, even in the middle of a piece."""
    ignore_signals()
    limit_tokenizer_threads(threads)
    threading.Thread(target=end_with_parent, daemon=True).start()
    _WORKER.set((PieceWriter(folder, recipe), messages))


def _make(piece: Piece) -> Record:
    """Make a piece in a worker, and report progress to the main process."""
    writer, messages = _WORKER.get()

    def tell(read_bytes: int, documents: int, tokens: int) -> None:
        messages.put((os.getpid(), piece.spans[0].file.path, read_bytes, documents, tokens))

    tell(0, 0, 0)  # which file this process reads
    return writer.make(piece, tell)


def _lost(workers: Sequence[BaseProcess], places: dict[int | None, str]) -> PeerError:
    """Return an error that names the dead worker. The others ignore the pool's SIGTERM, or end with
    exit code 0."""
    deadline_s = time.monotonic() + 5
    while (
        not (dead := [worker for worker in workers if worker.exitcode])
        and time.monotonic() < deadline_s
    ):
        # the pool sees a death from closed pipes, a moment before there is an exit code
        time.sleep(0.01)
    worker = (dead or workers)[0]
    place = f" at {places[worker.pid]}" if worker.pid in places else ""
    ended = how_it_ended(worker, "--num_processes") + place
    return PeerError(
        f"worker process {worker.pid} {ended}; finished pieces are kept: start the same command again"
    )
