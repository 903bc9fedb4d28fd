"""Generated tables in documents: Markdown between `<!-- table: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
Writer = Callable[[], Sequence[str]]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def with_tables(text: str, tables: Mapping[str, Writer], separated: bool = True) -> str:
    """Return a document with these tables replaced. separated: put an empty line around each.

    Raises:
        ValueError: if the document has no place for a table.
    """
    for name, write in tables.items():
        found = re.search(rf"<!-- table: {name} -->\n(.*?)<!-- end -->", text, re.DOTALL)
        if found is None:
            raise ValueError(f"the document needs <!-- table: {name} --> and <!-- end --> after it")
        lines = ["", *write(), "", ""] if separated else [*write(), ""]
        text = text[: found.start(1)] + "\n".join(lines) + text[found.end(1) :]
    return text


def write_documents(renew: Mapping[Path, Callable[[str], str]], check: bool, command: str) -> int:
    """Rewrite documents, or only compare them; return the exit code.

    Args:
        renew: the new text of each document, given the old one.
        command: regenerates stale documents; named in the message.
    """
    stale = []
    for path, current in renew.items():
        text = path.read_text("utf-8")
        new = current(text)
        if check and new != text:
            stale.append(path)
        if not check:
            path.write_text(new, "utf-8")
    if stale:
        print(f"{', '.join(map(str, stale))}: out of date; run {command}", file=sys.stderr)
    return int(bool(stale))
