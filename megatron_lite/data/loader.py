"""DataSource: the micro-batches of each phase, as tensors, for one rank.

Sample index of iteration t, micro-batch m, rank r and row j:
    samples of all iterations before t + (m * world_size + r) * micro_batch_size + j
so the samples of a global batch, as a set, depend on t alone. A batch that does not come out even ends with padding:
rows that are read from nowhere, and whose labels are masked.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_lite.config import Config
from megatron_lite.data.blending import MAX_SAMPLES, Blend, Concatenation
from megatron_lite.data.documents import DocumentBorders
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.reading import RandomReader, Reader, Samples, Stream, StreamReader
from megatron_lite.data.sampling import PHASES, StreamSampler, sampler_key, split_documents
from megatron_lite.data.tokenizing import read_tokenizer_file
from megatron_lite.data.workers import Request, Workers
from megatron_lite.errors import DataError, UsageError
from megatron_lite.kernels.attention.attention import Documents
from megatron_lite.model.layer import MASKED, MicroBatch
from megatron_lite.schedules.batch_size import BatchSchedule, Segment, Split, batch_schedule, once_through
from megatron_lite.validation import weighted_paths


class HostBatch(NamedTuple):
    """A micro-batch on the host, in pinned memory where a GPU will read it."""

    tokens: Tensor  # (b, s + 1) int64
    # (p + 1,) int32: first position, in the flattened (b s,) inputs, of each of the p pieces of documents, then b s.
    # Every sample begins a piece. None with --cross_document_attention=1.
    starts: Tensor | None = None
    padding: int = 0  # rows at the end that are no samples


def micro_batch(
    batch: HostBatch, device: torch.device, scale: Tensor | None, dropout_seed: int | None, loss_weight: float = 1.0
) -> MicroBatch:
    """Copy a micro-batch to the device: (b, s + 1) tokens -> inputs and labels, (b, s), and their documents.

    Labels of padding are masked. `loss_weight` is multiplied into the gradient scale.
    """
    tokens, documents = batch.tokens.to(device, non_blocking=True), None
    # A real copy: `contiguous` returns a single row as it is, and masking its labels would change the tokens.
    labels = tokens[:, 1:].clone(memory_format=torch.contiguous_format)
    if batch.padding:
        labels[-batch.padding :] = MASKED
    if scale is not None and loss_weight != 1.0:
        scale = scale * loss_weight
    if batch.starts is not None:
        documents = Documents(batch.starts.to(device, non_blocking=True), tuple(batch.starts.diff().tolist()))
    return MicroBatch(tokens[:, :-1].contiguous(), labels, scale, dropout_seed, documents, loss_weight)


@dataclass(frozen=True)
class Phase:
    """What is read for training, validation or test."""

    reader: Reader
    schedule: BatchSchedule  # of an evaluation: batches of one size, but the last one may be smaller
    iterations: int


class DataSource:
    """The training, validation and test samples of one run. Made by `open_data`."""

    def __init__(
        self, config: Config, rank: int, world_size: int, phases: dict[str, Phase], description: dict[str, str]
    ) -> None:
        """config: resolved; phases: those that the run needs."""
        assert config.batch.micro_batch_size, config.batch
        assert 0 <= rank < world_size, (rank, world_size)
        self._batch, self._data = config.batch, config.data
        self._rank, self._world_size = rank, world_size
        self._pin_memory = config.distributed.device != "cpu" and torch.cuda.is_available()
        self._phases = phases
        self._description = description
        self._open: set[Workers] = set()

    def split(self, phase: str, iteration: int) -> Split:
        """How an iteration's samples are shared by ranks and micro-batches; counted from 1."""
        batch, samples = self._batch, self._phases[phase].schedule.batch_size(iteration)
        assert batch.micro_batch_size is not None, "resolved before"
        if phase == "training":
            return Split(samples, batch.micro_batch_size, self._world_size, batch.breadth_first_micro_batches or 1)
        return Split(samples, batch.eval_micro_batch_size or batch.micro_batch_size, self._world_size)

    def batches(self, phase: str, first_iteration: int, num_iterations: int) -> Iterator[list[HostBatch]]:
        """Per iteration the sequential micro-batches in order, each as many rows, from the one after `first_iteration`.

        A generator: its worker processes start at the first `next` and end with it, or when it is closed.

        Raises: DataError for unreadable files and token ids outside of the vocabulary; RunError if a worker dies.
        """
        iterations = range(first_iteration + 1, first_iteration + num_iterations + 1)
        with self._samples(phase, self._phases[phase].reader, self._requests(phase, iterations)) as samples:
            for iteration in iterations:
                split = self.split(phase, iteration)
                yield [self._host_batch(next(samples), split.micro_batch_size) for _ in range(split.micro_steps)]

    def evaluation_batches(self, phase: str) -> Iterator[list[HostBatch]]:
        """The batches of a validation or test, the same ones every time, as `batches`."""
        return self.batches(phase, 0, self.evaluation_iterations(phase))

    def evaluation_iterations(self, phase: str) -> int:
        """The number of these batches."""
        return self._phases[phase].iterations

    def evaluation_samples(self, phase: str) -> int:
        """Samples in these batches, over all ranks, padding left out."""
        return self._phases[phase].schedule.consumed_samples(self._phases[phase].iterations)

    def _requests(self, phase: str, iterations: range) -> Iterator[Request]:
        """(index of the first sample, samples) of this rank's micro-batches, one after the other."""
        for iteration in iterations:
            before, split = self._phases[phase].schedule.consumed_samples(iteration - 1), self.split(phase, iteration)
            for micro_step in range(split.micro_steps):
                first, count = split.piece(micro_step, self._rank)
                yield before + first, count

    @contextlib.contextmanager
    def _samples(self, phase: str, reader: Reader, requests: Iterator[Request]) -> Iterator[Iterator[Samples]]:
        """The micro-batches of this rank, read ahead by workers or in place.

        Only training from files uses workers: a validation is short and would mostly wait for them to start, and
        made-up tokens take less time to make than to send.
        """
        num_workers = self._data.num_workers
        if phase != "training" or num_workers == 0 or isinstance(reader, RandomReader):
            yield (reader.read(*request) for request in requests)
            return
        prefetch = self._data.prefetch_factor or 1  # None only without workers
        workers = Workers(reader, requests, num_workers, prefetch, self._data.multiprocessing_context)
        self._open.add(workers)
        try:
            yield iter(workers)
        finally:
            workers.close()
            self._open.discard(workers)

    def _host_batch(self, samples: Samples, rows: int) -> HostBatch:
        """Widen to int64 here, not in the worker: fewer bytes cross the pipe. What is missing is filled up with token
        0, each row as one document.
        """
        for message in samples.slow:
            logging.getLogger("megatron_lite").warning("%s (--data_sample_warn_time_ms)", message)
        tokens, padding = samples.tokens.astype(np.int64), rows - len(samples.tokens)
        if padding:
            tokens = np.concatenate([tokens, np.zeros((padding, tokens.shape[1]), dtype=np.int64)])
        if self._data.cross_document_attention:
            return HostBatch(self._tensor(tokens), None, padding)
        lengths = [0, *([] if samples.lengths is None else samples.lengths), *[tokens.shape[1] - 1] * padding]
        return HostBatch(self._tensor(tokens), self._tensor(np.cumsum(lengths, dtype=np.int32)), padding)

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
    iterations = dict(zip(PHASES, (training.train_iters, training.validation_iters, training.test_iters), strict=True))
    needed = {phase: count for phase, count in iterations.items() if count != 0}
    phases: dict[str, Phase] = {}
    if config.data.tokenizer_file is not None:
        try:
            read_tokenizer_file(config.data.tokenizer_file)  # now, and not at the first export
        except DataError as error:
            raise DataError(f"--tokenizer_file: {error}") from error
    if config.data.dataset_source == "random":
        for phase, count in needed.items():
            assert count != "all", "refused before: they have no end"
            reader = RandomReader(
                sampler_key(config.distributed.seed, phase, 0),
                config.batch.sequence_length,
                config.model.vocab_size,
                documents=not config.data.cross_document_attention,
            )
            phases[phase] = Phase(reader, _schedule(config, phase), count)
        return DataSource(config, rank, world_size, phases, {"data": "random tokens"})
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
    for phase, count in needed.items():
        streams = [_stream(config, phase, number, datasets[prefix]) for number, (_, prefix) in enumerate(weighted)]
        if count == "all":
            phases[phase], described = _whole_split(config, streams)
        else:
            phases[phase], described = _blended(config, phase, count, streams, [weight for weight, _ in weighted])
        description[f"{phase} data"] = described
    return DataSource(config, rank, world_size, phases, description)


