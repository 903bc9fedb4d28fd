"""Show a script's progress on standard error, and format numbers and tables."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

TERMINAL_INTERVAL_S = 0.5
BAR_WIDTH = 20
LONGEST_CELL = 40  # table width in characters
# less often as time passes, so that long jobs do not fill a log
LINE_INTERVAL_S = 10.0
LINES_PER_TIME = 20


def format_duration(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def format_count(number: int) -> str:
    """Format 1234567 as 1.23M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def printable(text: str) -> str:
    """Return the text with a question mark for each control character."""
    return "".join(char if char.isprintable() else "?" for char in text)


def printed(text: str) -> str:
    """Replace control characters and cut long text in the middle, because paths differ at their
    ends."""
    text = printable(text)
    half = (LONGEST_CELL - 3) // 2
    return text if len(text) <= LONGEST_CELL else f"{text[:half]}...{text[-half:]}"


def aligned(rows: Sequence[Sequence[str]], words: Collection[int] = (0,)) -> list[str]:
    """Return the rows in aligned columns: `words` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index in words else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return [line.rstrip() for line in lines]


class ProgressLine(contextlib.AbstractContextManager[Any]):
    """Progress on standard error: one updated line on a terminal; otherwise new lines, every 10
    seconds at first.

    shown: off for a process that must stay silent, like one without standard error.
    """

    def __init__(self, shown: bool = True) -> None:
        shown = shown and sys.stderr is not None
        self._terminal = shown and sys.stderr.isatty()
        self._start_s = time.monotonic()
        self._shown_s = self._start_s if shown else math.inf

    def update(self, words: Callable[[float], str]) -> None:
        """Show `words(seconds since the start)`, unless the last line is recent."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._start_s
        interval_s = (
            TERMINAL_INTERVAL_S
            if self._terminal
            else max(LINE_INTERVAL_S, elapsed_s / LINES_PER_TIME)
        )
        if now_s - self._shown_s >= interval_s:
            self._shown_s = now_s
            line = f"\r\033[K{words(elapsed_s)}" if self._terminal else f"{words(elapsed_s)}\n"
            print(line, end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Erase the line on a terminal, unless none was shown: it may be another program's."""
        if self._terminal and self._shown_s > self._start_s:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class ByteProgress(ProgressLine):
    """Progress of one pass over files."""

    def __init__(self, purpose: str, total_bytes: int, shown: bool = True) -> None:
        super().__init__(shown)
        self.purpose, self.total_bytes = purpose, total_bytes
        self.done_bytes = self.documents = self.tokens = 0

    def add(self, num_bytes: int, documents: int = 0, tokens: int = 0) -> None:
        """Count what was done since the last call."""
        self.done_bytes += num_bytes
        self.documents += documents
        self.tokens += tokens
        self.update(self.in_words)

    def in_words(self, seconds: float) -> str:
        """Describe the pass: `tokenizing: 4.5 of 10.0 MB (45%), 2 documents, 9 tokens, 5.2 MB/s,
        0:00:01 left`."""
        share = min(1.0, self.done_bytes / self.total_bytes) if self.total_bytes else 0.0
        words = [f"{self.purpose}: "]
        if self._terminal and share:
            filled = round(BAR_WIDTH * share)
            words.append(f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] ")
        words.append(f"{self.done_bytes / 1e6:,.1f}")
        words.append(f" of {self.total_bytes / 1e6:,.1f} MB ({share:.0%})" if share else " MB")
        if self.documents:
            words.append(f", {self.documents:,} documents, {self.tokens:,} tokens")
        words.append(f", {self.done_bytes / 1e6 / max(seconds, 1e-9):,.1f} MB/s")
        if share:
            words.append(f", {format_duration(seconds * (1 / share - 1))} left")
        return "".join(words)
