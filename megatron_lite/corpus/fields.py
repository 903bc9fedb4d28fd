"""The text of a document inside a JSON object or a row of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


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


def top_columns(keys: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the columns of a table that hold the keys: all else need not be read."""
    wanted = {key if key in columns else key.partition(".")[0] for key in keys}
    return [column for column in columns if column in wanted]
