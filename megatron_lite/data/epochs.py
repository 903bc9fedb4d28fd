"""How often a run reads its data: lines of the banner, warnings, and the limit of --max_epochs."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from megatron_lite.config import Config
from megatron_lite.data.blending import Blend
from megatron_lite.data.document_orders import PackedDocuments
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.loader import Phase
from megatron_lite.data.reading import StreamReader
from megatron_lite.errors import UsageError
from megatron_lite.schedules.batch_size import BatchSchedule

MOST_DESCRIBED = 20  # data sets with a line of their own in the banner
# Up to four epochs, repeated tokens are worth nearly as much as new ones; then their value falls fast. Source:
# Muennighoff et al. 2023, "Scaling Data-Constrained Language Models".
MANY_EPOCHS = 4


def epochs_of(reader: StreamReader, samples: int) -> list[float]:
    """Return how often the first `samples` of a blend read each data set."""
    assert isinstance(reader.blend, Blend), reader.blend
    sizes = (stream.sampler.samples_per_epoch for stream in reader.streams)
    return [due / size for due, size in zip(reader.blend.due(samples), sizes, strict=True)]


def check_epochs(config: Config, reader: StreamReader, schedule: BatchSchedule) -> None:
    """Check --max_epochs.

    Raises: UsageError, which names the data set that is read most often, and the number of iterations that is allowed.
    """
    limit, iterations = config.data.max_epochs, config.training.train_iters

    def most_epochs(iterations: int) -> float:
        return max(epochs_of(reader, schedule.consumed_samples(iterations)))

    if limit is None or most_epochs(iterations) <= limit:
        return
    refused = bisect.bisect_right(range(iterations), float(limit), key=most_epochs)
    epochs = epochs_of(reader, schedule.consumed_samples(iterations))
    prefix = reader.streams[epochs.index(max(epochs))].dataset.prefix
    raise UsageError(
        f"--max_epochs={limit}, --train_iters={iterations}: {prefix} would be read {max(epochs):.4g} times; "
        f"write --train_iters={refused - 1} or less, a larger --max_epochs, or add data"
    )


def describe(config: Config, datasets: Sequence[IndexedDataset], phases: dict[str, Phase]) -> dict[str, str]:
    """Return lines for the banner: one per data set, in the order of --data_path, and one per phase."""
    described, weights, epochs = {}, _weights(phases, len(datasets)), _training_epochs(phases)
    for number, dataset in enumerate(datasets[:MOST_DESCRIBED]):
        parts = [f"{dataset.num_documents:,} documents", f"{dataset.num_tokens:,} tokens"]
        if config.data.loss_mask:
            parts.append(f"loss mask {config.data.loss_mask[number]}")
        if len(datasets) > 1:
            parts.append(f"{100 * weights[number]:.4g}% of the samples")
            parts += [f"{epochs[number]:.3g} epochs"] if epochs else []
        described[f"data {number}"] = f"{dataset.prefix}: {', '.join(parts)}"
    if others := datasets[MOST_DESCRIBED:]:
        percent = 100 * sum(weights[MOST_DESCRIBED:])
        tokens = sum(dataset.num_tokens for dataset in others)
        described["other data"] = f"{len(others):,} data sets: {tokens:,} tokens, {percent:.4g}% of the samples"
    if changes := config.data.data_weights_schedule:
        described["data weights"] = f"change as in {' '.join(changes[:MOST_DESCRIBED])}"
    for name, phase in phases.items():
        if "/" not in name:
            described[f"{name} data"] = _phase_line(phase)
    return described


def repeats(phases: dict[str, Phase]) -> list[str]:
    """Return warnings about data sets that training reads more than four times."""
    epochs = _training_epochs(phases)
    many = [number for number, times in enumerate(epochs) if times > MANY_EPOCHS]
    if not many:
        return []
    worst = max(many, key=epochs.__getitem__)
    others = f" (and {len(many) - 1:,} other data sets more than {MANY_EPOCHS} times)" if len(many) > 1 else ""
    prefix = _reader(phases["training"]).streams[worst].dataset.prefix
    return [
        f"training reads {prefix} {epochs[worst]:.3g} times{others}: repeated tokens teach less after {MANY_EPOCHS} "
        "epochs; add data, lower its weight, or train fewer iterations (--max_epochs sets a limit)"
    ]


def left_out(phases: dict[str, Phase]) -> list[str]:
    """Return warnings about documents that do not fit into a sample and cannot be cut."""
    return [
        f"{stream.dataset.prefix}: {packed.too_long:,} of {packed.num_documents:,} documents for {name} have more than "
        f"{packed.capacity:,} tokens and are left out (--truncate_documents=0)"
        for name, phase in phases.items()
        for stream in _reader(phase).streams
        if "/" not in name and isinstance(packed := stream.order, PackedDocuments) and packed.too_long
    ]


def _reader(phase: Phase) -> StreamReader:
    assert isinstance(phase.reader, StreamReader), phase.reader
    return phase.reader


def _training_epochs(phases: dict[str, Phase]) -> list[float]:
    """Return how often training reads each data set; empty if there is no training."""
    if (training := phases.get("training")) is None:
        return []
    return epochs_of(_reader(training), training.schedule.consumed_samples(training.iterations))


def _weights(phases: dict[str, Phase], count: int) -> list[float]:
    """Return the shares of the data sets in the samples of training, or of the first phase that blends them."""
    for phase in phases.values():
        if isinstance(blend := _reader(phase).blend, Blend):
            samples = max(1, phase.schedule.consumed_samples(phase.iterations))
            return [due / samples for due in blend.due(samples)]
    return [1 / max(1, count)] * count


def _phase_line(phase: Phase) -> str:
    reader, samples = _reader(phase), phase.schedule.consumed_samples(phase.iterations)
    tokens = sum(stream.order.num_tokens for stream in reader.streams)
    padded = ""
    if reader.packed:
        capacity = sum(stream.sampler.samples_per_epoch for stream in reader.streams) * (reader.sequence_length + 1)
        padded = f"; whole documents, {100 * (1 - tokens / capacity):.2g}% padding"
    if not isinstance(reader.blend, Blend):
        return f"{samples:,} samples out of {tokens:,} tokens: each sample once{padded}"
    epochs = epochs_of(reader, samples)
    many = f"{min(epochs):.3g} to {max(epochs):.3g}" if len(set(epochs)) > 1 else f"{epochs[0]:.3g}"
    return f"{samples:,} samples out of {tokens:,} tokens: {many} epochs{padded}"
