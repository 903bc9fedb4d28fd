"""Tokenize text files, folders and .jsonl files into <output_prefix>.bin and .idx.

    python scripts/prepare_data.py my_texts --output_prefix data/mine --tokenizer byte
    python scripts/prepare_data.py corpus.jsonl --output_prefix data/mine --train_tokenizer 4096
    python scripts/prepare_data.py ~/code --suffix .py,.md --output_prefix data/code --tokenizer some/tokenizer.json

A text file is one document, and so is each line of a .jsonl file, with its text under --json_key. Folders are read
recursively in the order of their paths. An end-of-document token follows each document. <output_prefix>.tokenizer.json
(for --tokenizer_file in training) and <output_prefix>.summary.json are written beside the token files. The .idx file
appears last: without it the data are incomplete.

Exit codes: 0 done, 2 usage, 3 data, 8 storage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # works without installation

import scripts  # noqa: F401  names a missing package

# isort: split
import numpy as np

from megatron_lite.data.dataset_writer import IndexedDatasetWriter, replace_file
from megatron_lite.data.indexed_dataset import smallest_dtype
from megatron_lite.data.tokenizing import ByteTokenizer, Tokenizer, load_tokenizer, save_byte_tokenizer, train_tokenizer
from megatron_lite.errors import EXIT_DONE, DataError, RunError, StorageError, UsageError
from megatron_lite.run.progress_line import ProgressLine, format_duration

BATCH_CHARACTERS = 1 << 22  # batch size for the threads of the tokenizer
SHOWN_FAULTS = 10


@dataclass
class Faults:
    """Counts of skipped documents; the first few are also named on standard error."""

    strict: bool
    quiet: bool = False
    counts: dict[str, int] = field(default_factory=dict)

    def add(self, place: str, kind: str, detail: str = "") -> None:
        """Record a document at `place`, a file or a file and line.

        Raises: DataError with --strict.
        """
        message = f"{place}: {kind}" + (f": {detail}" if detail else "")
        if self.strict:
            raise DataError(message)
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if self.quiet:
            return
        if self.total <= SHOWN_FAULTS:
            print(f"skipped {message}", file=sys.stderr)
        elif self.total == SHOWN_FAULTS + 1:
            print("skipped more: from here on they are only counted", file=sys.stderr)

    @property
    def total(self) -> int:
        return sum(self.counts.values())


def input_files(inputs: Sequence[str], suffixes: tuple[str, ...]) -> list[Path]:
    """Return the named files in order; a folder yields its files that end in one of `suffixes`, sorted by path.

    Raises: DataError if an input does not exist, or a folder has no such file.
    """
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            found = [Path(folder, file) for folder, _, names in os.walk(path, onerror=_refuse) for file in names]
            kept = sorted(file for file in found if file.name.endswith(suffixes) and file.is_file())
            if not kept:
                raise DataError(f"{path}: no file in this folder ends in {' or '.join(suffixes)} (--suffix)")
            files += kept
        elif path.exists():
            files.append(path)
        else:
            raise DataError(f"{path}: no such file or folder")
    return files


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error


class Reading:
    """One pass over the input files, and its progress on standard error."""

    def __init__(self, purpose: str, files: Sequence[Path]) -> None:
        self.purpose = purpose
        self.total_bytes = sum(path.stat().st_size for path in files)  # 0 for a pipe
        self.read_bytes = 0
        self.line = ProgressLine()

    def add(self, num_bytes: int) -> None:
        """Count bytes of a file."""
        self.read_bytes += num_bytes
        self.line.update(self.in_words)

    def in_words(self, seconds: float) -> str:
        """Describe the pass: `tokenizing: 4.5 of 10.0 MB (45%), 0:00:12 left`."""
        text = f"{self.purpose}: {self.read_bytes / 1e6:,.1f} MB"
        if self.read_bytes > self.total_bytes:
            return text
        left_s = seconds * (self.total_bytes / self.read_bytes - 1)
        share = self.read_bytes / self.total_bytes
        return f"{text[:-3]} of {self.total_bytes / 1e6:,.1f} MB ({share:.0%}), {format_duration(left_s)} left"


def documents(files: Sequence[Path], json_key: str, faults: Faults, purpose: str) -> Iterator[str]:
    """Yield the texts of all files in order, skipping blank and damaged texts; `purpose` names the pass."""
    reading = Reading(purpose, files)
    for path in files:
        try:
            if path.name.endswith(".jsonl"):
                yield from _json_lines(path, json_key, faults, reading)
            else:
                data = path.read_bytes()
                reading.add(len(data))
                text = _decoded(data, str(path), faults)
                if text is not None:
                    yield text
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    reading.line.close()


def _json_lines(path: Path, json_key: str, faults: Faults, reading: Reading) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{path}: line {number}"
            reading.add(len(line))
            decoded = _decoded(line, place, faults)
            if decoded is None:
                continue
            try:
                value = json.loads(decoded)
            except (ValueError, RecursionError) as error:
                faults.add(place, "not JSON", str(error))
                continue
            text = value.get(json_key) if isinstance(value, dict) else None
            if not isinstance(text, str):
                faults.add(place, f"no text under the key {json_key!r} (--json_key)")
            elif not text.strip():
                faults.add(place, "blank")
            elif not _is_unicode(text):
                faults.add(place, "contains half of a surrogate pair, which is not a character")
            else:
                yield text


def _decoded(data: bytes, place: str, faults: Faults) -> str | None:
    """Decode UTF-8 without a byte order mark; return None and record a fault if it is blank or not UTF-8."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        faults.add(place, "not UTF-8", f"byte {error.start} is 0x{data[error.start]:02x}")
        return None
    if not text.strip():
        faults.add(place, "blank")
        return None
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Group texts into lists of about BATCH_CHARACTERS."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_tokens(texts: Iterator[str], tokenizer: Tokenizer, writer: IndexedDatasetWriter) -> dict[str, Any]:
    """Tokenize and write all texts; return their statistics."""
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    end = np.array([tokenizer.end_of_document], dtype=np.int64)
    text_bytes = 0
    for batch in batches(texts):
        text_bytes += sum(len(text.encode()) for text in batch)
        for ids in tokenizer.encode_batch(batch):
            document = np.concatenate([ids, end])
            counts += np.bincount(document, minlength=len(counts))
            writer.add_document(document)
    frequencies = counts[counts > 0] / max(counts.sum(), 1)
    return {
        "documents": writer.num_documents,
        "tokens": writer.num_tokens,
        "text_bytes": text_bytes,
        "bytes_per_token": text_bytes / max(writer.num_tokens, 1),
        "unigram_entropy_nats": float(-(frequencies * np.log(frequencies)).sum()),
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "dtype": writer.dtype.name,
    }


