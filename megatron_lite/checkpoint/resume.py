"""Resume a run from its newest good checkpoint: shards, optimizer state and sums; log what has changed since."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_lite.checkpoint import compatibility, reading
from megatron_lite.checkpoint.choice import Choice, set_aside
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.config import Config
from megatron_lite.distributed.agreement import together
from megatron_lite.optimizer.optimizer import Optimizer

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed
    from megatron_lite.zero.multi_stage import MultiStage


class Resumed(NamedTuple):
    """Where training starts."""

    iteration: int  # iterations done
    evaluation_due: bool = False  # whether their evaluation is still due
    folder: Path | None = None  # the checkpoint; None: the initial or pretrained weights


def check_early(choice: Choice, config: Config, data: dict[str, Any]) -> None:
    """Reject a checkpoint of another architecture or other data before memory is allocated, on rank 0.

    data: see `data.fingerprint.identity`.

    Raises:
        CheckpointError: if the newest checkpoint with a good manifest does not fit.
    """
    if choice.newest is not None:
        folder, content = choice.newest
        compatibility.check_architecture(content.config, config, str(folder))
        compatibility.check_data(content, config, data, str(folder))


def resume(
    choice: Choice,
    root: Path | None,
    config: Config,
    model: MultiStage,
    optimizer: Optimizer,
    load_sums: Callable[[dict[str, Any]], None],
    data: dict[str, Any],
    distributed: Distributed,
    logger: logging.Logger,
    check: Callable[[], None] = lambda: None,
) -> Resumed | None:
    """Load the newest good checkpoint of a choice; all ranks call this together. None: there is no checkpoint.

    root: the folder of the run's own checkpoints. load_sums: restores the running sums of the log. data: see
    `data.fingerprint.identity`. check: rank 0 calls it before it moves anything; see `writing.Save`.
    """
    where, rule = choice.found[0][1].parent if choice.found else None, config.optimizer.optimizer
    found = reading.load_first_good(choice.found, where, model, distributed, logger.warning, rule)
    if found is None:
        return None
    folder, loaded = found
    compatibility.check_architecture(loaded.config, config, str(folder))
    other_data = compatibility.check_data(loaded, config, data, str(folder))
    model.invalidate()
    saved_by = compatibility.saved_optimizer(loaded.config)
    optimizer.load_state(compatibility.optimizer_state(loaded.state, saved_by, config.optimizer.optimizer))
    load_sums(loaded.state["window"])
    logger.info("resumed from %s at iteration %d%s", folder, loaded.iteration, _other_ranks(loaded, distributed))
    if choice.note:
        logger.warning(choice.note)
    if choice.goes_back and root is not None:
        _set_aside(root, loaded.iteration, check, distributed, logger)
    if config.averaging.enabled and optimizer.averaging.updates == 0:
        logger.info("  averaging (--ema_type=%s) begins now, from these weights", config.averaging.ema_type)
    for change in other_data:
        logger.warning("  allowed by --allow_data_change=1: %s", change)
    _log_changes(loaded, config, logger)
    return Resumed(loaded.iteration, loaded.state.get("evaluation_due", False), folder)


def _other_ranks(loaded: Manifest, distributed: Distributed) -> str:
    """Return a line ending that names the ranks that saved a checkpoint; empty if the layout is the same."""
    saved, current = loaded.tensor_parallel, distributed.tensor.world_size
    if (loaded.world_size, saved) == (distributed.world_size, current):
        return ""
    divided = "" if saved == current else f" with --tensor_parallel={saved}"
    return f", saved by {loaded.world_size} rank{'s' * (loaded.world_size > 1)}{divided}"


def _set_aside(
    root: Path, iteration: int, check: Callable[[], None], distributed: Distributed, logger: logging.Logger
) -> None:
    """Move checkpoints after `iteration` away, so that no later start resumes from them."""

    def move() -> Path | None:
        if distributed.rank != 0:
            return None
        check()
        return set_aside(root, iteration)

    moved = together(distributed, move)
    if moved is not None:
        logger.warning("  newer checkpoints were moved to %s; delete them when they are not needed", moved)


def _log_changes(loaded: Manifest, config: Config, logger: logging.Logger) -> None:
    """Log how the configuration differs from the checkpoint's."""
    for difference in compatibility.differences(loaded.config, config, compatibility.DATA, None):
        logger.info("  changed since that checkpoint (the command line wins): %s", difference)
    for moved in (compatibility.moved_samples, compatibility.moved_rate):
        if (warning := moved(loaded.config, config, loaded.iteration)) is not None:
            logger.warning(warning)
    for line in compatibility.schedule_table(loaded.config, config, loaded.iteration):
        logger.info("  %s", line)
