"""Derive the iterations of a run from a number of tokens or epochs, by what it has read and its
data."""

from __future__ import annotations

import math

from megatron_lite.config import Config, JsonObject, changed
from megatron_lite.data.counts import Counts
from megatron_lite.data.open_data import samples_of_epoch
from megatron_lite.errors import UsageError
from megatron_lite.validation import resolve
from megatron_lite.validation.rules import Note


def with_length(
    config: Config, asked: Config, began: JsonObject | None, world_size: int
) -> tuple[Config, tuple[Note, ...]]:
    """Derive the iterations from --epochs or --train_tokens, and the schedule from these; return a
    note about it.

    config: resolved, with pairs as data. asked: as typed. began: see `Choice.began`.

    Raises: DataError like `open_data`; UsageError if the schedule does not fit the iterations, or
        --skip_samples leaves none.
    """
    training = config.training
    counts = Counts(config, began)
    tokens, goal = training.train_tokens, f"--train_tokens={training.train_tokens}"
    if training.epochs is not None:
        samples = samples_of_epoch(config)
        read = counts.skipped.kept(math.ceil(training.epochs * samples))
        tokens = read * config.batch.sequence_length
        goal = f"--epochs={training.epochs:g}, of {samples:,} samples each"
    if tokens is None:
        return config, ()
    if not tokens:
        raise UsageError(f"{goal}: --skip_samples={counts.skipped} leaves none; write more epochs")
    iterations = counts.iterations_of(tokens)
    try:
        found = resolve(changed(asked, {"train_iters": iterations}), world_size, nodes=0)
    except UsageError as error:
        raise UsageError(f"{goal}: {error}") from None
    derived = {
        **vars(found.learning_rate),
        "train_iters": iterations,
        "log_interval": found.run.log_interval,
    }
    return changed(config, derived), (
        Note(f"{goal}: --train_iters={iterations}, after {tokens:,} tokens or more"),
    )
