"""Open a run's data: check the files, cut the splits, choose what each phase reads, and report how
often."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from megatron_lite.config import Config, JsonObject
from megatron_lite.config.option import All
from megatron_lite.config.structured_values import short_names, weight_stages, weighted_paths
from megatron_lite.config.training import ITERATIONS, NO_MASK, OWN_DATA, PATH_FLAGS
from megatron_lite.config.values import digest
from megatron_lite.data.blending import MAX_SAMPLES, Blend, Concatenation
from megatron_lite.data.counts import Counts
from megatron_lite.data.disk_array import allow_open_files
from megatron_lite.data.fill_in_the_middle import FillInTheMiddle
from megatron_lite.data.fingerprint import identity
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.loader import DataSource, Phase
from megatron_lite.data.reading import SLOW_MS, RandomReader, Stream, StreamReader, masked_labels
from megatron_lite.data.sampling import (
    EVALUATION,
    PHASES,
    FileOrder,
    PackedDocuments,
    SampleOrder,
    ShuffledDocuments,
    StreamSampler,
    sampler_key,
)
from megatron_lite.data.skipped import Skipped
from megatron_lite.data.tokenizing import load_tokenizer, read_tokenizer_file
from megatron_lite.errors import DataError, UsageError
from megatron_lite.schedules.batch_size import BatchSchedule, Segment, batch_schedule, once_through
from megatron_lite.seeds import derive_seed

FILES_OF_A_SET = 3  # tokens, index, loss mask
OTHER_FILES = 1024
MOST_DESCRIBED = 20  # data sets with their own line in the banner
# Up to four epochs, repeated tokens are worth nearly as much as new ones; then their value falls
# fast. Source: Muennighoff et al. 2023, "Scaling Data-Constrained Language Models".
MANY_EPOCHS = 4
# Entries of a mask in which a token that counts is looked for when a run starts, and entries read
# at a time.
SEARCHED, READ_AT_A_TIME = 2**24, 2**16
NEED_BEGIN = ("gemma",)  # beginnings of the names of families whose documents begin with a token


def open_data(
    config: Config, rank: int, world_size: int, began: JsonObject | None = None
) -> DataSource:
    """Open and check the data of a resolved configuration: headers, sizes, splits and masks, but no
    tokens.

    began: a checkpoint's record of a run's data, see `Choice.began`; None for a new run. Its
    `evaluation_order` determines an evaluation's samples: data, by the data set alone; seed, also
    by --seed, the phase and the data set's place in the blend, as in runs begun by an earlier
    version.

    Raises:
        DataError: one line that names the file, if a file is missing or damaged, or if a phase that
            the run needs (training, validation or test iterations above zero) has less than one
            sample.
    """
    training, tokenizer = config.training, config.data.tokenizer_file
    order = "data" if began is None else str(began.get("evaluation_order", "seed"))
    needed = {
        phase: count
        for phase, name in ITERATIONS.items()
        if (count := getattr(training, name)) != 0
    }

    def origin(phase: str, number: int) -> tuple[int, str, int]:
        is_own = phase == "training" or order == "seed"
        return (config.distributed.seed, phase, number) if is_own else EVALUATION

    if tokenizer is not None:
        try:
            read_tokenizer_file(tokenizer)  # now, not at the first export
        except DataError as error:
            raise DataError(f"--tokenizer_file: {error}") from error
    phases, counts = dict[str, Phase](), Counts(config, began)
    if config.data.dataset_source == "random":
        sizes = config.batch.sequence_length, config.model.vocab_size
        for phase, count in needed.items():
            assert count != "all", "refused by validation: random tokens have no end"
            random = RandomReader(sampler_key(*origin(phase, 0)), *sizes)
            phases[phase] = Phase(random, _schedule(config, phase), count)
        found = identity([], tokenizer) | {"evaluation_order": order}
        return DataSource(
            config, rank, world_size, phases, {"data": "random tokens"}, found, counts
        )
    sets = _open_sets(config, {config.data.path_flag(phase) for phase in needed})
    shared = sets.get("data_path", Sets([], [], []))
    found, own = identity(shared.datasets, tokenizer, shared.masks), dict[str, str]()
    found["evaluation_order"] = order
    for phase, count in needed.items():
        datasets, masks, weights = sets[flag := config.data.path_flag(phase)]
        if flag != "data_path":
            own[phase] = digest([identity(datasets, None, masks), weights])
            found["evaluated"] = own
        fill = None
        if config.data.fim_rate > 0:
            key = derive_seed("fill in the middle", origin(phase, 0)[0])
            fill = FillInTheMiddle(config.data, config.model.vocab_size, key)
        pairs = zip(datasets, masks, strict=True)
        streams = [
            _stream(config, phase, sampler_key(*origin(phase, n)), *pair)
            for n, pair in enumerate(pairs)
        ]
        skipped = counts.skipped if phase == "training" else Skipped()
        phases[phase] = _phase(config, phase, count, streams, fill, skipped)
        # if a data set is named twice, the last
        alone = {stream.dataset.prefix: stream for stream in streams}
        if len(alone) > 1 and (
            phase in own or (phase == "validation" and training.validation_by_dataset)
        ):
            for prefix, name in short_names(list(alone)).items():
                phases[f"{phase}/{name}"] = _phase(
                    config, phase, count, [alone[prefix]], fill, Skipped()
                )
        if phase == "training":
            counts.order = _reader(phases[phase]).blend
            counts.sets = [
                (row[3], PurePath(stream.dataset.prefix).name, stream.sampler.samples_per_epoch)
                for row, stream in zip(found["sets"], streams, strict=True)
            ]
            counts.check_epochs([dataset.prefix for dataset in datasets])
    described = describe(config, sets, phases, counts)
    warnings = (
        *repeats(config, counts, shared.datasets),
        *left_out(phases),
        *borderless(config, phases),
        *beginless(config, phases),
    )
    return DataSource(config, rank, world_size, phases, described, found, counts, warnings)


def prefixes(words: JsonObject) -> list[str]:
    """Return these options' data sets by name, in the order of the words of --loss_mask."""
    return [path for flag in PATH_FLAGS for _, path in weighted_paths(words[flag], flag)]


