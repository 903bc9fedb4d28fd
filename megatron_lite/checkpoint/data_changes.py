"""Refuse to resume with other data, another tokenizer or another seed than the checkpoint's, unless that is allowed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.config import Config, DataConfig
from megatron_lite.config.structured_values import WeightStage, weight_stages, weighted_paths
from megatron_lite.config.values import abridged, written
from megatron_lite.errors import CheckpointError, RunError

_MOST_LINES = 20


def check_data(loaded: Manifest, config: Config, identity: dict[str, Any], where: str) -> list[str]:
    """Return the differences of data, tokenizer and seed, a line each, if --allow_data_change=1 allows them.

    Args:
        identity: of the current data, see `data.fingerprint.identity`.
        where: folder of the checkpoint, for the message.

    Raises:
        CheckpointError: names the differences with both values.
    """
    changes = [] if config.training.train_iters == 0 else list(data_changes(loaded, config, identity))
    if len(changes) > _MOST_LINES:
        changes = [*changes[:_MOST_LINES], f"and {len(changes) - _MOST_LINES:,} more"]
    if changes and not config.checkpoint.allow_data_change:
        raise CheckpointError(
            f"checkpoint {where} was trained with other data: a resumed run would read some of it again and leave some "
            "out. Restore what differs, choose another --experiment_dir, or write --allow_data_change=1:\n  "
            + "\n  ".join(changes)
        )
    return changes


def data_changes(loaded: Manifest, config: Config, identity: dict[str, Any]) -> Iterator[str]:
    """Yield what differs in the samples that a run reads, with both values. A path that moved is no difference."""
    saved, now = loaded.config, {"dataset_source": config.data.dataset_source, "seed": config.distributed.seed}
    for name, value in now.items():
        if saved.get(name, value) != value:
            yield f"--{name}: {saved[name]} in the checkpoint, {value} now"
    yield from _order_changes(saved, config)
    before = loaded.state.get("data")
    if before is None or not before["sets"] or not identity["sets"]:
        return  # random tokens, or a checkpoint of an older version
    split = saved.get("split", config.data.split)
    if not _same_shares(split, config.data.split):
        yield f"--split: {written(tuple(split))} in the checkpoint, {written(config.data.split)} now"
    saved_stages = _stages(saved.get("data_path", ()), saved.get("data_weights_schedule", ()), loaded.iteration)
    stages = _stages(config.data.data_path, config.data.data_weights_schedule, loaded.iteration)
    if not _same_weights(saved_stages[1:], stages[1:]):
        old_schedule = tuple(saved.get("data_weights_schedule", ()))
        yield (
            f"--data_weights_schedule: {abridged(old_schedule) or 'none'} in the checkpoint, "
            f"{abridged(config.data.data_weights_schedule) or 'none'} now, in the iterations that are done"
        )
    pairs = itertools.zip_longest(
        _sets(saved.get("data_path", ()), saved_stages, before["sets"]),
        _sets(config.data.data_path, stages, identity["sets"]),
    )
    for number, (old, new) in enumerate(pairs):
        if old is None or new is None or old[1] != new[1] or not math.isclose(old[2], new[2]):
            yield f"data set {number}: {_described(old)} in the checkpoint, {_described(new)} now"
    masks = itertools.zip_longest(before.get("masks", ()), identity.get("masks", ()))
    for number, (old_mask, mask) in enumerate(masks):
        if old_mask != mask:
            described = [f"fingerprint {mark}" if mark else "none" for mark in (old_mask, mask)]
            yield f"--loss_mask of data set {number}: {described[0]} in the checkpoint, {described[1]} now"
    old_tokenizer, tokenizer = before["tokenizer"], identity["tokenizer"]
    if None not in (old_tokenizer, tokenizer) and old_tokenizer != tokenizer:
        files = f"{saved.get('tokenizer_file')} (digest {old_tokenizer})", f"{config.data.tokenizer_file} ({tokenizer})"
        yield f"--tokenizer_file: {files[0]} in the checkpoint, {files[1]} now"


def _order_changes(saved: dict[str, Any], config: Config) -> Iterator[str]:
    """Yield the options of the order of samples that differ; a checkpoint without them has the defaults."""
    defaults, current = vars(DataConfig()), vars(config.data)
    names = ["shuffle", "shuffle_era", "shuffle_documents", "truncate_documents"]
    if "full" in (saved.get("shuffle"), config.data.shuffle):
        names.append("max_epochs")
    for name in names if config.data.dataset_source != "random" else ():
        before = saved.get(name, defaults[name])
        if before != current[name]:
            yield f"--{name}: {abridged(before) or 'none'} in the checkpoint, {abridged(current[name]) or 'none'} now"


def _stages(data_path: Sequence[str], schedule: Sequence[str], iterations: int) -> tuple[WeightStage, ...]:
    """Return the weights in the iterations that are done; those of a manifest that contradicts itself are unknown."""
    try:
        stages = weight_stages(data_path, schedule) if data_path else ()
    except RunError:
        stages = ()
    return tuple(stage for stage in stages if stage.start < max(iterations, 1))


def _same_weights(left: Sequence[WeightStage], right: Sequence[WeightStage]) -> bool:
    return len(left) == len(right) and all(
        a.start == b.start and all(math.isclose(x, y) for x, y in zip(a.weights, b.weights, strict=False))
        for a, b in zip(left, right, strict=True)
    )


def _sets(
    data_path: Sequence[str], stages: Sequence[WeightStage], rows: Sequence[Sequence[Any]]
) -> list[tuple[str, list[Any], float]]:
    """Return (path, row, first weight) of each data set, without the paths of a manifest that contradicts itself."""
    weights = stages[0].weights if stages else ()
    paths = [path for _, path in weighted_paths(data_path)] if stages else []
    if len(paths) != len(rows):
        weights, paths = (1.0 / len(rows),) * len(rows), ["a data set"] * len(rows)
    return [(path, list(row), weight) for path, row, weight in zip(paths, rows, weights, strict=True)]


def _described(item: tuple[str, list[Any], float] | None) -> str:
    if item is None:
        return "none"
    path, (documents, tokens, dtype, fingerprint), weight = item
    share = f", {100 * weight:.4g}% of the samples" if weight != 1 else ""
    return f"{path} ({documents:,} documents, {tokens:,} tokens, {dtype}, fingerprint {fingerprint}{share})"


def _same_shares(left: Sequence[float], right: Sequence[float]) -> bool:
    """Whether two --split give every phase the same share."""
    pairs = itertools.zip_longest(left, right, fillvalue=0.0)
    return all(math.isclose(a * sum(right), b * sum(left)) for a, b in pairs)
