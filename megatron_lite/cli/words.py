"""The words of a file of flags. Imports no torch."""

from __future__ import annotations

import re
import shlex

LARGEST_FILE_BYTES = 2**20

# Quoted text and escaped characters are kept (group 1); comments and joined lines go.
_COMMENT = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*"|\\[^\r\n])|(?<!\S)\#[^\n]*|\\\r?\n""", re.DOTALL)


def read_words(path: str) -> list[str]:
    """The shell words of an @file: quotes and backslashes as in a shell, `#` begins a comment, lines do not matter.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no text, too large, or a quote is not closed.
    """
    with open(path, "rb") as file:
        data = file.read(LARGEST_FILE_BYTES + 1)
    if len(data) > LARGEST_FILE_BYTES:
        raise ValueError(f"larger than {LARGEST_FILE_BYTES} bytes; this is no file of flags")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("not a UTF-8 text file") from None
    try:
        return shlex.split(_COMMENT.sub(lambda match: match[1] or "", text))
    except ValueError as error:
        raise ValueError(f"{str(error).lower()}; close the quote, or escape it with a backslash") from None