class Sets(NamedTuple):
    """The data sets of --data_path, --valid_data_path or --test_data_path, with their loss masks,
    if any."""

    datasets: list[IndexedDataset]
    masks: list[IndexedDataset | None]
    weights: list[float]


def _open_sets(config: Config, flags: Collection[str]) -> dict[str, Sets]:
    """Open these options' data sets; --loss_mask has one word per data set, over all three."""
    paths = {flag: weighted_paths(getattr(config.data, flag), flag) for flag in PATH_FLAGS}
    allow_open_files(FILES_OF_A_SET * sum(len(paths[flag]) for flag in flags) + OTHER_FILES)
    open_once = functools.cache(IndexedDataset)
    found = dict[str, Sets]()
    words = iter(config.data.loss_mask)
    for flag, weighted in paths.items():
        names = [next(words, NO_MASK) for _ in weighted]
        if flag in flags:
            datasets = [open_once(prefix) for _, prefix in weighted]
            masks = [None if name == NO_MASK else open_once(name, is_mask=True) for name in names]
            found[flag] = Sets(datasets, masks, [weight for weight, _ in weighted])
            for dataset, mask in zip(datasets, masks, strict=True):
                if mask is not None:
                    _check_same_documents(mask, dataset)
    return found


def _check_same_documents(mask: IndexedDataset, dataset: IndexedDataset) -> None:
    """Check that a loss mask (a pair with 1 for each token with a loss, else 0) has its data set's
    documents.

    Then a token and its mask have the same position in their files. 10 million documents take 0.05
    s.

    Raises: DataError: one line that names the file and the first difference.
    """
    given = f"{mask.index_path} (--loss_mask)"
    if mask.num_documents != dataset.num_documents:
        raise DataError(
            f"{given}: {mask.num_documents:,} documents, but {dataset.index_path} has {dataset.num_documents:,}; a "
            "mask has the same documents"
        )
    own, expected = (pair.sizes.read(0, pair.num_documents) for pair in (mask, dataset))
    for document in np.flatnonzero(own != expected)[:1].tolist():
        raise DataError(
            f"{given}: document {document} has {own[document]:,} entries, but {expected[document]:,} tokens in "
            f"{dataset.index_path}; a mask has an entry for each token"
        )


def _check_some_count(mask: IndexedDataset, phase: str, first: int, end: int) -> None:
    """Check that a mask keeps at least one token of documents [first, end); the first entries
    usually do.

    Raises: DataError: one line that names the file. More than `SEARCHED` zeros prove nothing.
    """
    start, stop = mask.first_token(first), mask.first_token(end)
    for place in range(start, min(stop, start + SEARCHED), READ_AT_A_TIME):
        if not masked_labels(mask.tokens, place, min(READ_AT_A_TIME, stop - place)).all():
            return
    if stop - start <= SEARCHED:
        raise DataError(
            f"{mask.tokens.path} (--loss_mask): no token of its {end - first:,} documents for {phase} counts in the "
            "loss: all entries are 0; write 1 for the tokens to learn, or leave the data set out"
        )


