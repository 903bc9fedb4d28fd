"""Progress of a script on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

TERMINAL_INTERVAL_S = 0.5
LINE_INTERVAL_S, LINES_PER_TIME = 10.0, 20  # less often as time passes, so that long jobs do not fill a log


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


class ProgressLine:
    """Progress on standard error: one updated line on a terminal; otherwise new lines, every 10 seconds at first."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._start_s = self._shown_s = time.monotonic()

    def update(self, words: Callable[[float], str]) -> None:
        """Show `words(seconds since the start)`, unless the last line is recent."""
        now_s = time.monotonic()
        elapsed_s = now_s - self._start_s
        interval_s = TERMINAL_INTERVAL_S if self._terminal else max(LINE_INTERVAL_S, elapsed_s / LINES_PER_TIME)
        if now_s - self._shown_s >= interval_s:
            self._shown_s = now_s
            line = f"\r\033[K{words(elapsed_s)}" if self._terminal else f"{words(elapsed_s)}\n"
            print(line, end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Erase the line on a terminal."""
        if self._terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
