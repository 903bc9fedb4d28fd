"""DataSource: the micro-batches of each phase, as tensors, for one rank.

Sample index of iteration t (from 0), micro-batch m, rank r and row j:
    t * batch_size + (m * world_size + r) * micro_batch_size + j
so the samples of a global batch, as a set, depend on t alone.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_lite.config import Config
from megatron_lite.data.blending import MAX_SAMPLES, Blend
from megatron_lite.data.documents import DocumentBorders
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.reading import RandomReader, Reader, Samples, Stream, StreamReader
from megatron_lite.data.sampling import PHASES, StreamSampler, sampler_key, split_documents
from megatron_lite.data.tokenizing import read_tokenizer_file
from megatron_lite.data.workers import Request, Workers
from megatron_lite.errors import DataError, UsageError
from megatron_lite.validation import weighted_paths


class HostBatch(NamedTuple):
    """A micro-batch on the host, in pinned memory where a GPU will read it."""

    tokens: Tensor  # (b, s + 1) int64
    # (p + 1,) int32: first position, in the flattened (b s,) inputs, of each of the p pieces of documents, then b s.
    # Every sample begins a piece. None with --cross_document_attention=1.
    starts: Tensor | None = None


class DataSource:
    """The training, validation and test samples of one run. Made by `open_data`."""

    def __init__(
        self, config: Config, rank: int, world_size: int, readers: dict[str, Reader], description: dict[str, str]
    ) -> None:
        """config: resolved; readers: one for each phase that the run needs."""
        batch = config.batch
        assert batch.batch_size and batch.micro_batch_size, batch
        assert 0 <= rank < world_size, (rank, world_size)
        self._batch_size, self._micro_batch_size = batch.batch_size, batch.micro_batch_size
        self._micro_batches = batch.batch_size // (batch.micro_batch_size * world_size)
        assert self._micro_batches * batch.micro_batch_size * world_size == batch.batch_size, (batch, world_size)
        self._rank, self._world_size = rank, world_size
        self._data = config.data
        self._pin_memory = config.distributed.device != "cpu" and torch.cuda.is_available()
        self._readers = readers
        self._description = description
        self._open: set[Workers] = set()

    def batches(self, phase: str, first_iteration: int, num_iterations: int) -> Iterator[list[HostBatch]]:
        """Per iteration the sequential micro-batches in order, each of micro_batch_size samples.

        A generator: its worker processes start at the first `next` and end with it, or when it is closed.

        Raises: DataError for unreadable files and token ids outside of the vocabulary; RunError if a worker dies.
        """
        reader = self._readers[phase]
        micro_batches = self._micro_batches

        def request(number: int) -> tuple[int, int]:
            iteration, micro_batch = divmod(number, micro_batches)
            position = (micro_batch * self._world_size + self._rank) * self._micro_batch_size
            return (first_iteration + iteration) * self._batch_size + position, self._micro_batch_size

        with self._samples(phase, reader, request, num_iterations * micro_batches) as samples:
            for _ in range(num_iterations):
                yield [self._host_batch(next(samples)) for _ in range(micro_batches)]

    @contextlib.contextmanager
    def _samples(self, phase: str, reader: Reader, request: Request, num_requests: int) -> Iterator[Iterator[Samples]]:
        """The micro-batches of this rank, read ahead by workers or in place.

        Only training from files uses workers: a validation is short and would mostly wait for them to start, and
        made-up tokens take less time to make than to send.
        """
        num_workers = self._data.num_workers
        if phase != "training" or num_workers == 0 or isinstance(reader, RandomReader):
            yield (reader.read(*request(number)) for number in range(num_requests))
            return
        prefetch = self._data.prefetch_factor or 1  # None only without workers
        workers = Workers(reader, request, num_requests, num_workers, prefetch, self._data.multiprocessing_context)
        self._open.add(workers)
        try:
            yield iter(workers)
        finally:
            workers.close()
            self._open.discard(workers)

    def _host_batch(self, samples: Samples) -> HostBatch:
        """Widen to int64 here, not in the worker: fewer bytes cross the pipe."""
        for message in samples.slow:
            logging.getLogger("megatron_lite").warning("%s (--data_sample_warn_time_ms)", message)
        tokens = self._tensor(samples.tokens.astype(np.int64))
        if samples.lengths is None:
            return HostBatch(tokens)
        return HostBatch(tokens, self._tensor(np.cumsum(np.concatenate([[0], samples.lengths]), dtype=np.int32)))

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._pin_memory else tensor

    def describe(self) -> dict[str, str]:
        """Lines for the banner: files, documents, tokens, epochs."""
        return dict(self._description)

    def close(self) -> None:
        """End all workers, also those of generators that nobody closed."""
        for workers in list(self._open):
            workers.close()
        self._open.clear()


def open_data(config: Config, rank: int, world_size: int) -> DataSource:
    """Open and check the data of a resolved config: headers, sizes and splits, but no tokens.

    Raises: UsageError if there is no --data_path; DataError, one line naming the file, if a file is missing or damaged,
    or a phase that the run needs (training, validation or test iterations above zero) is empty or below one sample.
    """
    training = config.training
    assert training.validation_iters != "all", "not built yet"
    iterations = dict(zip(PHASES, (training.train_iters, training.validation_iters, training.test_iters), strict=True))
    needed = [phase for phase in PHASES if iterations[phase] > 0]
    seed, sequence_length = config.distributed.seed, config.batch.sequence_length
    readers: dict[str, Reader] = {}
    if config.data.tokenizer_file is not None:
        try:
            read_tokenizer_file(config.data.tokenizer_file)  # now, and not at the first export
        except DataError as error:
            raise DataError(f"--tokenizer_file: {error}") from error
    if config.data.dataset_source == "random":
        for phase in needed:
            readers[phase] = RandomReader(
                sampler_key(seed, phase, 0), sequence_length, config.model.vocab_size,
                documents=not config.data.cross_document_attention,
            )  # fmt: skip
        return DataSource(config, rank, world_size, readers, {"data": "random tokens"})
    weighted = weighted_paths(config.data.data_path) if needed else []
    if needed and not weighted:
        raise UsageError(
            "--data_path: names no data set; give the prefix of a .bin/.idx pair, or use --dataset_source=random"
        )
    datasets = {prefix: IndexedDataset(prefix) for _, prefix in weighted}
    description = {}
    for number, (weight, prefix) in enumerate(weighted):
        dataset = datasets[prefix]
        share = f", {100 * weight:.4g}% of the samples" if len(weighted) > 1 else ""
        size = f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens"
        description[f"data {number}"] = f"{prefix}: {size}{share}"
    for phase in needed:
        streams = [_stream(config, phase, number, datasets[prefix]) for number, (_, prefix) in enumerate(weighted)]
        blend = Blend([weight for weight, _ in weighted])
        readers[phase] = StreamReader(streams, blend, config.model.vocab_size, config.data.data_sample_warn_time_ms)
        samples = iterations[phase] * (config.batch.batch_size or 1)
        if len(streams) > 1 and samples > MAX_SAMPLES:
            raise UsageError(f"--data_path: a blend gives at most {MAX_SAMPLES:,} samples, not {samples:,}")
        description[f"{phase} data"] = _describe_phase(streams, blend, samples)
    return DataSource(config, rank, world_size, readers, description)


def _stream(config: Config, phase: str, number: int, dataset: IndexedDataset) -> Stream:
    """The part of a data set that `phase` reads."""
    if dataset.num_documents == 0:
        raise DataError(f"{dataset.index_path}: an empty data set: it holds no documents")
    first, end = split_documents(dataset.num_documents, config.data.split)[PHASES.index(phase)]
    split = ",".join(f"{share:g}" for share in config.data.split)
    if first == end:
        flag = "train_iters" if phase == "training" else f"{phase}_iters"
        raise DataError(
            f"{dataset.index_path}: --split={split} leaves none of its {dataset.num_documents:,} documents for "
            f"{phase}; give {phase} a larger share, or set --{flag}=0"
        )
    first_token = dataset.first_token(first)
    num_tokens = dataset.first_token(end) - first_token
    needed = config.batch.sequence_length + 1
    if num_tokens < needed:
        raise DataError(
            f"{dataset.tokens.path}: {num_tokens:,} tokens for {phase} ({end - first:,} of {dataset.num_documents:,} "
            f"documents, --split={split}), but one sample needs {needed:,} (--sequence_length + 1)"
        )
    key = sampler_key(config.distributed.seed, phase, number)
    sampler = StreamSampler(num_tokens, config.batch.sequence_length, key)
    borders = None if config.data.cross_document_attention else DocumentBorders(dataset.starts, dataset.tokens.dtype)
    return Stream(dataset.prefix, dataset.tokens, first_token, sampler, borders)


def _describe_phase(streams: list[Stream], blend: Blend, samples: int) -> str:
    tokens = sum(stream.sampler.num_tokens for stream in streams)
    epochs = [
        weight * samples / stream.sampler.samples_per_epoch
        for weight, stream in zip(blend.weights, streams, strict=True)
    ]
    many = f"{min(epochs):.3g} to {max(epochs):.3g}" if len(set(epochs)) > 1 else f"{epochs[0]:.3g}"
    return f"{samples:,} samples out of {tokens:,} tokens: {many} epochs"