def samples_of_epoch(config: Config) -> int:
    """Return the samples with which training reads every token of --data_path once.

    Raises: DataError like `open_data`.
    """
    datasets, masks, _ = _open_sets(config, {"data_path"})["data_path"]
    pairs = zip(datasets, masks, strict=True)
    return sum(_stream(config, "training", 0, *pair).sampler.samples_per_epoch for pair in pairs)


def _schedule(config: Config, phase: str) -> BatchSchedule:
    """Return a phase's batch sizes: an evaluation has one size, so that its results compare over
    the run."""
    if phase == "training":
        return batch_schedule(config.batch)
    return BatchSchedule((Segment(0, config.batch.batch_size),))


def _phase(
    config: Config,
    phase: str,
    count: int | All,
    streams: list[Stream],
    fill: FillInTheMiddle | None,
    skipped: Skipped,
) -> Phase:
    """Blend `count` batches of all data sets by weight, or read each data set once from end to
    end."""
    order: Blend | Concatenation
    if count == "all":
        streams = list(
            {
                (stream.dataset, stream.mask and stream.mask.path): stream for stream in streams
            }.values()
        )
        order = Concatenation([stream.sampler.samples_per_epoch for stream in streams])
        schedule, iterations = once_through(order.num_samples, config.batch.batch_size)
    else:
        schedule, iterations = _schedule(config, phase), count
        order = Blend([1.0])
        if len(streams) > 1:
            flag = config.data.path_flag(phase)

            def place(iterations: int) -> int:
                return skipped.position(schedule.consumed_samples(iterations))

            if (samples := place(count)) > MAX_SAMPLES:
                raise UsageError(
                    f"--{flag}: a blend gives at most {MAX_SAMPLES:,} samples, not {samples:,}"
                )
            scheduled = config.data.data_weights_schedule if flag == "data_path" else ()
            first, *later = weight_stages(getattr(config.data, flag), scheduled)
            changes = [(place(start), weights) for start, weights in later]
            order = Blend(first.weights, changes if phase == "training" else ())
    reader = StreamReader(
        streams,
        order,
        config.batch.sequence_length,
        config.model.vocab_size,
        SLOW_MS,
        config.data.mask_document_starts,
        fill,
        skipped,
    )
    return Phase(reader, schedule, iterations)


def split_documents(num_documents: int, split: Sequence[float]) -> list[tuple[int, int]]:
    """Return (first, last + 1) document of training, validation and test: consecutive, in file
    order.

    split: one to three proportions with a positive sum. The rounding is Megatron-LM's (each
    boundary is the running sum of the normalised proportions times the number of documents, rounded
    half to even).
    """
    assert 1 <= len(split) <= len(PHASES) and sum(split) > 0 and min(split) >= 0, split
    weights = np.array([*split, *[0.0] * (len(PHASES) - len(split))], dtype=np.float64)
    weights /= weights.sum()
    bounds = [
        0,
        *(
            min(round(share * num_documents), num_documents)
            for share in np.cumsum(weights).tolist()
        ),
    ]
    return list(itertools.pairwise(bounds))


