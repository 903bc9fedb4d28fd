"""Command lines and texts without the values that may be secrets. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megatron_lite.config.values import SPELLINGS

# Shorter values are words like `1` or `yes`, which a text may hold for other reasons.
SHORTEST_SECRET = 4
HIDDEN = "..."


def without_secrets(argv: Sequence[str]) -> list[str]:
    """A command line that libraries may record: values that may be secrets are hidden."""
    words, hides = [], False
    for word in argv:
        if word.startswith("--"):
            spelling, equals, _ = word.partition("=")
            flag = SPELLINGS.get(spelling[2:].replace("-", "_"))
            hides = flag is not None and flag.option.secret
            words.append(f"{spelling}={HIDDEN}" if hides and equals else word)
        else:
            words.append(HIDDEN if hides else word)
    return words


def masked(text: str, values: Collection[str]) -> str:
    """A line of text in which none of the values (nor a line of one) is left, but for those of up to three characters.

    Longer values go first: one may be a part of another.
    """
    lines = {line.strip() for value in values for line in value.splitlines()}
    for line in sorted(lines, key=len, reverse=True):
        if len(line) >= SHORTEST_SECRET:
            text = text.replace(line, HIDDEN)
    return text
