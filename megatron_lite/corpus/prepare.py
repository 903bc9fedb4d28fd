"""Prepare a corpus: plan the pieces, make them, assemble the pair. A second start continues where
the first stopped.

The result depends neither on the number of processes nor on interruptions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lite import __version__
from megatron_lite.config.values import counted
from megatron_lite.corpus.documents import Faults, TextFields
from megatron_lite.corpus.fast_tokenizer import FAST, FastTokenizer, UnfitError
from megatron_lite.corpus.inputs import DEFAULT_SUFFIXES, UNFINISHED, InputFile, find_inputs
from megatron_lite.corpus.pieces import (
    CHUNK_BYTES,
    HASH_BYTES,
    RULES,
    Encoding,
    Piece,
    PieceWriter,
    Recipe,
    Record,
    digest_of,
    make_pieces,
    plan_pieces,
)
from megatron_lite.corpus.prepared import SUMMARY, is_complete
from megatron_lite.corpus.tokenizer_choice import TokenizerChoice
from megatron_lite.data.disk_array import replace_file, replace_json, writing
from megatron_lite.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter
from megatron_lite.data.tokenizing import config_beside, read_object
from megatron_lite.errors import DataError, OutOfMemoryError, StorageError, UsageError
from megatron_lite.run.durable_files import lock_file
from megatron_lite.run.host import limit_tokenizer_threads
from megatron_lite.run.progress_line import ByteProgress

LOCK = "lock"  # in the work folder, `<prefix>.partial`, like the next
PUBLISHED = "publishing"  # from here on, files under the final names belong to this work

# Tokens counted at a time: numpy converts them to 64 bits, which takes ten times as long beyond the
# caches.
COUNTED = 1 << 18
_POLL_S = 0.2  # while another process owns the work folder


@dataclass(frozen=True)
class CorpusOptions:
    """All user options."""

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerChoice
    fields: TextFields = TextFields(("text",))
    suffixes: tuple[str, ...] = DEFAULT_SUFFIXES
    strict: bool = False
    overwrite: bool = False
    num_processes: int = 1
    max_documents: int | None = None
    validation_documents: int = 0
    shards: int = 1
    deduplicate: bool = False
    piece_bytes: int | None = None  # None: chosen by the input's size
    on_wait: Callable[[], None] | None = (
        None  # for another process that prepares the same; None: refuse
    )

    @property
    def outputs(self) -> list[str]:
        """Each pair's prefix."""
        prefix, count = self.output_prefix, self.shards
        shards = (
            [prefix] if count == 1 else [f"{prefix}-{n:05d}-of-{count:05d}" for n in range(count)]
        )
        return [*shards, *([prefix + "_validation"] if self.validation_documents else [])]

    @property
    def masks(self) -> list[str]:
        """Each pair's loss mask prefix."""
        return [prefix + "_mask" for prefix in self.outputs] if self.fields.marked else []


def prepare(options: CorpusOptions) -> tuple[dict[str, Any], bool]:
    """Write a corpus's pairs; return its summary, and whether there was anything to do.

    Raises: RunError: usage, data, storage, or a worker that died. Finished pieces are kept.
    """
    prefix = options.output_prefix
    if Path(prefix).name in ("", ".", "..") or prefix.endswith(os.sep):
        raise UsageError(
            f"--output_prefix={prefix}: names a folder; add a name for the files, such as data/mine"
        )
    files = find_inputs(options.inputs, options.suffixes)
    fingerprints = fingerprints_of(options, files)
    if not options.overwrite and (summary := is_complete(prefix, fingerprints)):
        return summary, False
    folder = Path(prefix + UNFINISHED)
    with held(folder, options.on_wait):
        if not options.overwrite and (summary := is_complete(prefix, fingerprints)):
            remove(folder)
            return summary, False
        try:
            # Not before: another process may have been about to publish.
            _check_free(options, folder, fingerprints[0])
            summary = _write(options, files, folder, fingerprints)
        except (DataError, UsageError):
            if not _finished(folder):
                remove(folder)
            raise
        except MemoryError as error:
            names = ", ".join(options.inputs)
            raise OutOfMemoryError(
                f"{names}: out of memory while documents were read; split large ones, or give fewer --num_processes"
            ) from error
        remove(folder)
        return summary, True