def _schedule(config: Config, phase: str) -> BatchSchedule:
    """An evaluation takes batches of one size, whatever the training's are: its result can be compared over the run."""
    if phase == "training":
        return batch_schedule(config.batch)
    assert config.batch.batch_size is not None, "resolved before"
    return BatchSchedule((Segment(0, config.batch.batch_size),))


def _blended(config: Config, phase: str, count: int, streams: list[Stream], weights: list[float]) -> tuple[Phase, str]:
    """`count` batches of all data sets, as their weights say, and what the banner says of them."""
    schedule, blend = _schedule(config, phase), Blend(weights)
    samples = schedule.consumed_samples(count)
    if len(streams) > 1 and samples > MAX_SAMPLES:
        raise UsageError(f"--data_path: a blend gives at most {MAX_SAMPLES:,} samples, not {samples:,}")
    reader = StreamReader(streams, blend, config.model.vocab_size, config.data.data_sample_warn_time_ms)
    return Phase(reader, schedule, count), _describe_phase(streams, blend, samples)


def _whole_split(config: Config, streams: list[Stream]) -> tuple[Phase, str]:
    """One epoch of every data set, one after the other, each of them once."""
    assert config.batch.batch_size is not None, "resolved before"
    streams = list({stream.prefix: stream for stream in streams}.values())
    order = Concatenation([stream.sampler.samples_per_epoch for stream in streams])
    reader = StreamReader(streams, order, config.model.vocab_size, config.data.data_sample_warn_time_ms)
    tokens = sum(stream.sampler.num_tokens for stream in streams)
    described = f"{order.num_samples:,} samples out of {tokens:,} tokens: each sample once"
    return Phase(reader, *once_through(order.num_samples, config.batch.batch_size)), described


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