def _stream(
    config: Config, phase: str, key: int, dataset: IndexedDataset, mask: IndexedDataset | None
) -> Stream:
    """Cut the split of `phase` out of a data set, or take all of its own. key: of its samples'
    order."""
    data = config.data
    if dataset.num_documents == 0:
        raise DataError(f"{dataset.index_path}: an empty data set: it holds no documents")
    first = 0
    end = dataset.num_documents
    documents_of = f"{dataset.num_documents:,} documents"
    if data.path_flag(phase) == "data_path":
        first, end = split_documents(dataset.num_documents, data.split)[PHASES.index(phase)]
        split = ",".join(f"{share:g}" for share in data.split)
        documents_of = f"{end - first:,} of {documents_of}, --split={split}"
    if first == end:
        fix = f"give {phase} a larger share"
        if config.training.train_iters:
            own = "" if phase == "training" else f"--{OWN_DATA[phase]}, "
            fix += f", {own}or set --{ITERATIONS[phase]}=0"
        raise DataError(
            f"{dataset.index_path}: --split={split} leaves none of its {dataset.num_documents:,} documents for "
            f"{phase} (a text file is one document); {fix}"
        )
    if mask is not None:
        _check_some_count(mask, phase, first, end)
    documents = range(first, end)
    length = config.batch.sequence_length
    sample_order = _order(config, phase)
    entries = None if mask is None else mask.tokens
    if not data.truncate_documents:
        packed = PackedDocuments(dataset, documents, length + 1, key)
        if not packed.samples_per_epoch:
            raise DataError(
                f"{dataset.tokens.path}: none of its {end - first:,} documents for {phase} has 1 to {length + 1:,} "
                "tokens (--sequence_length + 1), and --truncate_documents=0 cuts none; write a larger "
                "--sequence_length"
            )
        return Stream(
            dataset,
            packed,
            StreamSampler(packed.samples_per_epoch + 1, 1, key, sample_order),
            entries,
        )
    order = FileOrder(dataset, documents, data.needs_borders)
    if order.num_tokens <= length:
        raise DataError(
            f"{dataset.tokens.path}: {order.num_tokens:,} tokens for {phase} ({documents_of}), but one sample needs "
            f"{length + 1:,} (--sequence_length + 1)"
        )
    if phase == "training" and data.shuffle_documents and sample_order.shuffle != "none":
        # Tables for an epoch and the next one, or for all that are shuffled together.
        keep = sample_order.epochs + 1
        order = ShuffledDocuments(
            dataset, documents, key, keep, sample_order.shuffle == "skip_first_epoch"
        )
    return Stream(
        dataset, order, StreamSampler(order.num_tokens, length, key, sample_order), entries
    )


def _order(config: Config, phase: str) -> SampleOrder:
    """Return a phase's order: validation and test use the default, so that their results
    compare."""
    data = config.data
    if phase != "training":
        return SampleOrder()
    windows = data.shuffle in ("epoch", "skip_first_epoch")
    return SampleOrder(
        data.shuffle,
        data.shuffle_era if windows else None,
        (data.max_epochs or 1) if data.shuffle == "full" else 1,
    )


def describe(
    config: Config, sets: Mapping[str, Sets], phases: dict[str, Phase], counts: Counts
) -> dict[str, str]:
    """Return lines for the banner: one per data set, in the order of the options, and one per
    phase."""
    described = {}
    for flag, (datasets, masks, _) in sets.items():
        readers = {
            name: phase
            for name, phase in phases.items()
            if config.data.path_flag(name.split("/")[0]) == flag
        }
        weights = _weights(readers, len(datasets))
        epochs = counts.epochs(config.training.train_iters) if flag == "data_path" else []
        name = PATH_FLAGS[flag]
        for number, dataset in enumerate(datasets[:MOST_DESCRIBED]):
            parts = [f"{dataset.num_documents:,} documents", f"{dataset.num_tokens:,} tokens"]
            if config.data.loss_mask:
                parts.append(
                    f"loss mask {NO_MASK if (mask := masks[number]) is None else mask.prefix}"
                )
            if len(datasets) > 1:
                parts.append(f"{100 * weights[number]:.4g}% of the samples")
                parts += [f"{epochs[number]:.3g} epochs"] if epochs else []
            described[f"{name} {number}"] = f"{dataset.prefix}: {', '.join(parts)}"
        if others := datasets[MOST_DESCRIBED:]:
            percent = 100 * sum(weights[MOST_DESCRIBED:])
            tokens = sum(dataset.num_tokens for dataset in others)
            described[f"other {name}"] = (
                f"{len(others):,} data sets: {tokens:,} tokens, {percent:.4g}% of the samples"
            )
    if changes := config.data.data_weights_schedule:
        described["data weights"] = f"change as in {' '.join(changes[:MOST_DESCRIBED])}"
    for name, phase in phases.items():
        if "/" not in name:
            described[f"{name} data"] = _phase_line(phase, counts if name == "training" else None)
    return described


def repeats(config: Config, counts: Counts, datasets: Sequence[IndexedDataset]) -> list[str]:
    """Return warnings about data sets that training reads more than four times."""
    epochs = counts.epochs(config.training.train_iters)
    many = sum(times > MANY_EPOCHS for times in epochs)
    if not many:
        return []
    others = (
        f" (and {many - 1:,} other data sets more than {MANY_EPOCHS} times)" if many > 1 else ""
    )
    prefix = datasets[epochs.index(max(epochs))].prefix
    return [
        f"training reads {prefix} {max(epochs):.3g} times{others}: repeated tokens teach less after {MANY_EPOCHS} "
        "epochs; add data, lower its weight, or train fewer iterations (--max_epochs sets a limit)"
    ]


