"""The logger "megatron_lite": flushed lines on the console, above a progress bar, and one log file
per rank.

The console and the log file get the same text, except from `log_both`. Logging never stops a run: a
console without a reader, or a log file on a full disk, only loses lines. Every line is one
unbuffered `write`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_lite.errors import StorageError

MIB = 2**20
BAR_INTERVAL_S = 0.5
_ONLY = "only"  # a record's attribute for the console or the file only


def get_logger() -> logging.Logger:
    """Return this program's logger."""
    return logging.getLogger("megatron_lite")


def log_both(logger: logging.Logger, *, console: str, file: str) -> None:
    """Log different texts on the console and in the log file; empty texts are skipped."""
    for place, text in (("console", console), ("file", file)):
        if text:
            logger.info("%s", text, extra={_ONLY: place})


class AppendFile:
    """A file that takes whole lines, each by one `write`; a line that does not fit is removed
    completely.

    Raises:
        StorageError: if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lost_lines = path, 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise StorageError(
                f"cannot write {path}: {error.strerror}; choose another --experiment_dir"
            ) from error

    def append(self, line: bytes) -> None:
        """Append the whole line or nothing.

        Raises:
            OSError: if the line could not be written.
        """
        size = os.fstat(self._fd).st_size
        written = os.write(self._fd, line)
        if written != len(line):  # the disk is full
            os.ftruncate(self._fd, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def write_line(self, line: str) -> None:
        """Append a line or lose it: the first loss is reported, and later lines are tried again."""
        try:
            self.append(line.encode("utf-8", "backslashreplace") + b"\n")
        except OSError as error:
            self.lost_lines += 1  # before the warning, which may return here as a line
            if self.lost_lines == 1:
                text = "cannot write %s: %s; the run continues without these lines"
                get_logger().warning(text, self.path, error.strerror)

    def close(self) -> None:
        """Close the file; ignore errors."""
        fd, self._fd = self._fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)


class _LineFormatter(logging.Formatter):
    """Prefixes lines with their level from WARNING on."""

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname}: {text}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def _has_terminal() -> bool:
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


class ProgressBar:
    """Progress bar of iterations and their metrics; silent if stderr is no terminal, or if not
    `shown`.

    Args:
        words: called with the iteration when the bar is drawn, at most twice a second.
    """

    def __init__(
        self, total: int, done: int, words: Callable[[int], str], shown: bool = True
    ) -> None:
        self._bar: Any = None
        self._words = words
        self._total = total
        self._due_s = 0.0
        if shown and _has_terminal():
            from tqdm import tqdm

            line = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
            self._bar = tqdm(
                total=total,
                initial=done,
                dynamic_ncols=True,
                mininterval=0,
                miniters=1,
                bar_format=line,
            )

    def update(self, iteration: int) -> None:
        """Show that `iteration` iterations are done."""
        if self._bar is None or (time.monotonic() < self._due_s and iteration < self._total):
            return
        self._due_s = time.monotonic() + BAR_INTERVAL_S
        try:
            self._bar.set_postfix_str(self._words(iteration), refresh=False)
            self._bar.update(iteration - self._bar.n)
        except OSError:  # the terminal is gone
            self._bar = None

    def close(self) -> None:
        """Keep the bar on the screen and move to the next line."""
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.close()


class ConsoleHandler(logging.Handler):
    """Prints lines to stdout, flushed, above the progress bar; silent once the reader is gone."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record."""
        stream = sys.stdout
        if stream is None or stream.closed:
            return
        try:
            text = self.format(record)
            if _has_terminal():
                from tqdm import tqdm

                tqdm.write(text, file=stream)  # clears the bar, prints, and redraws it
            else:
                stream.write(text + "\n")
            stream.flush()
        except BrokenPipeError:
            # without this, Python's flush at exit would fail again, with exit code 120
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), sys.stdout.fileno())
        except OSError:
            # a full disk behind a redirected stdout: the line is lost, the run continues
            pass
        except Exception:
            self.handleError(record)


class FileHandler(logging.Handler):
    """Writes lines to a log file; on a full disk, lines are lost."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = AppendFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        """Append the record."""
        try:
            self._file.write_line(self.format(record))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def start_logging(log_file: Path | None, to_console: bool) -> logging.Logger:
    """Set up the logger and return it; a second call replaces the first setup.

    Args:
        log_file: runs/<k>/logs/logs_rank_<rank>.txt, or None for no file.
        to_console: print on stdout too.

    Raises:
        StorageError: if the log file cannot be opened.
    """
    stop_logging()
    logger = get_logger()
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.NullHandler())  # without any handler, warnings would go to stderr
    logger.propagate = False  # a root logger set up by a library would repeat every line

    def add(handler: logging.Handler, place: str) -> None:
        handler.setFormatter(_LineFormatter())
        handler.addFilter(lambda record: getattr(record, _ONLY, place) == place)
        logger.addHandler(handler)

    if to_console:
        add(ConsoleHandler(), "console")
        # A path that the terminal cannot encode must not end the run.
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")
    if log_file is not None:
        add(FileHandler(log_file), "file")
    return logger


def stop_logging() -> None:
    """Close and remove the handlers of `start_logging`."""
    logger = get_logger()
    for handler in list(logger.handlers):
        if isinstance(handler, (ConsoleHandler, FileHandler, logging.NullHandler)):
            logger.removeHandler(handler)
            handler.close()
