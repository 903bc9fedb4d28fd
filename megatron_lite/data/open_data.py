"""Open the data of a run: check the files, cut the splits, and choose what each phase reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_lite.config import Config
from megatron_lite.data.blending import MAX_SAMPLES, Blend, Concatenation
from megatron_lite.data.fingerprint import identity
from megatron_lite.data.indexed_dataset import DocumentBorders, IndexedDataset
from megatron_lite.data.loader import DataSource, Phase
from megatron_lite.data.reading import RandomReader, Stream, StreamReader
from megatron_lite.data.sampling import PHASES, StreamSampler, sampler_key
from megatron_lite.data.tokenizing import read_tokenizer_file
from megatron_lite.errors import DataError, UsageError
from megatron_lite.schedules.batch_options import batch_schedule
from megatron_lite.schedules.batch_size import BatchSchedule, Segment, once_through
from megatron_lite.validation import weighted_paths

MOST_DESCRIBED = 20  # data sets with a line of their own in the banner


def open_data(config: Config, rank: int, world_size: int) -> DataSource:
    """Open and check the data of a resolved configuration: headers, sizes and splits, but no tokens.

    Raises:
        UsageError: without --data_path.
        DataError: one line that names the file, if a file is missing or damaged, or if a phase that the run needs
            (training, validation or test iterations above zero) has less than one sample.
    """
    training = config.training
    iterations = dict(zip(PHASES, (training.train_iters, training.validation_iters, training.test_iters), strict=True))
    needed = {phase: count for phase, count in iterations.items() if count != 0}
    tokenizer = config.data.tokenizer_file
    if tokenizer is not None:
        try:
            read_tokenizer_file(tokenizer)  # now, not at the first export
        except DataError as error:
            raise DataError(f"--tokenizer_file: {error}") from error
    phases: dict[str, Phase] = {}
    if config.data.dataset_source == "random":
        for phase, count in needed.items():
            assert count != "all", "refused by validation: random tokens have no end"
            phases[phase] = Phase(_random_reader(config, phase), _schedule(config, phase), count)
        return DataSource(config, rank, world_size, phases, {"data": "random tokens"}, identity([], tokenizer))
    weighted = weighted_paths(config.data.data_path) if needed else []
    if needed and not weighted:
        raise UsageError(
            "--data_path: names no data set; give the prefix of a .bin/.idx pair, or use --dataset_source=random"
        )
    datasets = {prefix: IndexedDataset(prefix) for _, prefix in weighted}
    description = {}
    for number, (weight, prefix) in enumerate(weighted[:MOST_DESCRIBED]):
        dataset = datasets[prefix]
        share = f", {100 * weight:.4g}% of the samples" if len(weighted) > 1 else ""
        size = f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens"
        description[f"data {number}"] = f"{prefix}: {size}{share}"
    if others := weighted[MOST_DESCRIBED:]:
        percent = 100 * sum(weight for weight, _ in others)
        tokens = sum(datasets[prefix].num_tokens for _, prefix in others)
        description["other data"] = f"{len(others):,} data sets: {tokens:,} tokens, {percent:.4g}% of the samples"
    for phase, count in needed.items():
        streams = [_stream(config, phase, number, datasets[prefix]) for number, (_, prefix) in enumerate(weighted)]
        if count == "all":
            phases[phase], described = _whole_split(config, streams)
        else:
            phases[phase], described = _blended(config, phase, count, streams, [weight for weight, _ in weighted])
        description[f"{phase} data"] = described
    opened = identity([datasets[prefix] for _, prefix in weighted], tokenizer)
    return DataSource(config, rank, world_size, phases, description, opened)


def _random_reader(config: Config, phase: str) -> RandomReader:
    return RandomReader(
        sampler_key(config.distributed.seed, phase, 0),
        config.batch.sequence_length,
        config.model.vocab_size,
        documents=config.data.needs_borders,
    )


def _schedule(config: Config, phase: str) -> BatchSchedule:
    """Return the batch sizes of a phase: an evaluation keeps one size, so that its results compare over the run."""
    if phase == "training":
        return batch_schedule(config.batch)
    assert config.batch.batch_size is not None, "resolved"
    return BatchSchedule((Segment(0, config.batch.batch_size),))


def _blended(config: Config, phase: str, count: int, streams: list[Stream], weights: list[float]) -> tuple[Phase, str]:
    """Blend `count` batches of all data sets by their weights; return the phase and its line for the banner."""
    schedule, blend = _schedule(config, phase), Blend(weights)
    samples = schedule.consumed_samples(count)
    if len(streams) > 1 and samples > MAX_SAMPLES:
        raise UsageError(f"--data_path: a blend gives at most {MAX_SAMPLES:,} samples, not {samples:,}")
    reader = _reader(config, streams, blend)
    tokens = sum(stream.sampler.num_tokens for stream in streams)
    epochs = [
        weight * samples / stream.sampler.samples_per_epoch
        for weight, stream in zip(blend.weights, streams, strict=True)
    ]
    many = f"{min(epochs):.3g} to {max(epochs):.3g}" if len(set(epochs)) > 1 else f"{epochs[0]:.3g}"
    return Phase(reader, schedule, count), f"{samples:,} samples out of {tokens:,} tokens: {many} epochs"


def _whole_split(config: Config, streams: list[Stream]) -> tuple[Phase, str]:
    """Read each data set once from end to end; return the phase and its line for the banner."""
    assert config.batch.batch_size is not None, "resolved"
    streams = list({stream.prefix: stream for stream in streams}.values())
    order = Concatenation([stream.sampler.samples_per_epoch for stream in streams])
    reader = _reader(config, streams, order)
    tokens = sum(stream.sampler.num_tokens for stream in streams)
    described = f"{order.num_samples:,} samples out of {tokens:,} tokens: each sample once"
    return Phase(reader, *once_through(order.num_samples, config.batch.batch_size)), described


def _reader(config: Config, streams: list[Stream], order: Blend | Concatenation) -> StreamReader:
    data = config.data
    return StreamReader(
        streams, order, config.model.vocab_size, data.data_sample_warn_time_ms, mask_starts=data.mask_document_starts
    )


def split_documents(num_documents: int, split: Sequence[float]) -> list[tuple[int, int]]:
    """Return (first, last + 1) document of training, validation and test: consecutive, in file order.

    split: one to three proportions with a positive sum. The rounding is Megatron-LM's (each boundary is the running sum
    of the normalised proportions times the number of documents, rounded half to even).
    """
    assert 1 <= len(split) <= len(PHASES) and sum(split) > 0 and min(split) >= 0, split
    weights = np.array([*split, *[0.0] * (len(PHASES) - len(split))], dtype=np.float64)
    weights /= weights.sum()
    bounds, total = [0], 0.0
    for weight in weights.tolist():
        total += weight
        bounds.append(min(int(round(total * num_documents)), num_documents))
    return list(zip(bounds[:-1], bounds[1:], strict=True))


def _stream(config: Config, phase: str, number: int, dataset: IndexedDataset) -> Stream:
    """Cut the split of `phase` out of a data set."""
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
    borders = DocumentBorders(dataset.pointers, dataset.tokens.dtype) if config.data.needs_borders else None
    return Stream(dataset.prefix, dataset.tokens, first_token, sampler, borders)