def _write(
    options: CorpusOptions, files: Sequence[InputFile], folder: Path, fingerprints: Sequence[str]
) -> dict[str, Any]:
    """Make the missing pieces in the work folder, and publish the pairs; return the summary."""
    encoding, tokenizer = options.tokenizer.open(folder, files, options.fields, options.strict)
    limit_tokenizer_threads(options.num_processes)
    fast = options.tokenizer.fast(tokenizer, files, options.fields)
    pieces, records, faults, versions = _make(options, files, folder, encoding, fast)
    if not sum(record.documents for record in records):
        skipped = faults.counts.total()
        raise DataError(
            f"{', '.join(options.inputs)}: no documents left to write ({skipped} skipped)"
        )
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedDatasetWriter(prefix, encoding.dtype))
            for prefix in options.outputs
        ]
        for writer, prefix in zip(writers, options.masks, strict=False):
            writer.mask = stack.enter_context(IndexedDatasetWriter(prefix, "|u1"))
        counts, duplicates = _assemble(
            options, folder, pieces, records, writers, encoding.vocab_size
        )
        tokens = int(counts.sum())
        shares = counts[counts > 0] / max(tokens, 1)
        text_bytes = sum(record.text_bytes for record in records)  # of all documents read
        summary = {
            "documents": sum(writer.num_documents for writer in writers),
            "tokens": tokens,
            "text_bytes": text_bytes,
            "bytes_per_token": text_bytes / max(tokens, 1),
            "unigram_entropy_nats": float(-(shares * np.log(shares)).sum()),
            "unknown_tokens": 0 if encoding.unknown is None else int(counts[encoding.unknown]),
            "duplicates": duplicates,
            **(
                {"without_answer": sum(record.silent for record in records)}
                if options.masks
                else {}
            ),
            "skipped": dict(sorted(faults.counts.items())),
            "first_skipped": faults.first,
            "vocab_size": encoding.vocab_size,
            "begin_of_document": encoding.begin,
            "end_of_document": encoding.end,
            "dtype": np.dtype(encoding.dtype).name,
            "inputs": describe_inputs(files),
            "tokenizer_sha256": encoding.digest,
            "tokenizer_source": options.tokenizer.identity()[: len(encoding.digest)],
            "options": _options_of_the_result(options),
            "versions": versions,
            "rules": RULES,
            "fingerprint": fingerprints[FAST in versions],
        }
        replace_file(folder / PUBLISHED, fingerprints[0].encode())
        _publish(options.output_prefix, writers, summary, folder / encoding.file)
    return summary


