"""Resume a run: choose the checkpoints to try, load the newest good one, log the changes since.

The choice follows --load_policy, --load_checkpoint_path and --resume_iteration. The run's own
checkpoints come first, so that repeating a command always resumes; another folder's are used only
until the run has one of its own. After --resume_iteration, newer checkpoints are set aside by a
rename: no later start resumes from them, and nothing is deleted.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from megatron_lite.checkpoint import compatibility, reading
from megatron_lite.checkpoint.frozen_base import check_base
from megatron_lite.checkpoint.history import History, counts_of, history_of
from megatron_lite.checkpoint.manifest import Manifest, read
from megatron_lite.checkpoint.names import MANIFEST_NAME, find_checkpoints, no_folder, reason
from megatron_lite.config import Config, JsonObject
from megatron_lite.config.dimensions import OF_A_SAMPLE
from megatron_lite.config.source import CheckpointConfig
from megatron_lite.config.values import counted
from megatron_lite.distributed.agreement import rank_0_works, together
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.errors import CheckpointError, DamagedError, StorageError
from megatron_lite.optimizer.optimizer import Optimizer
from megatron_lite.run.durable_files import sync_folder
from megatron_lite.zero.multi_stage import MultiStage

SET_ASIDE = "set_aside"
_FLAG = "--load_checkpoint_path"
# Remote iterations that a start may use, with the manifests read to determine this; see `Mirror`.
Mirrored = Mapping[int, Manifest | None]


@dataclass(frozen=True)
class Choice:
    """Checkpoints to try, newest first; none for a fresh run."""

    found: tuple[tuple[int, Path], ...] = ()
    goes_back: bool = False  # whether --resume_iteration returns to an older checkpoint
    note: str = ""  # for the log
    mirrored: Mirrored = field(default_factory=dict)  # on rank 0

    @cached_property
    def newest(self) -> tuple[Path, Manifest] | None:
        """Folder and manifest of the newest checkpoint with a good manifest, local or mirrored;
        read once."""
        for iteration, folder in self.found:
            with contextlib.suppress(DamagedError):
                return folder, read(folder, iteration)
            if (content := self.mirrored.get(iteration)) is not None:
                return folder, content
        return None

    @property
    def began(self) -> JsonObject | None:
        """The newest checkpoint's record of the data that the run was trained on
        (`data.fingerprint.identity`), its `config`, `iteration`, `counts` and commits (`pinned`);
        None before the first iteration."""
        if self.newest is None or not self.newest[1].iteration:
            return None
        content = self.newest[1]
        facts = {
            "config": content.config,
            "iteration": content.iteration,
            "counts": counts_of(content),
            "pinned": content.state.get("pinned", {}),
        }
        return {**content.state.get("data", {}), **facts}


def find(root: Path) -> list[tuple[int, Path]]:
    """List (iteration, folder) like `names.find_checkpoints`; raise CheckpointError if `root`
    cannot be read."""
    try:
        return find_checkpoints(root)
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoints in {root}: {reason(error)}") from None


def choose_together(
    root: Path | None, options: CheckpointConfig, distributed: Distributed, mirrored: Mirrored
) -> Choice:
    """Choose on rank 0, for all ranks; see `choose`."""
    choice = together(
        distributed, lambda: choose(root, options, mirrored) if distributed.rank == 0 else Choice()
    )
    paths = [(iteration, str(folder)) for iteration, folder in choice.found]
    found, goes_back, note = distributed.broadcast_object((paths, choice.goes_back, choice.note))
    return Choice(
        tuple((iteration, Path(folder)) for iteration, folder in found), goes_back, note, mirrored
    )


def choose(
    root: Path | None, options: CheckpointConfig, mirrored: Mirrored = MappingProxyType({})
) -> Choice:
    """Choose the checkpoints for a start; `root` contains the run's own, or gets them from the
    mirror.

    Raises:
        CheckpointError: if the options require one that does not exist, or forbid existing ones.
    """
    here, wanted = [] if root is None else find(root), options.resume_iteration
    missing = (
        []
        if root is None
        else [(one, root / str(one)) for one in mirrored.keys() - {one for one, _ in here}]
    )
    own = sorted([*here, *missing], key=lambda item: item[0], reverse=True)
    if own and options.load_policy == "never":
        place = root if here else f"--mirror={options.mirror}"
        raise CheckpointError(
            f"--load_policy=never: {place} has checkpoints, the newest of iteration {own[0][0]:,}, and a run that "
            "starts from scratch there would mix two runs; choose another --experiment_dir, or move that folder away"
        )
    if own:
        if wanted is None or own[0][0] <= wanted:
            return Choice(_only(own, wanted, root))
        newest = Choice(tuple(own), mirrored=mirrored).newest
        if (
            newest
            and newest[1].iteration > wanted
            and newest[1].config.get("resume_iteration") == wanted
        ):
            note = (
                f"--resume_iteration={wanted} was followed by an earlier start: the run continues from {newest[0]}; "
                "to go back again, move that folder away"
            )
            return Choice(tuple(own), note=note)
        return Choice(_only(own, wanted, root), goes_back=True)
    if options.load_checkpoint_path is not None:
        path = Path(options.load_checkpoint_path)
        return Choice(_only(_elsewhere(path), wanted, path))
    if wanted is not None:
        _only([], wanted, root)
    if options.load_policy == "require":
        where = "without --experiment_dir" if root is None else f"in {root}"
        raise CheckpointError(
            f"--load_policy=require: no checkpoint is there {where}; leave the flag out to start from scratch"
        )
    return Choice()


def set_aside(root: Path, iteration: int) -> Path | None:
    """Move the checkpoints after `iteration` to a new folder root/set_aside/<n>; return it, or None
    without any.

    Raises:
        CheckpointError: if `root` cannot be read.
        StorageError: if the file system refuses to move them.
    """
    newer = [folder for found, folder in find(root) if found > iteration]
    if not newer:
        return None
    parent = root / SET_ASIDE
    try:
        parent.mkdir(exist_ok=True)
        numbers = [int(path.name) for path in parent.iterdir() if path.name.isdecimal()]
        target = parent / str(max(numbers, default=0) + 1)
        target.mkdir()
        for folder in newer:
            os.rename(folder, target / folder.name)
        for changed in (target, parent, root):
            sync_folder(changed)
    except OSError as error:
        raise StorageError(
            f"cannot move the checkpoints after iteration {iteration} to {parent}: {reason(error)}; make the folder "
            "writable, or move them yourself"
        ) from error
    return target


def _only(
    found: list[tuple[int, Path]], wanted: int | None, where: Path | None
) -> tuple[tuple[int, Path], ...]:
    chosen = tuple(item for item in found if wanted in (None, item[0]))
    if not chosen:
        there = ", ".join(
            str(iteration) for iteration in sorted({iteration for iteration, _ in found})[-20:]
        )
        raise CheckpointError(
            f"--resume_iteration={wanted}: there is no checkpoint of this iteration in {where}; "
            + (
                f"write one of these: {there}"
                if there
                else "it has none; leave the flag out to start from scratch"
            )
        )
    return chosen


def _elsewhere(folder: Path) -> list[tuple[int, Path]]:
    """List the checkpoints in --load_checkpoint_path: a checkpoint, a folder of them, or an
    experiment directory."""
    try:
        if (folder / MANIFEST_NAME).exists():
            return [(read(folder).iteration, folder)]
    except DamagedError as error:
        raise CheckpointError(f"{_FLAG}={folder}: {error}; restore it, or give another") from None
    except OSError as error:
        raise CheckpointError(
            f"{_FLAG}={folder}: {reason(error)}; give a folder that can be read"
        ) from None
    found = find(folder) or find(folder / "checkpoints")
    if not found:
        raise CheckpointError(
            f"{_FLAG}={folder}: {no_folder(folder) or 'no checkpoint is there'}; give a checkpoint, a folder of "
            "checkpoints or an experiment directory"
        )
    return found


# -- resuming
# ---------------------------------------------------------------------------------------------------------


class Resumed(NamedTuple):
    """Where training starts."""

    iteration: int  # iterations done
    origin: JsonObject  # see `huggingface.origin`
    counts: JsonObject  # see `data.counts`
    evaluation_due: bool = False  # whether an evaluation at this checkpoint is still due
    folder: Path | None = None  # the checkpoint; None: the initial or pretrained weights
    best: JsonObject | None = None  # see `BestEvaluation`
    history: History | None = None  # None: a new run begins


def check_early(choice: Choice, config: Config, data: JsonObject) -> None:
    """Reject a checkpoint with another architecture or other data before memory is allocated, on
    rank 0.

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
    load_sums: Callable[[JsonObject], None],
    data: JsonObject,
    distributed: Distributed,
    logger: logging.Logger,
    leave: Callable[[int], None] = lambda iteration: None,
    repair: Callable[[int], bool | None] = lambda iteration: None,
    base: str = "",
) -> Resumed | None:
    """Load the newest good checkpoint of a choice, or return None without any. Collective.

    root: the folder of the run's own checkpoints. load_sums: restores the log's running sums. data:
    see `data.fingerprint.identity`. leave: called on rank 0, with the iteration to go back to,
    before newer checkpoints are set aside. repair: see `reading.load_first_good`. base: see
    `frozen_base`.
    """
    where, rule = choice.found[0][1].parent if choice.found else None, config.optimizer.optimizer
    found = reading.load_first_good(
        choice.found, where, model, distributed, logger.warning, rule, repair
    )
    if found is None:
        return None
    folder, loaded = found
    compatibility.check_architecture(loaded.config, config, str(folder))
    again = "give the folder (--pretrained_checkpoint_path) and the --training_dtype of before"
    fix = f"{again}, or choose another --experiment_dir"
    check_base(loaded.state, base, str(folder), fix)
    other_data = compatibility.check_data(loaded, config, data, str(folder))
    model.invalidate()
    saved_by = compatibility.saved_optimizer(loaded.config)
    optimizer.load_state(
        compatibility.optimizer_state(loaded.state, saved_by, config.optimizer.optimizer)
    )
    load_sums(loaded.state["window"])
    logger.info(
        "resumed from %s at iteration %d%s",
        folder,
        loaded.iteration,
        _other_ranks(loaded, distributed),
    )
    if choice.note:
        logger.warning(choice.note)
    if choice.goes_back and root is not None:

        def move() -> str | None:
            leave(loaded.iteration)
            moved = set_aside(root, loaded.iteration)
            return None if moved is None else str(moved)

        if (moved := rank_0_works(distributed, move)) is not None:
            logger.warning(
                "  newer checkpoints were moved to %s; delete them when they are not needed", moved
            )
    if config.averaging.enabled and optimizer.averaging.updates == 0:
        logger.info(
            "  averaging (--ema_type=%s) begins now, from these weights", config.averaging.ema_type
        )
    for change in other_data:
        logger.warning("  allowed by --allow_data_change=1: %s", change)
    _log_changes(loaded, config, data, logger)
    state, is_own = loaded.state, folder.parent == root
    history = history_of(loaded) if is_own else None
    due, origin = state.get("evaluation_due", False), state.get("origin", {})
    return Resumed(
        loaded.iteration, origin, counts_of(loaded), due, folder, state.get("best"), history
    )


