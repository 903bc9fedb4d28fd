"""Read the documents in spans: whole files, lines of a .jsonl file, rows of a table, with the text
under some keys.

Unusable documents are faults: all are counted by kind, and the first ones are reported by file and
line on standard error, like the progress.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, ClassVar

from megatron_lite.corpus.inputs import InputFile, opened, row_group_bytes, table_rows
from megatron_lite.data.disk_array import reading
from megatron_lite.errors import DataError
from megatron_lite.run.progress_line import ByteProgress

SHOWN_FAULTS = 10
BLANK = "blank"  # a kind of fault
SURROGATE = "contains half of a surrogate pair, which is not a character"


@dataclass(frozen=True)
class TextFields:
    """The keys of a document's text. Several keys are joined, and absent or null ones are
    skipped."""

    keys: tuple[str, ...]  # keys, or paths of keys such as `a.b`
    separator: str = "\n\n"

    marked: ClassVar[bool] = False  # whether documents are conversations, of class MarkedText

    def text_of(self, value: Any) -> str | None:
        """Return the text in a decoded JSON value; None without any."""
        parts = [part for key in self.keys if (part := look_up(value, key)) is not None]
        return (
            self.separator.join(parts)
            if parts and all(isinstance(part, str) for part in parts)
            else None
        )

    def complaint(self, value: Any) -> str:
        """Return the kind of fault for a decoded JSON value without text."""
        parts = ((key, look_up(value, key)) for key in self.keys)
        found = ", ".join(
            f"{key!r} ({'absent' if part is None else type(part).__name__})" for key, part in parts
        )
        return f"no text under the key {found}; prepare_data has --json_key, and --chat_template for conversations"


def look_up(value: Any, path: str) -> Any:
    """Return the value under a key or a path of keys; None if there is none."""
    if isinstance(value, dict) and path in value:
        return value[path]
    for key in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


@dataclass(frozen=True)
class Span:
    """A part of an input file.

    start, end: the bytes of a .jsonl file in which its lines begin, or the row groups of a parquet
    file; 0 and 0: the whole file, of any other kind.
    """

    file: InputFile
    start: int
    end: int
    size_bytes: int  # on disk


def cut_file(file: InputFile, goal: int) -> list[Span]:
    """Cut a file into spans of about `goal` bytes if its kind can be read from the middle."""
    if file.kind == "jsonl" and not file.compression and file.regular:
        cuts = [*range(0, max(file.size_bytes, 1), goal), file.size_bytes]
        return [Span(file, start, end, end - start) for start, end in itertools.pairwise(cuts)]
    if file.kind == "parquet":
        spans = []
        first = 0
        size = 0
        sizes = row_group_bytes(file.path)
        for group, group_bytes in enumerate(sizes):
            size += group_bytes
            if size >= goal or group == len(sizes) - 1:
                spans.append(Span(file, first, group + 1, size))
                first, size = group + 1, 0
        return spans
    return [Span(file, 0, 0, file.size_bytes)]


@dataclass(frozen=True)
class Fault:
    """A document that was skipped. `number`: its line or row in its span, from 1; 0 for a whole
    file."""

    span: int  # in the piece
    number: int
    kind: str
    detail: str = ""

    def message(self, place: str) -> str:
        """Describe the fault at a place."""
        return f"{place}: {self.kind}" + (f": {self.detail}" if self.detail else "")


@dataclass
class Findings:
    """Counts from one pass over spans: lines, and unusable documents."""

    lines: list[int]  # or rows, per span
    fault_counts: dict[str, int] = field(default_factory=dict)  # by kind
    first_faults: list[Fault] = field(default_factory=list)


class BadDocument(Exception):  # noqa: N818 - the end of a piece with --strict
    """A document that --strict refuses; its argument is the fault."""


@dataclass
class Reading:
    """One pass over spans.

    Attributes: `read_bytes` and `findings` so far.
    """

    spans: Sequence[Span]
    fields: TextFields
    strict: bool = False
    allowed: str | None = None  # a kind of fault that `strict` permits

    def __post_init__(self) -> None:
        self.read_bytes, self.findings = 0, Findings([0] * len(self.spans))
        self._number = 0  # in the current span

    def documents(self) -> Iterator[str]:
        """Yield the texts of all spans in order; blank and damaged ones are counted as faults.

        Raises:
            DataError: if a file cannot be read, is damaged as a whole, or has changed since
                planning.
            BadDocument: with --strict, at the first fault.
        """
        for number, span in enumerate(self.spans):
            self._number, before = number, self.read_bytes
            with reading(span.file.path), open(span.file.path, "rb") as file:
                _check_unchanged(file, span.file)
                yield from filter(self._is_document, self._texts(span, file))
                _check_unchanged(file, span.file)
            if span.file.regular:
                self.read_bytes = before + span.size_bytes

    def _add_fault(self, kind: str, detail: str = "") -> None:
        """Count a fault at the last line or row read, or in a whole text file."""
        found = self.findings
        found.fault_counts[kind] = found.fault_counts.get(kind, 0) + 1
        fault = Fault(self._number, found.lines[self._number], kind, detail)
        if len(found.first_faults) < SHOWN_FAULTS:
            found.first_faults.append(fault)
        if self.strict and kind != self.allowed:
            raise BadDocument(fault)

    def _is_document(self, text: str) -> bool:
        """Return whether a text is neither blank nor contains half characters, which are faults."""
        if not text or text.isspace():
            self._add_fault(BLANK)
            return False
        try:
            text.encode()
        except UnicodeEncodeError:
            self._add_fault(SURROGATE)
            return False
        return True

    def _texts(self, span: Span, file: IO[bytes]) -> Iterator[str]:
        """Yield a span's texts, including blank ones."""
        if span.file.kind == "text" and not self.fields.marked:
            with opened(file, span.file) as stream:
                data = stream.read()
            if not span.file.regular:
                self.read_bytes += len(data)
            if (text := self._decoded(data)) is not None:
                yield text
            return
        lines = span.file.kind in ("jsonl", "text")
        for value in self._json_lines(span, file) if lines else self._rows(span, file):
            try:
                text = self.fields.text_of(value)
            except ValueError as error:
                self._add_fault("not a conversation", " ".join(str(error).split()))
                continue
            if text is None:
                self._add_fault(self.fields.complaint(value))
            else:
                yield text

    def _json_lines(self, span: Span, file: IO[bytes]) -> Iterator[Any]:
        """Yield the values in the lines that begin in a span."""
        with opened(file, span.file) as stream:
            position = span.start
            if span.start:
                stream.seek(span.start - 1)
                position += len(stream.readline()) - 1
            before = self.read_bytes - span.start
            while (not span.end or position < span.end) and (line := stream.readline()):
                position += len(line)
                self.read_bytes = before + (file.tell() if span.file.compression else position)
                self.findings.lines[self._number] += 1
                text = self._decoded(line)
                if text is None:
                    continue
                try:
                    value = json.loads(text)
                except (ValueError, RecursionError) as error:
                    # After a semicolon follows advice about the interpreter: numbers of thousands
                    # of digits.
                    kind, detail = (
                        ("not JSON", str(error).partition(";")[0]) if text.strip() else (BLANK, "")
                    )
                    self._add_fault(kind, detail)
                    continue
                yield value

    def _rows(self, span: Span, file: IO[bytes]) -> Iterator[Any]:
        for row in table_rows(file, span.file, self.fields.keys, span.start, span.end):
            self.findings.lines[self._number] += 1
            yield row

    def _decoded(self, data: bytes) -> str | None:
        """Decode UTF-8 without a byte order mark; None if it is not UTF-8, which is a fault."""
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            # The position counts from after a byte order mark, in `error.object`.
            self._add_fault("not UTF-8", f"byte {error.start} is 0x{error.object[error.start]:02x}")
            return None


