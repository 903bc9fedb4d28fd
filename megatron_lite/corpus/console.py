"""Standard error of the preparation of a corpus: progress, and the documents that are skipped."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from megatron_lite.corpus.documents import SHOWN_FAULTS, Findings, Span
from megatron_lite.errors import DataError
from megatron_lite.run.progress_line import ProgressLine, format_duration

BAR_WIDTH = 20


class Faults:
    """The faults of all pieces in the order of the documents; the first few are named.

    Attributes: `counts` by kind; `first`, the messages about the first ones.
    """

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.counts: Counter[str] = Counter()
        self.first: list[str] = []
        self._lines: Counter[str] = Counter()  # of each file, in the pieces so far

    def add(self, spans: Sequence[Span], found: Findings) -> None:
        """Add the faults of the next piece.

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
            print("skipped more: from here on they are only counted", file=sys.stderr)


class CorpusProgress:
    """The progress of one pass over the input, on standard error."""

    def __init__(self, purpose: str, total_bytes: int) -> None:
        self.purpose, self.total_bytes = purpose, total_bytes
        self.read_bytes = self.documents = self.tokens = 0
        self._line = ProgressLine()
        self._bar = sys.stderr.isatty()

    def add(self, read_bytes: int, documents: int = 0, tokens: int = 0) -> None:
        """Count what was done since the last call."""
        self.read_bytes += read_bytes
        self.documents += documents
        self.tokens += tokens
        self._line.update(self.in_words)

    def close(self) -> None:
        """Erase the bar."""
        self._line.close()

    def in_words(self, seconds: float) -> str:
        """Describe the pass: `tokenizing: 4.5 of 10.0 MB (45%), 2 documents, 9 tokens, 5.2 MB/s, 0:00:01 left`."""
        share = min(1.0, self.read_bytes / self.total_bytes) if self.total_bytes else 0.0
        words = [f"{self.purpose}: "]
        if self._bar and share:
            filled = round(BAR_WIDTH * share)
            words.append(f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] ")
        words.append(f"{self.read_bytes / 1e6:,.1f}")
        words.append(f" of {self.total_bytes / 1e6:,.1f} MB ({share:.0%})" if share else " MB")
        if self.documents:
            words.append(f", {self.documents:,} documents, {self.tokens:,} tokens")
        words.append(f", {self.read_bytes / 1e6 / max(seconds, 1e-9):,.1f} MB/s")
        if share:
            words.append(f", {format_duration(seconds * (1 / share - 1))} left")
        return "".join(words)
