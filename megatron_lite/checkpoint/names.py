"""Names of a checkpoint's files, and how their JSON is read. Imports no torch."""

from __future__ import annotations

from typing import Any

MANIFEST_NAME = "manifest.json"


def without_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: an object, in which JSON itself lets names come twice."""
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a repeated name")
    return values
