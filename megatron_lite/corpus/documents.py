"""Read the documents of spans: whole files, lines of a .jsonl file, rows of a table, with the text under some keys."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from megatron_lite.corpus import formats
from megatron_lite.corpus.faults import Fault, PieceFaults
from megatron_lite.corpus.inputs import InputFile
from megatron_lite.errors import DataError


@dataclass(frozen=True)
class TextFields:
    """The keys of a document's text. Several keys are joined, and a key that is absent or null is left out."""

    keys: tuple[str, ...]  # each a key, or a path of keys such as `a.b`
    separator: str = "\n\n"

    def text_of(self, value: Any) -> str | None:
        """Return the text of a decoded JSON value; None if it has none."""
        if len(self.keys) == 1:
            text = look_up(value, self.keys[0])
            return text if isinstance(text, str) else None
        parts = [part for key in self.keys if (part := look_up(value, key)) is not None]
        if not parts or not all(isinstance(part, str) for part in parts):
            return None
        return self.separator.join(parts)

    @property
    def complaint(self) -> str:
        """The kind of fault of a document without text."""
        if len(self.keys) == 1:
            return f"no text under the key {self.keys[0]!r} (--json_key)"
        return f"no text under the keys {', '.join(map(repr, self.keys))} (--json_key)"


def look_up(value: Any, path: str) -> Any:
    """Return the value under a key, or under a path of keys; None if there is none."""
    if isinstance(value, dict) and path in value:
        return value[path]
    for key in path.split("."):
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def parse_keys(text: str) -> tuple[str, ...]:
    """Split `title,body` into keys."""
    return tuple(key.strip() for key in text.split(",") if key.strip())


SURROGATE = "contains half of a surrogate pair, which is not a character"


@dataclass(frozen=True)
class Span:
    """A part of an input file.

    start, end: the bytes of a .jsonl file in which its lines begin, or the row groups of a parquet file; 0 and 0 stand
    for the whole of any other file.
    """

    file: InputFile
    start: int
    end: int
    size_bytes: int  # on disk


class Reading:
    """One pass over spans, and how far it is.

    Attributes: `read_bytes`; `lines`, the lines or rows of each span so far; `faults`.
    """

    def __init__(self, spans: Sequence[Span], fields: TextFields, strict: bool = False) -> None:
        self.spans, self.fields = spans, fields
        self.faults = PieceFaults(strict)
        self.read_bytes = 0
        self.lines = [0] * len(spans)

    def documents(self) -> Iterator[str]:
        """Yield the texts of all spans in order; blank and damaged ones are counted as faults.

        Raises:
            DataError: if a file cannot be read, is damaged as a whole, or has changed since the work was planned.
            BadDocument: with --strict, at the first fault.
        """
        for number, span in enumerate(self.spans):
            path = span.file.path
            before = self.read_bytes
            try:
                with open(path, "rb") as file:
                    _check_unchanged(file, span.file)
                    yield from _READERS[span.file.kind](self, number, span, file)
                    _check_unchanged(file, span.file)
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
            if span.file.regular:
                self.read_bytes = before + span.size_bytes

    def add_fault(self, span: int, kind: str, detail: str = "") -> None:
        """Count a fault at the line or row that was read last, or of a whole text file."""
        self.faults.add(Fault(span, self.lines[span], kind, detail))

    def checked(self, span: int, text: str) -> bool:
        """Whether a text is a document: neither blank nor with half characters, which are faults."""
        if not text or text.isspace():
            self.add_fault(span, "blank")
            return False
        try:
            text.encode()
        except UnicodeEncodeError:
            self.add_fault(span, SURROGATE)
            return False
        return True


def _check_unchanged(file: IO[bytes], expected: InputFile) -> None:
    status = os.fstat(file.fileno())
    if expected.regular and (status.st_size, status.st_mtime_ns) != (expected.size_bytes, expected.mtime_ns):
        raise DataError(f"{expected.path}: has changed since the work was planned; start the same command again")


def _text(reading: Reading, number: int, span: Span, file: IO[bytes]) -> Iterator[str]:
    with formats.opened(file, span.file) as stream:
        data = stream.read()
    if not span.file.regular:
        reading.read_bytes += len(data)
    text = _decoded(reading, number, data)
    if text is not None and reading.checked(number, text):
        yield text


def _json_lines(reading: Reading, number: int, span: Span, file: IO[bytes]) -> Iterator[str]:
    whole = not span.end
    with formats.opened(file, span.file) as stream:
        position = span.start
        if span.start:  # a line belongs to the range in which it begins
            stream.seek(span.start - 1)
            position += len(stream.readline()) - 1
        before = reading.read_bytes - span.start
        while (whole or position < span.end) and (line := stream.readline()):
            position += len(line)
            reading.read_bytes = before + (file.tell() if span.file.compression else position)
            reading.lines[number] += 1
            decoded = _decoded(reading, number, line)
            if decoded is None:
                continue
            if decoded.isspace() or not decoded:
                reading.add_fault(number, "blank")
                continue
            try:
                value = json.loads(decoded)
            except (ValueError, RecursionError) as error:
                reading.add_fault(number, "not JSON", str(error))
                continue
            text = reading.fields.text_of(value)
            if text is None:
                reading.add_fault(number, reading.fields.complaint)
            elif reading.checked(number, text):
                yield text


def _rows(reading: Reading, number: int, span: Span, file: IO[bytes]) -> Iterator[str]:
    read = formats.parquet_rows if span.file.kind == "parquet" else formats.arrow_rows
    for row in read(file, span.file.path, reading.fields.keys, span.start, span.end):
        reading.lines[number] += 1
        text = reading.fields.text_of(row)
        if text is None:
            reading.add_fault(number, reading.fields.complaint)
        elif reading.checked(number, text):
            yield text


_READERS: dict[str, Callable[[Reading, int, Span, IO[bytes]], Iterator[str]]] = {
    "text": _text,
    "jsonl": _json_lines,
    "parquet": _rows,
    "arrow": _rows,
}


def _decoded(reading: Reading, number: int, data: bytes) -> str | None:
    """Decode UTF-8 without a byte order mark; None if it is not UTF-8, which is a fault."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The position counts from after a byte order mark, in `error.object`.
        reading.add_fault(number, "not UTF-8", f"byte {error.start} is 0x{error.object[error.start]:02x}")
        return None
