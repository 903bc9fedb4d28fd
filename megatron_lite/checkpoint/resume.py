"""Resume a run from its newest good checkpoint: the shards, the state beside them, and the differences in the log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron_lite.checkpoint import compatibility, sharded
from megatron_lite.checkpoint.manifest import Manifest
from megatron_lite.config import Config
from megatron_lite.optimizer.optimizer import Optimizer

if TYPE_CHECKING:
    from megatron_lite.distributed.process_group import Distributed
    from megatron_lite.zero.multi_stage import MultiStage


class Sums(Protocol):
    """Running sums of the log."""

    def load_state(self, state: dict[str, Any]) -> None: ...


def has_checkpoint(root: Path | None, config: Config) -> bool:
    """Whether `root` has a checkpoint, good or not; refuse a changed architecture before memory is allocated."""
    if root is None:
        return False
    if (newest := sharded.newest_config(root)) is not None:
        iteration, saved = newest
        compatibility.check_architecture(saved, config, str(root / str(iteration)))
    return bool(sharded.find(root))


def resume(
    root: Path | None,
    config: Config,
    model: MultiStage,
    optimizer: Optimizer,
    sums: Sums,
    distributed: Distributed,
    logger: logging.Logger,
) -> tuple[int, bool] | None:
    """Load the newest good checkpoint; all ranks call this together.

    Returns:
        The iterations done, and whether an evaluation after them is due; None without a checkpoint.
    """
    if root is None:
        return None
    found = sharded.load_newest(root, model, distributed, logger.warning, config.optimizer.optimizer)
    if found is None:
        return None
    folder, loaded = found
    compatibility.check_architecture(loaded.config, config, str(folder))
    model.invalidate()
    saved_by = compatibility.saved_optimizer(loaded.config)
    optimizer.load_state(compatibility.optimizer_state(loaded.state, saved_by, config.optimizer.optimizer))
    sums.load_state(loaded.state["window"])
    resharded = "" if loaded.world_size == distributed.world_size else f", saved by {loaded.world_size} ranks"
    logger.info("resumed from %s at iteration %d%s", folder, loaded.iteration, resharded)
    if config.averaging.enabled and optimizer.averaging.updates == 0:
        logger.info("  averaging (--ema_type=%s) begins now, from these weights", config.averaging.ema_type)
    _log_changes(loaded, config, logger)
    return loaded.iteration, loaded.state.get("evaluation_due", False)


def _log_changes(loaded: Manifest, config: Config, logger: logging.Logger) -> None:
    """Log how the configuration differs from that of the run that saved a checkpoint."""
    for difference in compatibility.differences(loaded.config, config):
        logger.info("  changed since that checkpoint (the command line wins): %s", difference)
    for moved in (compatibility.moved_samples, compatibility.moved_rate):
        if (warning := moved(loaded.config, config, loaded.iteration)) is not None:
            logger.warning(warning)
