"""The worker processes of a corpus: pieces go out in order, and their records come back in order."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from contextvars import ContextVar
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path

from megatron_lite.corpus.pieces import Piece, PieceWriter, Progress, Recipe, Record
from megatron_lite.data.workers import how_it_ended, ignore_signals, signals_held
from megatron_lite.errors import PeerError
from megatron_lite.run.host import limit_tokenizer_threads

# A worker's process, the input file that it reads, and the numbers of a `Progress`.
Message = tuple[int, str, int, int, int]
POLL_S = 0.1
_WORKER: ContextVar[tuple[PieceWriter, SimpleQueue[Message]]] = ContextVar("the writer and queue of this worker")


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
    if pipes or len(pieces) <= 1:
        writer = PieceWriter(folder, recipe)
        yield from (writer.make(piece, on_progress) for piece in pieces)
        return
    count = min(num_processes, len(pieces))
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks, held as they are
    messages: SimpleQueue[Message] = context.SimpleQueue()
    places: dict[int | None, str] = {}  # by process: the file that it reads
    setup = (folder, recipe, max(1, num_processes // count), messages)
    pool = ProcessPoolExecutor(count, context, _begin, setup)
    try:
        with signals_held():
            records = [pool.submit(_make, piece) for piece in pieces]
        for record in records:
            while not record.done() or not messages.empty():
                concurrent.futures.wait([record], POLL_S if messages.empty() else 0)
                while not messages.empty():
                    process, places[process], *numbers = messages.get()
                    if any(numbers):
                        on_progress(*numbers)
            yield record.result()
    except BrokenProcessPool:
        raise _lost(list(pool._processes.values()), places) from None
    finally:
        for worker in pool._processes.values():
            worker.kill()  # even in the middle of its work
        pool.shutdown(cancel_futures=True)


def _begin(folder: Path, recipe: Recipe, threads: int, messages: SimpleQueue[Message]) -> None:
    """Set up a worker, which ends when the main process does, in the middle of a piece."""
    ignore_signals()
    limit_tokenizer_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _WORKER.set((PieceWriter(folder, recipe), messages))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a worker"
    parent.join()
    os._exit(0)


def _make(piece: Piece) -> Record:
    """Make a piece in a worker, and tell the main process how far it is."""
    writer, messages = _WORKER.get()

    def tell(read_bytes: int, documents: int, tokens: int) -> None:
        messages.put((os.getpid(), piece.spans[0].file.path, read_bytes, documents, tokens))

    tell(0, 0, 0)  # which file this process reads
    return writer.make(piece, tell)


def _lost(workers: Sequence[BaseProcess], places: dict[int | None, str]) -> PeerError:
    """Say which worker died. The others ignore the SIGTERM that the pool sends them then, or end with exit code 0."""
    deadline_s = time.monotonic() + 5
    while not (dead := [worker for worker in workers if worker.exitcode]) and time.monotonic() < deadline_s:
        time.sleep(0.01)  # the pool sees a death from closed pipes, a moment before there is an exit code
    worker = (dead or workers)[0]
    place = f" at {places[worker.pid]}" if worker.pid in places else ""
    ended = how_it_ended(worker, "--num_processes") + place
    return PeerError(f"worker process {worker.pid} {ended}; finished pieces are kept: start the same command again")