def prepare(options: argparse.Namespace) -> None:
    """Run the command."""
    prefix: str = options.output_prefix
    _check_output(prefix, options.overwrite)
    suffixes = tuple(part if part.startswith(".") else "." + part for part in options.suffix.split(",") if part)
    if not suffixes:
        raise UsageError("--suffix: no file ending given; write for example --suffix=.txt,.md")
    files = input_files(options.inputs, suffixes)
    faults = Faults(strict=options.strict)
    tokenizer_file = Path(prefix + ".tokenizer.json")
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder, "tokenizer.json")
        tokenizer = _tokenizer(options, files, kept)
        with IndexedDatasetWriter(prefix, smallest_dtype(tokenizer.vocab_size)) as writer:
            summary = write_tokens(documents(files, options.json_key, faults, "tokenizing"), tokenizer, writer)
            if writer.num_documents == 0:
                raise DataError(f"{', '.join(options.inputs)}: no documents left to write ({faults.total} skipped)")
            summary["skipped"] = dict(sorted(faults.counts.items()))
            # Remove the old .idx first: old tokens beside a new tokenizer must not be usable.
            _remove(Path(prefix + ".idx"))
            replace_file(tokenizer_file, kept.read_bytes())
            replace_file(Path(prefix + ".summary.json"), (json.dumps(summary, indent=2) + "\n").encode())
    _report(prefix, summary)


