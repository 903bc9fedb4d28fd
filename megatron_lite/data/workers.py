"""Loader workers: processes that read micro-batches ahead of the training loop.

Each worker has one pipe. The parent sends the first index and the number of samples of a
micro-batch; the worker answers with the samples, or with the error. Without shared memory and
helper threads, which `DataLoader` uses, neither a small /dev/shm nor a killed worker can hang the
run: the parent waits for the pipe and the worker's death together.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import cast

from megatron_lite.data.reading import Reader, Samples
from megatron_lite.errors import DataError, RunError, WorkerError

Request = tuple[int, int]  # first index and number of samples (0 or more) of a micro-batch

POLL_S = 0.1  # a worker that answers or dies ends the wait immediately

# Terminals, torchrun and Slurm send these to a whole process group. The parent decides what to do
# (usually save, then stop) and needs its workers until then; a worker ends when its parent closes
# the pipe, kills it, or dies.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Workers:
    """A pool of loader workers that reads micro-batches in order; `close` may be called at any
    time."""

    def __init__(
        self,
        reader: Reader,
        requests: Iterator[Request],
        num_workers: int,
        prefetch_factor: int,
        context: str,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the workers, which together read up to `num_workers * prefetch_factor`
        micro-batches ahead.

        while_waiting: called every POLL_S while the parent waits for a worker; it may raise.

        Raises: WorkerError if a worker dies immediately.
        """
        self._while_waiting = while_waiting
        # no more workers than requests
        first = list(itertools.islice(requests, num_workers))
        self._requests = itertools.chain(first, requests)
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._ahead, self._sent = len(first) * prefetch_factor, 0
        # Runs at interpreter exit before multiprocessing joins its children, which ignore its
        # SIGTERM.
        self._finalizer = util.Finalize(self, _end, args=(self._workers,), exitpriority=10)
        with signals_held():
            for number in range(len(first)):
                self._start(reader, number, context)
        self._send_up_to(self._ahead)

    def _start(self, reader: Reader, number: int, context: str) -> None:
        here, there = multiprocessing.Pipe()
        # A forked child has a copy of the parent's end and must close it to see the parent die.
        spare = here if context == "fork" else None
        process = multiprocessing.get_context(context).Process(  # type: ignore[attr-defined]
            target=_work, args=(there, spare, reader), name=f"data worker {number}", daemon=True
        )
        process.start()
        there.close()
        self._workers.append((process, here))

    def __iter__(self) -> Iterator[Samples]:
        """Yield the micro-batches in order.

        Raises: the reader's DataError; WorkerError if a worker was killed or failed.
        """
        for received in itertools.count():
            if not self._finalizer.still_active():
                raise RunError("the data workers were closed before all batches were read")
            self._send_up_to(received + 1 + self._ahead)
            if received == self._sent:
                return
            yield self._receive(received)

    def _send_up_to(self, count: int) -> None:
        """Send requests until workers have `count`."""
        for request in itertools.islice(self._requests, count - self._sent):
            self._send(self._sent, request)
            self._sent += 1

    def _send(self, number: int, request: Request) -> None:
        worker = number % len(self._workers)
        try:
            self._workers[worker][1].send(request)
        except OSError:
            raise self._death(worker) from None

    def _receive(self, number: int) -> Samples:
        worker = number % len(self._workers)
        process, connection = self._workers[worker]
        while not (ready := wait([connection, process.sentinel], POLL_S)):
            self._while_waiting()
        try:
            answer = connection.recv() if connection in ready else None
        except (EOFError, OSError):
            answer = None
        if answer is None:
            raise self._death(worker)
        if isinstance(answer, RunError):
            raise answer
        return cast(Samples, answer)

    def _death(self, worker: int) -> WorkerError:
        process, _ = self._workers[worker]
        process.join(timeout=5)
        return WorkerError(f"data worker {worker} {how_it_ended(process, '--num_workers')}")

    def close(self) -> None:
        """Kill the workers; they only read, so nothing is lost."""
        self._finalizer()


def _end(workers: list[tuple[BaseProcess, Connection]]) -> None:
    for process, _ in workers:
        process.kill()
    for process, connection in workers:
        process.join()
        connection.close()


def how_it_ended(process: BaseProcess, flag: str) -> str:
    """Return in words how a worker died; `flag`: the number of workers, each of which takes
    memory."""
    code = process.exitcode
    if code is None or code >= 0:
        return f"ended unexpectedly with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"was killed by {name}" + (
        f", often for memory: try fewer {flag}" if name == "SIGKILL" else ""
    )


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Block signals while workers start: a child inherits the mask and is safe until it ignores
    them itself."""
    resource_tracker.ensure_running()  # starting it later would unblock signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Ignore the signals of `signals_held`, which only the parent handles; call in a worker."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)


def end_with_parent() -> None:
    """Wait for the parent's end, then end this process at once; for a thread in a busy worker."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a worker"
    parent.join()
    os._exit(0)


def _work(connection: Connection, spare: Connection | None, reader: Reader) -> None:
    """Run a worker: answer requests until the parent closes the pipe or dies."""
    ignore_signals()
    if spare is not None:
        spare.close()
    parent = multiprocessing.parent_process()
    assert parent is not None
    with contextlib.suppress(EOFError, OSError):
        while connection in wait([connection, parent.sentinel]):
            request = connection.recv()
            try:
                answer: Samples | RunError = reader.read(*request)
            except DataError as error:
                answer = error
            except Exception as error:  # report everything to the parent
                place = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{place.filename}, line {place.lineno}"
                answer = WorkerError(
                    f"a data worker failed: {type(error).__name__}: {error} ({where})"
                )
            connection.send(answer)
