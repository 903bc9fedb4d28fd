"""Open the data of a run: check the files, cut the splits, and choose what each phase reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_lite.config import Config
from megatron_lite.config.option import All
from megatron_lite.config.structured_values import WeightStage, short_names, weight_stages
from megatron_lite.data.blending import MAX_SAMPLES, Blend, Concatenation
from megatron_lite.data.disk_array import allow_open_files
from megatron_lite.data.epochs import Opened, check_epochs, describe, left_out, repeats
from megatron_lite.data.fill_in_the_middle import FillInTheMiddle
from megatron_lite.data.fingerprint import identity
from megatron_lite.data.indexed_dataset import DocumentBorders, IndexedDataset
from megatron_lite.data.loader import DataSource, Phase
from megatron_lite.data.loss_masks import open_masks
from megatron_lite.data.packing import PackedDocuments, PackedFile, read_sizes
from megatron_lite.data.reading import RandomReader, Stream, StreamReader
from megatron_lite.data.sampling import PHASES, SampleOrder, StreamSampler, sampler_key
from megatron_lite.data.shuffled_documents import ShuffledDocuments
from megatron_lite.data.tokenizing import read_tokenizer_file
from megatron_lite.errors import DataError, UsageError
from megatron_lite.schedules.batch_size import BatchSchedule, Segment, batch_schedule, once_through
from megatron_lite.seeds import derive_seed
from megatron_lite.validation import weighted_paths

FILES_OF_A_SET = 3  # tokens, index, loss mask
OTHER_FILES = 1024


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
    allow_open_files(FILES_OF_A_SET * len(weighted) + OTHER_FILES)
    datasets = {prefix: IndexedDataset(prefix) for _, prefix in weighted}
    opened = Opened(config, [prefix for _, prefix in weighted], datasets)
    fill = None
    if needed and config.data.fim_rate > 0:
        key = derive_seed("fill in the middle", config.distributed.seed)
        fill = FillInTheMiddle(config.data, config.model.vocab_size, key)
    masks = open_masks(config.data.loss_mask, [datasets[prefix] for prefix in opened.prefixes])
    for phase, count in needed.items():
        streams = [
            _stream(config, phase, number, datasets[prefix], masks[number])
            for number, prefix in enumerate(opened.prefixes)
        ]
        phases[phase] = (
            _whole_split(config, streams, fill) if count == "all" else _blended(config, phase, count, streams, fill)
        )
        if phase == "validation" and config.training.validation_by_dataset:
            phases |= _each_alone(config, opened.prefixes, streams, count, fill)
    notes = [*repeats(opened, phases), *left_out(phases)]
    own = identity([datasets[prefix] for prefix in opened.prefixes], tokenizer, masks)
    return DataSource(config, rank, world_size, phases, describe(opened, phases), own, notes)


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


def _blended(config: Config, phase: str, count: int, streams: list[Stream], fill: FillInTheMiddle | None) -> Phase:
    """Blend `count` batches of all data sets by their weights."""
    schedule, (first, *later) = _schedule(config, phase), _weight_stages(config)
    changes = [(schedule.consumed_samples(start), weights) for start, weights in later] if phase == "training" else []
    samples, blend = schedule.consumed_samples(count), Blend(first.weights, changes)
    if len(streams) > 1 and samples > MAX_SAMPLES:
        raise UsageError(f"--data_path: a blend gives at most {MAX_SAMPLES:,} samples, not {samples:,}")
    phase_of = Phase(_reader(config, streams, blend, fill), schedule, count)
    if phase == "training":
        check_epochs(config, phase_of)
    return phase_of


def _weight_stages(config: Config) -> tuple[WeightStage, ...]:
    return weight_stages(config.data.data_path, config.data.data_weights_schedule)


def _whole_split(config: Config, streams: list[Stream], fill: FillInTheMiddle | None) -> Phase:
    """Read each data set once from end to end."""
    assert config.batch.batch_size is not None, "resolved"
    streams = list({(stream.prefix, stream.mask and stream.mask.path): stream for stream in streams}.values())
    order = Concatenation([stream.sampler.samples_per_epoch for stream in streams])
    reader = _reader(config, streams, order, fill)
    return Phase(reader, *once_through(order.num_samples, config.batch.batch_size))


def _each_alone(
    config: Config, prefixes: list[str], streams: list[Stream], count: int | All, fill: FillInTheMiddle | None
) -> dict[str, Phase]:
    """Return a validation of each data set by itself, called validation/<name>; none without a blend."""
    alone = {stream.prefix: stream for stream in streams}
    if len(alone) < 2:
        return {}
    names = short_names(list(alone))
    return {
        f"validation/{names[prefix]}": _whole_split(config, [stream], fill)
        if count == "all"
        else Phase(_reader(config, [stream], Blend([1.0]), fill), _schedule(config, "validation"), count)
        for prefix, stream in alone.items()
    }


def _reader(
    config: Config, streams: list[Stream], order: Blend | Concatenation, fill: FillInTheMiddle | None
) -> StreamReader:
    data, length = config.data, config.batch.sequence_length
    return StreamReader(
        streams, order, length, config.model.vocab_size, data.data_sample_warn_time_ms, data.mask_document_starts, fill
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


def _stream(config: Config, phase: str, number: int, dataset: IndexedDataset, mask: IndexedDataset | None) -> Stream:
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
    needed, key = config.batch.sequence_length + 1, sampler_key(config.distributed.seed, phase, number)
    if not config.data.truncate_documents:
        return _packed_stream(config, phase, dataset, mask, range(first, end), key)
    if num_tokens < needed:
        raise DataError(
            f"{dataset.tokens.path}: {num_tokens:,} tokens for {phase} ({end - first:,} of {dataset.num_documents:,} "
            f"documents, --split={split}), but one sample needs {needed:,} (--sequence_length + 1)"
        )
    sampler = StreamSampler(num_tokens, config.batch.sequence_length, key, _order(config, phase))
    itemsize = dataset.tokens.dtype.itemsize
    borders = DocumentBorders(dataset.pointers, dataset.tokens.dtype) if config.data.needs_borders else None
    documents = None
    if sampler.order.documents:
        keep = sampler.order.epochs + 1  # an epoch and the next one, or all that are shuffled together
        split_of = range(first, end)
        documents = ShuffledDocuments(dataset.pointers, dataset.sizes, split_of, num_tokens, itemsize, key, keep)
    return Stream(
        dataset.prefix, dataset.tokens, first_token, sampler, borders, documents, None if mask is None else mask.tokens
    )


def _packed_stream(
    config: Config, phase: str, dataset: IndexedDataset, mask: IndexedDataset | None, documents: range, key: int
) -> Stream:
    """Pack the documents of a split into samples."""
    capacity = config.batch.sequence_length + 1
    first_token = dataset.first_token(documents.start)
    num_tokens = dataset.first_token(documents.stop) - first_token
    plan = PackedDocuments(read_sizes(dataset.sizes, documents, num_tokens), capacity, key)
    if not plan.samples_per_epoch:
        raise DataError(
            f"{dataset.tokens.path}: none of its {len(documents):,} documents for {phase} has 1 to {capacity:,} tokens "
            "(--sequence_length + 1), and --truncate_documents=0 cuts none; write a larger --sequence_length"
        )
    packed = PackedFile(plan, dataset.pointers, documents.start, dataset.tokens.dtype.itemsize, dataset.sizes)
    slots = StreamSampler(plan.samples_per_epoch + 1, 1, key, _order(config, phase))
    masks = None if mask is None else mask.tokens
    return Stream(dataset.prefix, dataset.tokens, first_token, slots, mask=masks, packed=packed)


def _order(config: Config, phase: str) -> SampleOrder:
    """Return the order of a phase: validation and test keep the default, so that their results compare."""
    data = config.data
    if phase != "training":
        return SampleOrder()
    windows = data.shuffle in ("epoch", "skip_first_epoch")
    return SampleOrder(
        data.shuffle,
        data.shuffle_era if windows else None,
        (data.max_epochs or 1) if data.shuffle == "full" else 1,
        data.shuffle_documents and data.shuffle != "none" and data.truncate_documents,
    )