def _make(
    options: CorpusOptions,
    files: Sequence[InputFile],
    folder: Path,
    encoding: Encoding,
    fast: FastTokenizer | None,
) -> tuple[list[Piece], list[Record], Faults, dict[str, str]]:
    """Write pieces until the document limit is reached; rewrite all if fastokens turns out to be
    wrong.

    Finished pieces from `tokenizers` are always used, so that a start killed during a rewrite
    continues.

    Returns: the pieces, their records and faults, and the versions of the software that made them.
    """
    limit = None if options.deduplicate else options.max_documents
    others, finished = {encoding.file.partition(".")[0], PUBLISHED}, _finished(folder)
    choices = _versions(options, files)[: 1 + (fast is not None)]
    for versions in choices if finished else choices[-1:]:
        recipe = Recipe(
            encoding, versions, options.fields, options.strict, options.deduplicate, limit
        )
        pieces = plan_pieces(files, recipe, options.piece_bytes)
        keys = {piece.key for piece in pieces}
        if fast is not None and FAST not in versions and finished & keys:
            print("going on with the pieces that tokenizers has made", file=sys.stderr)
            fast = None
            break
    if stale := len(finished - keys):
        print(
            f"{counted(stale, 'finished piece')} of other options or versions: made anew",
            file=sys.stderr,
        )
    _sweep(folder, keys | others)
    records = list[Record]()
    documents = 0
    faults = Faults(options.strict)
    total_bytes = sum(span.size_bytes for piece in pieces for span in piece.spans)
    try:
        with ByteProgress("tokenizing", total_bytes) as progress:
            made = make_pieces(
                pieces, PieceWriter(folder, recipe, fast), options.num_processes, progress.add
            )
            with contextlib.closing(made):  # type: ignore[type-var]
                for piece, record in zip(pieces, made, strict=False):
                    faults.add(piece.spans, record.found)
                    records.append(record)
                    documents += record.documents
                    if limit is not None and documents >= limit:
                        break
    except UnfitError as reason:
        print(f"{reason}: making all tokens anew with tokenizers", file=sys.stderr)
        _sweep(folder, others)
        return _make(options, files, folder, encoding, None)
    return pieces[: len(records)], records, faults, versions


def _assemble(
    options: CorpusOptions,
    folder: Path,
    pieces: Sequence[Piece],
    records: Sequence[Record],
    writers: Sequence[IndexedDatasetWriter],
    vocab_size: int,
) -> tuple[NDArray[np.int64], int]:
    """Copy the chosen documents into the pairs; return each token id's count, and the number of
    duplicates."""
    hashes = None
    if options.deduplicate:
        files = [folder / f"{piece.key}.hashes" for piece in pieces]
        hashes = np.concatenate([np.fromfile(file, dtype=f"S{HASH_BYTES}") for file in files])
    count = sum(record.documents for record in records)
    output, duplicates = select(
        count, hashes, options.max_documents, options.validation_documents, options.shards
    )
    kept = np.bincount(output[output >= 0], minlength=len(writers))
    if not kept.all():
        raise UsageError(
            f"--shards={options.shards} --validation_documents={options.validation_documents}: a pair would be "
            f"empty with {int(kept.sum()):,} documents in total; write smaller numbers"
        )
    return write_pairs(folder, pieces, records, output, writers, vocab_size), duplicates


def select(
    num_documents: int,
    hashes: NDArray[np.bytes_] | None,
    most_documents: int | None,
    validation_documents: int,
    shards: int,
) -> tuple[NDArray[np.int32], int]:
    """Choose each document's pair: a pure function of the documents' order and hashes.

    Pairs 0 to `shards` - 1 get equal numbers of consecutive documents. The last one gets the
    validation documents, if any, spread evenly over the corpus.

    hashes: (n,); the first document of each hash is kept.

    Returns: (n,) the pair's number, or -1 for a dropped document; and the number of duplicates.
    """
    kept = (
        np.arange(num_documents)
        if hashes is None
        else np.sort(np.unique(hashes, return_index=True)[1])
    )
    duplicates = num_documents - len(kept)
    kept = kept[:most_documents]
    output = np.full(num_documents, -1, dtype=np.int32)
    count = len(kept)
    is_validation = np.zeros(count, dtype=bool)
    wanted = min(validation_documents, count)
    is_validation[(2 * np.arange(wanted, dtype=np.int64) + 1) * count // (2 * max(wanted, 1))] = (
        True
    )
    training = kept[~is_validation]
    output[training] = np.arange(len(training), dtype=np.int64) * shards // max(len(training), 1)
    output[kept[is_validation]] = shards
    return output, duplicates


