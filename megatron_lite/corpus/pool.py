"""The worker processes of a corpus: pieces go out in order and come back in any order."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.corpus.messages import error_from_json, piece_to_json, recipe_to_json
from megatron_lite.corpus.pieces import Piece, PieceWriter, Recipe, Record
from megatron_lite.errors import PeerError
from megatron_lite.run.launch import environment_with

ROOT = Path(__file__).resolve().parents[2]
Progress = Callable[[int, int, int], None]


def make_pieces(
    pieces: Sequence[Piece], folder: Path, recipe: Recipe, num_processes: int, on_progress: Progress
) -> Iterator[Record]:
    """Yield the record of each piece, in their order; close the generator to stop the workers.

    A single piece is worked on in this process, whose tokenizer uses all cores.

    Raises:
        DataError: the one of the first piece that has one.
        StorageError: if the work folder cannot be written.
        PeerError: if a worker dies.
    """
    pipes = any(not span.file.regular for piece in pieces for span in piece.spans)  # workers would not have them
    count = min(num_processes, len(pieces))
    if pipes or len(pieces) <= 1:
        writer = PieceWriter(folder, recipe, on_progress)
        yield from (writer.make(piece) for piece in pieces)
        return
    with _workers(count, max(1, num_processes // count), folder, recipe) as pool:
        yield from pool.run(pieces, on_progress)


class _Pool:
    """Running workers, and the queue of what they say."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.pieces: list[Piece | None] = []  # that each works on
        self.messages: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def start(self, threads: int, setup: dict[str, Any]) -> None:
        """Start a worker, which has so many threads for its tokenizer."""
        parallel = {"TOKENIZERS_PARALLELISM": "true" if threads > 1 else "false", "RAYON_NUM_THREADS": str(threads)}
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_lite.corpus.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            env=environment_with({**parallel, "PYTHONPATH": _search_path(), "PYTHONSAFEPATH": "1"}),
            start_new_session=True,  # Ctrl-C is for the main process
        )
        number = len(self.processes)
        self.processes.append(process)
        self.pieces.append(None)
        threading.Thread(target=self._listen, args=(number,), daemon=True).start()
        self._send(number, setup)

    def _listen(self, number: int) -> None:
        stream = self.processes[number].stdout
        assert stream is not None
        with contextlib.suppress(ValueError):  # closed at the end
            for line in stream:
                self.messages.put((number, line))
        self.messages.put((number, ""))

    def _send(self, number: int, message: dict[str, Any]) -> None:
        stream = self.processes[number].stdin
        assert stream is not None
        with contextlib.suppress(BrokenPipeError):  # the end of its output tells why
            stream.write(json.dumps(message) + "\n")
            stream.flush()

    def run(self, pieces: Sequence[Piece], on_progress: Progress) -> Iterator[Record]:
        """Yield the records of all pieces in order."""
        waiting = iter(pieces)
        results: dict[int, dict[str, Any]] = {}
        for number in range(len(self.processes)):
            self._give(number, next(waiting, None))
        for piece in pieces:
            while piece.number not in results:
                number, line = self.messages.get()
                if not line.endswith("\n"):
                    raise self._lost(number)
                message = json.loads(line)
                if "piece" in message:
                    results[message["piece"]] = message
                    self._give(number, next(waiting, None))
                else:
                    on_progress(message["bytes"], message["documents"], message["tokens"])
            result = results.pop(piece.number)
            if "error" in result:
                raise error_from_json(result)
            yield Record.from_json(result["record"])

    def _give(self, number: int, piece: Piece | None) -> None:
        self.pieces[number] = piece
        if piece is not None:
            self._send(number, piece_to_json(piece))

    def _lost(self, number: int) -> PeerError:
        process, piece = self.processes[number], self.pieces[number]
        code = process.wait()
        place = f" at {piece.spans[0].file.path}" if piece is not None else ""
        if code < 0:
            name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
            reason = f"was killed by {name}" + (", often for memory: try fewer --num_processes" if code == -9 else "")
        else:
            reason = f"ended with exit code {code}"
        return PeerError(
            f"worker process {process.pid} {reason}{place}; finished pieces are kept: start the same command again"
        )

    def close(self) -> None:
        """End all workers, in the middle of their work if need be."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # what was not sent is no longer wanted
                process.stdin.close()


@contextlib.contextmanager
def _workers(count: int, threads: int, folder: Path, recipe: Recipe) -> Iterator[_Pool]:
    pool = _Pool()
    try:
        for _ in range(count):
            pool.start(threads, {"folder": str(folder), "recipe": recipe_to_json(recipe)})
        yield pool
    finally:
        pool.close()


def _search_path() -> str:
    """Return PYTHONPATH for a worker: it finds the modules that this process has found."""
    return ":".join(dict.fromkeys([str(ROOT), *(path for path in sys.path if path)]))