def _other_ranks(loaded: Manifest, distributed: Distributed) -> str:
    """Return a line ending that names the ranks that saved a checkpoint; empty if the layout is the
    same."""
    flags = [
        f"--{row.option}={loaded.grid[row.name]}"
        for row in OF_A_SAMPLE
        if loaded.grid[row.name] != distributed.grid.sizes[row.name]
    ]
    if loaded.world_size == distributed.world_size and not flags:
        return ""
    return (
        f", saved by {counted(loaded.world_size, 'rank')}{' with ' * bool(flags)}{' '.join(flags)}"
    )


def _log_changes(
    loaded: Manifest, config: Config, data: JsonObject, logger: logging.Logger
) -> None:
    """Log how the configuration differs from the checkpoint's."""
    for difference in compatibility.differences(loaded.config, config, compatibility.DATA, None):
        if difference.name not in compatibility.NAMES_OF_A_RUN:
            logger.info("  changed since that checkpoint (the command line wins): %s", difference)
    other_evaluations = compatibility.other_evaluations(loaded, config, data)
    for line in (*other_evaluations, *compatibility.wrong_frozen_layers(loaded)):
        logger.warning(line)
    now = loaded.config, config, loaded.iteration
    for warning in (
        compatibility.moved_samples(*now, counts_of(loaded)["sets"]),
        compatibility.moved_rate(*now),
    ):
        if warning is not None:
            logger.warning(warning)
    for line in compatibility.schedule_table(loaded.config, config, loaded.iteration):
        logger.info("  %s", line)
