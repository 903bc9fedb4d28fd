"""Tables of command lines with what the program says about each."""

import re


def rows(text: str) -> list[tuple[str, str]]:
    """Return (line, what follows it) for every line that is not indented; the indented lines after
    it are joined."""
    entries = (entry.partition("\n") for entry in re.split(r"\n(?! )", text.strip("\n")))
    return [(first, " ".join(said.split())) for first, _, said in entries]