def left_out(phases: dict[str, Phase]) -> list[str]:
    """Return warnings about documents that do not fit into a sample and cannot be cut."""
    return [
        f"{stream.dataset.prefix}: {packed.too_long:,} of {packed.num_documents:,} documents for {name} have more than "
        f"{packed.capacity:,} tokens and are left out (--truncate_documents=0)"
        for name, phase in phases.items()
        for stream in _reader(phase).streams
        if "/" not in name
        and isinstance(packed := stream.order, PackedDocuments)
        and packed.too_long
    ]


def borderless(config: Config, phases: dict[str, Phase]) -> Iterator[str]:
    """Yield warnings about data whose index seems to lack the document boundaries that flags
    need."""
    data, end = config.data, -1
    if "training" not in phases or (data.truncate_documents and not data.needs_borders):
        return
    if data.tokenizer_file is not None:
        end = load_tokenizer(data.tokenizer_file, needs_end=False).end_of_document
    for stream in _reader(phases["training"]).streams:
        dataset = stream.dataset
        count = min(READ_AT_A_TIME, dataset.num_tokens)
        ends = np.count_nonzero(dataset.tokens.read(0, count) == end)
        # A conversation's turns, which have a mask, may also end with that token.
        if dataset.num_documents == 1 or (
            stream.mask is None and ends > len(dataset.runs(0, count))
        ):
            yield (
                f"{dataset.prefix}: flags about documents see no boundaries within its {dataset.num_documents:,} "
                "documents; if a token ends documents there, write a pair with all boundaries: "
                f"prepare_data {dataset.prefix}.bin --split_documents_at=<id> --output_prefix=<another>"
            )


def beginless(config: Config, phases: dict[str, Phase]) -> Iterator[str]:
    """Yield warnings about data without the token before documents that a family needs."""
    file, family = config.data.tokenizer_file, config.training.export_model_type or ""
    if not family.startswith(NEED_BEGIN) or file is None or "training" not in phases:
        return
    tokenizer = load_tokenizer(file, needs_end=False)
    for stream in _reader(phases["training"]).streams:
        dataset = stream.dataset
        first = dataset.tokens.read(0, min(READ_AT_A_TIME, dataset.num_tokens))
        if tokenizer.begin_of_document not in (-1, *first):
            token = tokenizer.named_tokens["bos_token"]
            yield (
                f"{dataset.prefix}: {token} begins no document, and a {family} was trained with it there: without it the loss "
                f"is far higher. Write the data with prepare_data --begin_of_document='{token}'"
            )


def _reader(phase: Phase) -> StreamReader:
    assert isinstance(phase.reader, StreamReader), phase.reader
    return phase.reader


def _weights(phases: dict[str, Phase], count: int) -> list[float]:
    """Return the data sets' shares of training, or of the first phase that blends them."""
    for phase in phases.values():
        if isinstance(blend := _reader(phase).blend, Blend):
            samples = max(1, phase.schedule.consumed_samples(phase.iterations))
            return [due / samples for due in blend.due(samples)]
    return [1 / max(1, count)] * count


def _phase_line(phase: Phase, counts: Counts | None) -> str:
    """Describe what a phase reads; counts: of training, over all starts."""
    reader, samples = _reader(phase), phase.schedule.consumed_samples(phase.iterations)
    tokens = sum(stream.order.num_tokens for stream in reader.streams)
    padded = ""
    if reader.packed:
        capacity = sum(stream.sampler.samples_per_epoch for stream in reader.streams) * (
            reader.sequence_length + 1
        )
        padded = f"; whole documents, {100 * (1 - tokens / capacity):.2g}% padding"
    if not isinstance(reader.blend, Blend):
        return f"{samples:,} samples out of {tokens:,} tokens: each sample once{padded}"
    if counts is not None:
        samples = counts.schedule.consumed_samples(phase.iterations)
        epochs = counts.epochs(phase.iterations)
    else:
        sizes = [stream.sampler.samples_per_epoch for stream in reader.streams]
        epochs = [due / size for due, size in zip(reader.blend.due(samples), sizes, strict=True)]
    many = f"{min(epochs):.3g} to {max(epochs):.3g}" if len(set(epochs)) > 1 else f"{epochs[0]:.3g}"
    without = f", without samples {reader.skipped}" if reader.skipped.ranges else ""
    return f"{samples:,} samples out of {tokens:,} tokens: {many} epochs{without}{padded}"
