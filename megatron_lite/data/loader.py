"""Load each phase's micro-batches, as tensors, for one rank. `open_data.py` creates the
`DataSource`.

Sample index of iteration t, micro-batch m, rank r and row j:
    samples of all iterations before t + (m * world_size + r) * micro_batch_size + j
so the set of samples in a global batch depends on t only. Padding fills a batch that does not
divide: rows of token 0 with masked labels.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_lite.config import Config, DataConfig
from megatron_lite.data.counts import Counts
from megatron_lite.data.host_batch import HostBatch
from megatron_lite.data.reading import RandomReader, Reader, Samples, search
from megatron_lite.data.workers import Request, Workers
from megatron_lite.distributed.agreement import raise_first
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import DataError, RunError
from megatron_lite.run.stop_signal import StopRequested, StopSignal
from megatron_lite.schedules.batch_size import BatchSchedule, Split

# The ranks' decision before an iteration: the highest wins, and a stop saves anyway. A stop adds
# its reason.
_GO_ON = 0
_SAVE = 1
_STOP = 2
_FAILED = 1 << 16
ITERATIONS = 50  # over which waiting is summed
SHARE = 0.1  # share of their time from which data is the bottleneck
LEAST_S = 0.001  # waiting per iteration: shorter waits of tiny models are not worth a warning
logger = logging.getLogger("megatron_lite")


class NextBatch(NamedTuple):
    """An iteration's data, and the ranks' decision before it."""

    micro_batches: list[HostBatch]
    waited_s: float  # for the data
    save: bool  # a rank requests a checkpoint after the iteration


def next_batch(
    batches: Iterator[list[HostBatch]],
    distributed: Distributed,
    stop: StopSignal,
    warn_ms: float | None = None,
    save: bool = False,
) -> NextBatch:
    """Return the next iteration's micro-batches, and whether any rank requests a checkpoint after
    them (`save`).

    Ranks agree here, over the CPU group with its long timeout: data may take long, a step's
    collectives may not.

    Args:
        warn_ms: waiting time above which to warn; None: never.

    Raises:
        StopRequested: on every rank, if any rank received a signal.
        DataError, WorkerError: on every rank, if any rank cannot read its data.
        RunError: on every rank, if another thread on any rank has a reason to end.
    """
    failure = stop.failure
    micro_batches: list[HostBatch] = []
    start_s = time.perf_counter()
    try:
        micro_batches = next(batches)
    except RunError as error:
        failure = error
    waited_s = time.perf_counter() - start_s
    if warn_ms is not None and waited_s * 1e3 > warn_ms:
        logger.warning("waited %.1f s for data; more --num_workers may help", waited_s)
    received = stop.received
    own = (
        _FAILED
        if failure is not None
        else _STOP + received
        if received
        else _SAVE
        if save
        else _GO_ON
    )
    agreed = distributed.agree_max(own)
    if agreed == _FAILED:
        raise_first(distributed, failure)
    if agreed >= _STOP:
        raise StopRequested(agreed - _STOP)
    return NextBatch(micro_batches, waited_s, agreed == _SAVE)


class Waiting:
    """Detects whether training waits for its data: reported once, with the remedy."""

    def __init__(self, data: DataConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        self._data, self._clock = data, clock
        self._waits: deque[float] = deque(maxlen=ITERATIONS)
        self._ends: deque[float] = deque(maxlen=ITERATIONS + 1)
        self._reported = data.dataset_source == "random"

    def add(self, waited_s: float) -> str | None:
        """Count a wait for data that has just ended; return a warning once the last 50 iterations
        show a bottleneck.

        Skip a start's first two waits: for files not in memory yet and for workers that start. A
        validation or a save in between makes an iteration longer, and so a warning less likely.
        """
        self._waits.append(waited_s)
        self._ends.append(self._clock())
        if self._reported or len(self._ends) <= ITERATIONS:
            return None
        waited_s, taken_s = sum(self._waits), self._ends[-1] - self._ends[0]
        if waited_s < max(SHARE * taken_s, LEAST_S * ITERATIONS):
            return None
        self._reported = True
        each = f"{1e3 * waited_s / ITERATIONS:,.1f} of {1e3 * taken_s / ITERATIONS:,.1f} ms"
        remedy = f"--num_workers={2 * self._data.num_workers or 2}"
        if self._data.num_workers:
            remedy += (
                " if cores are free, a larger --prefetch_factor if some reads are slow, or copy the data to a faster "
                "disk"
            )
        return f"data is the bottleneck: the last {ITERATIONS} iterations waited {each} each for it; use {remedy}"


class Phase(NamedTuple):
    """The samples of training, validation or test."""

    reader: Reader
    schedule: BatchSchedule  # in an evaluation: one batch size, but the last batch may be smaller
    iterations: int


@dataclass(eq=False)
class DataSource:
    """A run's training, validation and test samples."""

    config: Config  # resolved
    rank: int
    world_size: int
    phases: dict[str, Phase]  # those that the run needs
    description: dict[str, str]  # lines for the banner: files, documents, tokens, epochs
    identity: dict[str, Any]  # see `fingerprint.identity`
    counts: Counts  # of training
    warnings: Sequence[str] = ()  # to be logged
    # called regularly while the host waits for a worker; may raise
    while_waiting: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size, (self.rank, self.world_size)
        self._pin_memory = self.config.distributed.device != "cpu" and torch.cuda.is_available()
        self._open: set[Workers] = set()
        self._ended = threading.Event()

    def split(self, phase: str, iteration: int) -> Split:
        """Return how ranks and micro-batches share an iteration's samples; iterations count from
        1."""
        batch, samples = self.config.batch, self.phases[phase].schedule.batch_size(iteration)
        if phase == "training":
            return Split(
                samples,
                batch.micro_batch_size,
                self.world_size,
                batch.breadth_first_micro_batches or 1,
            )
        return Split(
            samples, batch.eval_micro_batch_size or batch.micro_batch_size, self.world_size
        )

    def batches(
        self, phase: str, first_iteration: int = 0, num_iterations: int | None = None
    ) -> Iterator[list[HostBatch]]:
        """Yield this rank's micro-batches, one list per iteration, for the iterations after
        `first_iteration`.

        All micro-batches of an iteration have the same number of rows. Workers start at the first
        `next`, whose data is read in place meanwhile, and end when the generator ends or is closed.
        Without `num_iterations`, the generator yields all iterations of the phase; an evaluation
        sees the same batches every time.

        Raises: DataError for unreadable files and token ids outside the vocabulary; WorkerError if
        a worker dies.
        """
        count = (
            self.phases[phase].iterations - first_iteration
            if num_iterations is None
            else num_iterations
        )
        iterations = range(first_iteration + 1, first_iteration + count + 1)
        first = self._requests(phase, iterations[:1])
        with self._samples(phase, first, self._requests(phase, iterations[1:])) as samples:
            for iteration in iterations:
                split = self.split(phase, iteration)
                before = self.phases[phase].schedule.consumed_samples(iteration - 1)
                yield [
                    self._host_batch(next(samples), split, step)._replace(
                        first_sample=before + split.piece(step, self.rank)[0]
                    )
                    for step in range(split.micro_steps)
                ]

    def batch(self, phase: str, iteration: int) -> list[HostBatch]:
        """Read one iteration's micro-batches on this rank in place."""
        return next(self.batches(phase, iteration - 1, 1))

    def alone(self, phase: str) -> dict[str, str]:
        """Return the phases that evaluate single data sets of a phase's blend: name of the data set
        -> phase."""
        return {
            name.partition("/")[2]: name for name in self.phases if name.startswith(f"{phase}/")
        }

    def close(self) -> None:
        """End all workers, even of generators that were never closed, and the background search."""
        self._ended.set()
        for workers in list(self._open):
            workers.close()
        self._open.clear()

    def search_in_background(
        self, prefixes: Sequence[str], report: Callable[[RunError], None]
    ) -> None:
        """Report the first token id outside the vocabulary in these pairs; see `search`."""

        def run() -> None:
            # Its reader reports why a file cannot be read any more.
            with contextlib.suppress(DataError):
                search(prefixes, self.config.model.vocab_size, report, self._ended)

        threading.Thread(target=run, daemon=True, name="token-search").start()

    def _requests(self, phase: str, iterations: range) -> Iterator[Request]:
        """Yield (index of the first sample, samples) for each of this rank's micro-batches."""
        for iteration in iterations:
            before = self.phases[phase].schedule.consumed_samples(iteration - 1)
            split = self.split(phase, iteration)
            for micro_step in range(split.micro_steps):
                first, count = split.piece(micro_step, self.rank)
                yield before + first, count

    @contextlib.contextmanager
    def _samples(
        self, phase: str, first: Iterator[Request], others: Iterator[Request]
    ) -> Iterator[Iterator[Samples]]:
        """Yield the requested samples in order: `first` read in place, `others` ahead of time by
        workers, if any.

        Only training from files uses workers: a validation is short and would mostly wait for them
        to start, and random tokens take less time to generate than to send.
        """
        reader, data = self.phases[phase].reader, self.config.data
        in_place = (reader.read(*request) for request in first)
        if phase != "training" or data.num_workers == 0 or isinstance(reader, RandomReader):
            yield itertools.chain(in_place, (reader.read(*request) for request in others))
            return
        prefetch = data.prefetch_factor or 1  # None only without workers
        context = data.multiprocessing_context
        workers = Workers(
            reader, others, data.num_workers, prefetch, context, lambda: self.while_waiting()
        )
        self._open.add(workers)
        try:
            yield itertools.chain(in_place, workers)
        finally:
            workers.close()
            self._open.discard(workers)

    def _host_batch(self, samples: Samples, split: Split, micro_step: int) -> HostBatch:
        """Pad to the rows of a micro-batch with token 0, each padded row one document, and create
        tensors.

        Tokens become int64 here, not in the worker: fewer bytes cross the pipe.
        """
        for message in samples.warnings:
            logger.warning("%s", message)
        tokens, rows = samples.tokens.astype(np.int64), split.micro_batch_size
        padding = rows - len(tokens)
        if padding:
            tokens = np.concatenate([tokens, np.zeros((padding, tokens.shape[1]), dtype=np.int64)])
        starts = positions = masked = None
        if self.config.data.needs_borders:
            lengths = [
                0,
                *([] if samples.lengths is None else samples.lengths),
                *[tokens.shape[1] - 1] * padding,
            ]
            borders = np.cumsum(lengths, dtype=np.int32)
            if not self.config.data.cross_document_attention:
                starts = self._tensor(borders)
            if self.config.data.reset_position_ids:
                counted = np.arange(borders[-1]) - np.repeat(borders[:-1], lengths[1:])
                positions = self._tensor(counted.reshape(rows, -1))
        if samples.masked is not None:
            masked = self._tensor(
                np.concatenate([samples.masked, np.ones((padding, tokens.shape[1] - 1), np.bool_)])
            )
        return HostBatch(
            self._tensor(tokens), split.real_samples(micro_step), starts, padding, positions, masked
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._pin_memory else tensor
