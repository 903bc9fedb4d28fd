"""A process that makes pieces: lines of JSON come in on standard input and go out on standard output.

The first line holds the work folder and the recipe, and each further one a piece. The process ends when its standard
input does, at once and in the middle of a piece: so it never outlives the main process, however that ends.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

from megatron_lite.corpus.messages import error_to_json, piece_from_json, recipe_from_json
from megatron_lite.corpus.pieces import PieceWriter
from megatron_lite.errors import RunError


def main() -> None:
    """Make pieces until standard input ends."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(lines,), daemon=True).start()
    setup = json.loads(lines.get())

    def report(read_bytes: int, documents: int, tokens: int) -> None:
        _send({"bytes": read_bytes, "documents": documents, "tokens": tokens})

    writer = PieceWriter(Path(setup["folder"]), recipe_from_json(setup["recipe"]), report)
    while True:
        piece = piece_from_json(json.loads(lines.get()))
        try:
            _send({"piece": piece.number, "record": writer.make(piece).to_json()})
        except RunError as error:
            _send({"piece": piece.number, **error_to_json(error)})


def _receive(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def _send(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