def _tokenizer(options: argparse.Namespace, files: Sequence[Path], kept: Path) -> Tokenizer:
    """Return the tokenizer, and write it to `kept` as a tokenizer.json."""
    if options.train_tokenizer is not None:
        # This first pass is quiet; the second pass reports the faults.
        faults = Faults(strict=options.strict, quiet=True)
        texts = documents(files, options.json_key, faults, "reading for the tokenizer")
        trained = train_tokenizer(texts, options.train_tokenizer, str(kept))
        if trained.vocab_size < options.train_tokenizer:
            print(f"the texts are too small for a vocabulary of {options.train_tokenizer}", file=sys.stderr)
        return trained
    tokenizer = load_tokenizer(options.tokenizer, options.end_of_document, options.special_tokens)
    if isinstance(tokenizer, ByteTokenizer):
        save_byte_tokenizer(str(kept))
    else:
        source = Path(options.tokenizer)
        kept.write_bytes((source / "tokenizer.json" if source.is_dir() else source).read_bytes())
    return tokenizer


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: cannot be removed: {error.strerror}") from error


def _check_output(prefix: str, overwrite: bool) -> None:
    """Refuse to overwrite files, and create the folder."""
    if Path(prefix).name in ("", ".", ".."):
        raise UsageError(f"--output_prefix={prefix}: names a folder; add a name for the files, such as data/mine")
    for path in (prefix + ".idx", prefix + ".bin"):
        if os.path.lexists(path) and not overwrite:
            raise UsageError(f"{path}: exists; choose another --output_prefix, or replace it with --overwrite")
    try:
        Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{Path(prefix).parent}: cannot be created: {error.strerror}") from error


def _report(prefix: str, summary: dict[str, Any]) -> None:
    print(f"{prefix}.bin: {summary['documents']:,} documents, {summary['tokens']:,} tokens ({summary['dtype']})")
    print(f"vocabulary        {summary['vocab_size']} (--vocab_size)")
    print(f"bytes per token   {summary['bytes_per_token']:.3f}")
    print(f"unigram entropy   {summary['unigram_entropy_nats']:.4f} nats per token")
    for kind, count in summary["skipped"].items():
        print(f"skipped           {count:,}: {kind}")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="+", help="text files, folders, .jsonl files")
    parser.add_argument(
        "--output_prefix", required=True, metavar="PREFIX", help="write <PREFIX>.bin, <PREFIX>.idx, ..."
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--tokenizer",
        default="byte",
        metavar="byte|PATH",
        help="the built-in byte tokenizer (default), or a tokenizer.json",
    )
    choice.add_argument(
        "--train_tokenizer",
        type=int,
        metavar="VOCAB",
        help="train a byte-level BPE tokenizer with this vocabulary size on the input",
    )
    parser.add_argument(
        "--end_of_document", metavar="TOKEN", help="end-of-document token (default: the tokenizer's own)"
    )
    parser.add_argument(
        "--special_tokens", action="store_true", help="treat special tokens spelled out in a text as special tokens"
    )
    parser.add_argument(
        "--suffix", default=".txt,.md,.jsonl", help="file endings to read in folders (default: %(default)s)"
    )
    parser.add_argument(
        "--json_key", default="text", metavar="KEY", help="key of the text in .jsonl lines (default: text)"
    )
    parser.add_argument("--strict", action="store_true", help="stop at a bad document instead of skipping it")
    parser.add_argument("--overwrite", action="store_true", help="replace existing token files")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = parse(argv)
    try:
        prepare(options)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return StorageError.exit_code
    except KeyboardInterrupt:
        print("interrupted; no token file was written", file=sys.stderr)
        return 130
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
