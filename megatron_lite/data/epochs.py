"""How often a run reads its data: lines of the banner, warnings, and the limit of --max_epochs."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

from megatron_lite.config import Config
from megatron_lite.data.blending import Blend
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.loader import Phase
from megatron_lite.data.reading import StreamReader
from megatron_lite.errors import UsageError

MOST_DESCRIBED = 20  # data sets with a line of their own in the banner
# Up to four epochs, repeated tokens are worth nearly as much as new ones; then their value falls fast. Source:
# Muennighoff et al. 2023, "Scaling Data-Constrained Language Models".
MANY_EPOCHS = 4


def epochs_of(phase: Phase, iterations: int) -> list[float]:
    """Return how often each data set is read in the first iterations of a phase; [1.0, ...] if each is read once."""
    reader, samples = phase.reader, phase.schedule.consumed_samples(iterations)
    assert isinstance(reader, StreamReader), reader
    if not isinstance(reader.blend, Blend):
        return [1.0] * len(reader.streams)
    return [
        due / stream.sampler.samples_per_epoch
        for due, stream in zip(reader.blend.due(samples), reader.streams, strict=True)
    ]


def check_epochs(config: Config, training: Phase) -> None:
    """Check --max_epochs.

    Raises: UsageError, which names the data set that is read most often, and the number of iterations that is allowed.
    """
    limit = config.data.max_epochs
    if limit is None or max(epochs_of(training, training.iterations)) <= limit:
        return

    def most_epochs(iterations: int) -> int:
        return math.ceil(max(epochs_of(training, iterations)))

    refused = bisect.bisect_right(range(training.iterations), limit, key=most_epochs)
    epochs = epochs_of(training, training.iterations)
    assert isinstance(training.reader, StreamReader)
    prefix = training.reader.streams[epochs.index(max(epochs))].dataset.prefix
    raise UsageError(
        f"--max_epochs={limit}, --train_iters={training.iterations}: {prefix} would be read {max(epochs):.4g} times; "
        f"write --train_iters={refused - 1} or less, a larger --max_epochs, or add data"
    )


def describe(config: Config, datasets: Sequence[IndexedDataset], phases: dict[str, Phase]) -> dict[str, str]:
    """Return lines for the banner: one per data set, in the order of --data_path, and one per phase."""
    described = {}
    training, weights = phases.get("training"), _weights(phases, len(datasets))
    epochs = None if training is None else epochs_of(training, training.iterations)
    for number, dataset in enumerate(datasets[:MOST_DESCRIBED]):
        parts = [f"{dataset.num_documents:,} documents", f"{dataset.num_tokens:,} tokens"]
        if config.data.loss_mask:
            parts.append(f"loss mask {config.data.loss_mask[number]}")
        if len(datasets) > 1:
            parts.append(f"{100 * weights[number]:.4g}% of the samples")
            parts += [] if epochs is None else [f"{epochs[number]:.3g} epochs"]
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
    if (training := phases.get("training")) is None:
        return []
    assert isinstance(training.reader, StreamReader)
    epochs = epochs_of(training, training.iterations)
    many = [number for number, times in enumerate(epochs) if times > MANY_EPOCHS]
    if not many:
        return []
    worst = max(many, key=epochs.__getitem__)
    others = f" (and {len(many) - 1:,} other data sets more than {MANY_EPOCHS} times)" if len(many) > 1 else ""
    prefix = training.reader.streams[worst].dataset.prefix
    return [
        f"training reads {prefix} {epochs[worst]:.3g} times{others}: repeated tokens teach less after {MANY_EPOCHS} "
        "epochs; add data, lower its weight, or train fewer iterations (--max_epochs sets a limit)"
    ]


def left_out(phases: dict[str, Phase]) -> list[str]:
    """Return warnings about documents that do not fit into a sample and cannot be cut."""
    found = []
    for name, phase in phases.items():
        streams = phase.reader.streams if isinstance(phase.reader, StreamReader) and "/" not in name else ()
        for stream in streams:
            if (packed := stream.packed) is not None and packed.too_long:
                found.append(
                    f"{stream.dataset.prefix}: {packed.too_long:,} of {packed.num_documents:,} documents for {name} "
                    f"have more than {packed.capacity:,} tokens and are left out (--truncate_documents=0)"
                )
    return found


def _weights(phases: dict[str, Phase], count: int) -> list[float]:
    """Return the shares of the data sets in the samples of training, or of the first phase that blends them."""
    for phase in phases.values():
        if isinstance(phase.reader, StreamReader) and isinstance(phase.reader.blend, Blend):
            samples = max(1, phase.schedule.consumed_samples(phase.iterations))
            return [due / samples for due in phase.reader.blend.due(samples)]
    return [1 / max(1, count)] * count


def _phase_line(phase: Phase) -> str:
    reader, samples = phase.reader, phase.schedule.consumed_samples(phase.iterations)
    assert isinstance(reader, StreamReader), reader
    tokens = sum(stream.num_tokens for stream in reader.streams)
    padded = ""
    if reader.packed:
        capacity = sum(stream.sampler.samples_per_epoch for stream in reader.streams) * (reader.sequence_length + 1)
        padded = f"; whole documents, {100 * (1 - tokens / capacity):.2g}% padding"
    if not isinstance(reader.blend, Blend):
        return f"{samples:,} samples out of {tokens:,} tokens: each sample once{padded}"
    epochs = epochs_of(phase, phase.iterations)
    many = f"{min(epochs):.3g} to {max(epochs):.3g}" if len(set(epochs)) > 1 else f"{epochs[0]:.3g}"
    return f"{samples:,} samples out of {tokens:,} tokens: {many} epochs{padded}"
