"""Lines of JSON between the main process and its workers: what to make, how far it is, how it ended."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megatron_lite.corpus.documents import Span
from megatron_lite.corpus.encoding import Encoding
from megatron_lite.corpus.fields import TextFields
from megatron_lite.corpus.inputs import InputFile
from megatron_lite.corpus.pieces import Piece, Recipe
from megatron_lite.errors import DataError, RunError, StorageError, UsageError

_ERRORS: tuple[type[RunError], ...] = (DataError, StorageError, UsageError)


def recipe_to_json(recipe: Recipe) -> dict[str, Any]:
    """Return what `recipe_from_json` reads."""
    return asdict(recipe)


def recipe_from_json(values: dict[str, Any]) -> Recipe:
    """Return the recipe of a message."""
    fields = TextFields(tuple(values["fields"]["keys"]), values["fields"]["separator"])
    return Recipe(**{**values, "encoding": Encoding(**values["encoding"]), "fields": fields})


def piece_to_json(piece: Piece) -> dict[str, Any]:
    """Return what `piece_from_json` reads."""
    return asdict(piece)


def piece_from_json(values: dict[str, Any]) -> Piece:
    """Return the piece of a message."""
    spans = tuple(Span(**{**span, "file": InputFile(**span["file"])}) for span in values["spans"])
    return Piece(values["number"], values["key"], spans)


def error_to_json(error: RunError) -> dict[str, Any]:
    """Return what `error_from_json` reads."""
    return {"error": str(error), "exit_code": error.exit_code}


def error_from_json(values: dict[str, Any]) -> RunError:
    """Return the error of a message."""
    kind = next((kind for kind in _ERRORS if kind.exit_code == values["exit_code"]), RunError)
    return kind(values["error"])