def write_pairs(
    folder: Path,
    pieces: Sequence[Piece],
    records: Sequence[Record],
    output: NDArray[np.int32],
    writers: Sequence[IndexedDatasetWriter],
    vocab_size: int,
) -> NDArray[np.int64]:
    """Copy the documents of all pieces into the pairs that `output` names, without publishing them.

    Returns: how often each token id occurs in the pairs, (vocab_size,).

    Raises: StorageError if a piece has changed since it was written, or a pair cannot be written.
    """
    frequencies = np.zeros(vocab_size, np.int64)
    done = 0
    itemsize = writers[0].dtype.itemsize
    total_bytes = sum(record.tokens for record in records) * itemsize
    with ByteProgress("writing", total_bytes) as progress:
        for piece, record in zip(pieces, records, strict=True):
            prefix, digest = str(folder / piece.key), hashlib.sha256()
            if digest_of(Path(prefix + ".idx")) != record.digests[".idx"]:
                raise _damaged(prefix + ".idx")
            for first, sizes, tokens in IndexedDataset(prefix).parts(CHUNK_BYTES // itemsize):
                digest.update(tokens.tobytes())
                pairs = output[done + first : done + first + len(sizes)]
                for number in np.unique(pairs[pairs >= 0]).tolist():
                    chosen = pairs == number
                    part = tokens if chosen.all() else tokens[np.repeat(chosen, sizes)]
                    if (
                        mask := writers[number].mask
                    ) is not None:  # see `JsonTokenizer.encode_marked`
                        mask.add_documents((part >= 0).astype(np.uint8), sizes[chosen])
                        part = np.where(part >= 0, part, ~part).astype(writers[number].dtype)
                    writers[number].add_documents(part, sizes[chosen])
                    for start in range(0, len(part), COUNTED):
                        frequencies += np.bincount(
                            part[start : start + COUNTED], minlength=vocab_size
                        )
                progress.add(tokens.nbytes)
            if digest.hexdigest() != record.digests[".bin"]:
                raise _damaged(prefix + ".bin")
            done += record.documents
    return frequencies


def _damaged(path: str) -> StorageError:
    return StorageError(
        f"{path}: has changed since it was written; start the same command again to make it anew"
    )


def _publish(
    prefix: str, writers: Sequence[IndexedDatasetWriter], summary: dict[str, Any], tokenizer: Path
) -> None:
    """Rename all files to their final names: each .idx after its .bin, and all after the summary
    and the tokenizer."""
    files = summary["files"] = {}
    writers = [*writers, *(writer.mask for writer in writers if writer.mask is not None)]
    for writer in writers:
        index, name = writer.write_index(), Path(writer.prefix).name
        files[name + ".bin"] = {
            "bytes": writer.num_tokens * writer.dtype.itemsize,
            "sha256": writer.digest,
        }
        files[name + ".idx"] = {"bytes": index.stat().st_size, "sha256": digest_of(index)}
    for writer in writers:  # old tokens must not be usable with a new tokenizer
        with writing(writer.prefix + ".idx"):
            Path(writer.prefix + ".idx").unlink(missing_ok=True)
    replace_file(Path(prefix + ".tokenizer.json"), tokenizer.read_bytes())
    config = read_object(config_beside(tokenizer))
    conversations = summary["options"].get("conversations")
    config = conversations["template"].config if conversations else config
    path = Path(prefix + ".tokenizer_config.json")
    path.unlink(missing_ok=True)  # for another tokenizer
    if config:
        replace_json(path, config)
    replace_json(Path(prefix + SUMMARY), summary)
    for writer in writers:
        writer.commit()


@contextlib.contextmanager
def held(folder: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Create a work folder and own it for a block; the system releases it however the process ends.

    on_wait: called once if another process owns the folder; then wait for it.

    Raises: StorageError if the folder cannot be created; without `on_wait`, if another process owns
    it.
    """
    descriptor, waits = -1, False
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{folder}: cannot be created: {error.strerror}") from error
        try:
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if lock_file(descriptor, folder / LOCK):
                break
        except FileNotFoundError:  # its owner has just removed the folder
            continue
        except OSError as error:
            raise StorageError(f"{folder}: cannot be written: {error.strerror}") from error
        os.close(descriptor)
        if on_wait is None:
            raise StorageError(
                f"{folder}: another process is writing it; wait for it or take another prefix"
            )
        if not waits:
            on_wait()
            waits = True
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(descriptor)


def _sweep(folder: Path, keys: Collection[str]) -> None:
    """Delete pieces that are not among `keys`, and other remains of killed processes."""
    for path in folder.iterdir():
        if path.name != LOCK and path.name.partition(".")[0] not in keys:
            with contextlib.suppress(OSError):
                path.unlink()


def remove(folder: Path) -> None:
    """Remove a work folder that this process owns, the lock last."""
    with contextlib.suppress(OSError):
        _sweep(folder, ())
        shutil.rmtree(folder)


def _finished(folder: Path) -> set[str]:
    """Return the keys of the finished pieces with documents in a work folder."""
    return {
        path.stem
        for path in folder.glob("*.bin")
        if path.stat().st_size and path.with_suffix(".json").exists()
    }


def _versions(options: CorpusOptions, files: Sequence[InputFile]) -> list[dict[str, str]]:
    """Return the versions of the software that determines ids: always without fastokens, also with
    it if allowed."""
    import tokenizers

    found = [{"megatron_lite": __version__, "tokenizers": tokenizers.__version__}]
    with contextlib.suppress(UnfitError):
        found.append({**found[0], FAST: options.tokenizer.fast_version(files, options.fields)})
    return found


def describe_inputs(files: Sequence[InputFile]) -> dict[str, Any]:
    """Return the number and bytes of the input files, and a digest of their names and sizes."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.path}\0{file.size_bytes}\n".encode(errors="surrogateescape"))
    return {
        "files": len(files),
        "bytes": sum(file.size_bytes for file in files),
        "sha256": digest.hexdigest(),
    }


def _options_of_the_result(options: CorpusOptions) -> dict[str, Any]:
    return {
        "tokenizer": options.tokenizer.described(),
        "json_keys": list(options.fields.keys),
        "separator": options.fields.separator,
        "max_documents": options.max_documents,
        "validation_documents": options.validation_documents,
        "shards": options.shards,
        "deduplicate": options.deduplicate,
        **({"conversations": asdict(options.fields)} if options.fields.marked else {}),
    }


def fingerprints_of(options: CorpusOptions, files: Sequence[InputFile]) -> list[str]:
    """Return digests of everything that the result depends on: names, sizes and times of the
    inputs, tokenizer, options.

    The first is for `tokenizers`, whose pair always works; the second, if any, is for fastokens.
    """
    found = []
    for versions in _versions(options, files):
        digest = hashlib.sha256()
        content = [RULES, versions, options.tokenizer.identity(), _options_of_the_result(options)]
        digest.update(json.dumps(content, sort_keys=True).encode())
        for file in files:
            digest.update(json.dumps(asdict(file), sort_keys=True).encode())
        found.append(digest.hexdigest())
    return found


def _check_free(options: CorpusOptions, folder: Path, fingerprint: str) -> None:
    """Refuse to overwrite files, except those that an interrupted start of this same work was
    publishing."""
    if options.overwrite:
        return
    with contextlib.suppress(OSError):
        if (folder / PUBLISHED).read_text("utf-8") == fingerprint:
            return
    check_free([*options.outputs, *options.masks])


def check_free(prefixes: Iterable[str]) -> None:
    """Refuse to overwrite the files of pairs."""
    for prefix in prefixes:
        for path in (prefix + ".idx", prefix + ".bin"):
            if os.path.lexists(path):
                raise UsageError(
                    f"{path}: exists; choose another --output_prefix, or replace it with --overwrite"
                )