def whole_texts(
    files: Sequence[InputFile],
    fields: TextFields,
    strict: bool,
    allowed: str | None = None,
    purpose: str = "",
) -> Iterator[str]:
    """Yield all documents in files in one pass, without faulty ones.

    purpose: of the pass; if set, shows its progress.

    Raises: DataError like `Reading.documents`; with `strict`, at the first fault of a kind other
    than `allowed`.
    """
    spans = [span for file in files for span in cut_file(file, file.size_bytes + 1)]
    reading = Reading(spans, fields, strict, allowed)
    with ByteProgress(
        purpose, sum(span.size_bytes for span in spans), shown=bool(purpose)
    ) as progress:
        try:
            for text in reading.documents():
                progress.add(reading.read_bytes - progress.done_bytes)
                yield text
        except BadDocument as found:
            (fault,) = found.args
            raise DataError(fault.message(spans[fault.span].file.place(fault.number))) from None


def _check_unchanged(file: IO[bytes], expected: InputFile) -> None:
    status = os.fstat(file.fileno())
    if expected.regular and (status.st_size, status.st_mtime_ns) != (
        expected.size_bytes,
        expected.mtime_ns,
    ):
        raise DataError(
            f"{expected.path}: has changed since the work was planned; start the same command again"
        )


class Faults:
    """The faults of all pieces in document order; the first few are reported.

    Attributes: `counts` by kind; `first`, the messages about the first ones.
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.counts: Counter[str] = Counter()
        self.first: list[str] = []
        self._lines: Counter[str] = Counter()  # per file, in the pieces so far

    def add(self, spans: Sequence[Span], found: Findings) -> None:
        """Add the next piece's faults.

        Raises: DataError with --strict, which names the first.
        """
        starts = []
        for span, lines in zip(spans, found.lines, strict=True):
            starts.append(self._lines[span.file.path])
            self._lines[span.file.path] += lines
        for fault in found.first_faults:
            number = starts[fault.span] + fault.number if fault.number else 0
            message = fault.message(spans[fault.span].file.place(number))
            if self.strict:
                raise DataError(message)
            if len(self.first) < SHOWN_FAULTS:
                self.first.append(message)
                print(f"skipped {message}", file=sys.stderr)
        before = self.counts.total()
        self.counts.update(found.fault_counts)
        if before <= SHOWN_FAULTS < self.counts.total():
            print("skipped more documents: from here on they are only counted", file=sys.stderr)
