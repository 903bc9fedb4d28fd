"""Decide when a run's checkpoints and exports are due or refused, and write them."""

from __future__ import annotations

import time
from pathlib import Path

from megatron_lite.checkpoint.files import remove_folder
from megatron_lite.checkpoint.names import find_checkpoints
from megatron_lite.checkpoint.retention import best_of, is_permanent, lack_now, prune
from megatron_lite.checkpoint.writing import Save, Saving, shards_bytes, write_now
from megatron_lite.config import changed
from megatron_lite.config.structured_values import keep_rules
from megatron_lite.errors import (
    EXIT_PREEMPTED,
    NumericsError,
    RunError,
    as_installed,
)
from megatron_lite.outputs.bad_steps import held_checkpoints, leave_bad_step
from megatron_lite.outputs.run import Run
from megatron_lite.zero.finite import not_finite

DEFAULT_CHECKPOINTS = 2  # kept by a start that saves by the clock because nothing else is set


def is_due(iteration: int, interval: int | None, offset: int = 0) -> bool:
    """Return whether an event with this interval and offset is due after an iteration."""
    return interval is not None and iteration >= offset and (iteration - offset) % interval == 0


def is_save_due(run: Run, last: bool) -> bool:
    """Return whether to save now: last iteration, planned stop, interval, rule, best weights, or
    rank 0's clock."""
    training = run.config.training
    checkpoint = run.config.checkpoint
    iteration = run.iteration
    stopping = is_due(iteration, training.stop_interval)
    regular = is_due(iteration, checkpoint.checkpoint_interval)
    permanent = is_permanent(iteration, keep_rules(checkpoint.keep_checkpoints))
    best = run.best.is_best(iteration) or run.best.ends
    return last or stopping or regular or permanent or best or run.save_requested


def is_time_to_save(run: Run) -> bool:
    """Return whether --checkpoint_minutes have passed since the last save; always False except on
    rank 0."""
    if run.stop_files is not None and run.stop_files.found(run.stop_files.save):
        return True
    minutes = run.config.checkpoint.checkpoint_minutes
    return (
        minutes is not None
        and run.distributed.rank == 0
        and time.monotonic() - run.saved_s >= 60 * minutes
    )


def refuse_bad_steps(run: Run) -> None:
    """Refuse to publish after a step that must stop the run, even if its update was dropped.

    Raises:
        NumericsError: on every rank, if there was such a step.
    """
    run.distributed.wait_for_device()
    if (reason := run.optimizer.guard.dropped.stop_reason()) is not None:
        leave_bad_step(run, run.optimizer.guard.dropped.suspect())
        raise NumericsError(reason)


def refuse_broken_weights(run: Run) -> None:
    """Refuse to publish non-finite weights, moments or averages: they would displace a good
    checkpoint.

    Raises:
        NumericsError: on every rank, naming the first affected rank and tensor.
    """
    broken = not_finite(run.model, saved_only=True)
    if not run.distributed.agree_max(int(broken is not None)):
        return
    rank, name = next(
        (rank, name) for rank, name in enumerate(run.distributed.gather_objects(broken)) if name
    )
    what = "the optimizer's state is" if " of " in name else "the weights are"
    raise NumericsError(
        f"{what} no longer finite at iteration {run.iteration}, first {name} on rank {rank}: an update was too large. "
        "Nothing was saved; resume from the newest checkpoint with a lower --lr"
    )


def _new_save(run: Run, root: Path, evaluation_due: bool = False) -> Save:
    """Return a save of the current weights and state (reads the device)."""
    state = {
        "optimizer": run.optimizer.state(),
        "window": run.window.state(),
        "evaluation_due": evaluation_due,
        "data": run.data.identity,
        "counts": run.data.counts.state(run.iteration),
        **run.best.state(),
        **run.history.state(),
        **({"origin": run.resumed.origin} if run.resumed.origin else {}),
        **({"base": run.base} if run.base else {}),
        **({"pinned": run.pinned} if run.pinned else {}),
    }
    return Save(
        root, run.iteration, run.model, state, run.config, run.distributed, run.experiment.check
    )


def save(run: Run, evaluation_due: bool = False, stopping: bool = False) -> None:
    """Write a checkpoint, then delete the temporary ones beyond --max_checkpoints.

    After a dropped update nothing is deleted: the weights are older than the iteration suggests,
    and may be the cause. With --async_checkpoint=1, return once the weights are copied, unless the
    run ends here.

    stopping: the run ends because of a signal; do not wait between attempts of a pending save.
    """
    refuse_bad_steps(run)
    root = run.experiment.checkpoints
    if root is None:
        return
    refuse_broken_weights(run)
    run.distributed.progress.phase = "the save"
    finish_save(run, stopping)
    num_bytes = shards_bytes(run.model, run.distributed.layers.world_size)
    if run.distributed.rank == 0 and (lack := lack_now(root, num_bytes)) is not None:
        run.logger.warning(lack)
    training, done = run.config.training, run.iteration
    ends = done >= training.train_iters or run.best.ends or is_due(done, training.stop_interval)
    copy = None if stopping or ends else run.host_copy
    new = _new_save(run, root, evaluation_due)
    run.saving = Saving(new, run.config.checkpoint.save_retries, copy)
    if copy is None:
        finish_save(run)
    run.saved_s = time.monotonic()
    if run.stop_files is not None:
        run.stop_files.obeyed(run.stop_files.save)


def finish_save(run: Run, hurry: bool = False) -> None:
    """Wait for the save under way, if any. hurry: end its pauses at once, not only at a stop
    signal."""
    if run.saving is not None:
        saving, run.saving = run.saving, None
        saving.finish(hurry, run.stop)
        _settle(run, saving)


def advance_save(run: Run) -> None:
    """Advance the save under way without waiting for it; call this between iterations."""
    if run.saving is not None and run.saving.advance():
        finish_save(run)


def _settle(run: Run, saving: Saving) -> None:
    """Delete old checkpoints after a new one is published, and log the new one."""
    new, root = saving.save, saving.save.root
    checkpoint = run.config.checkpoint
    rotation = None
    if run.distributed.rank == 0 and not run.optimizer.guard.dropped.streak():
        rules = keep_rules(checkpoint.keep_checkpoints)
        after = (
            None
            if checkpoint.delete_old_temp_checkpoints and not run.saves_by_default
            else run.resumed.iteration
        )
        most = DEFAULT_CHECKPOINTS if run.saves_by_default else checkpoint.max_checkpoints
        held = (
            held_checkpoints(root.parent)
            | best_of(new.folder)
            | (run.mirror.held() if run.mirror else set())
        )
        prune(root, most, new.iteration, rules, after, held, run.known_checkpoints)
        rotation = None if most is None else (most, new.iteration, after, held)
    if run.mirror:
        run.mirror.update(rotation)
    blocked = f", training waited {saving.blocked_s:.2f} s" if run.host_copy is not None else ""
    size = f"{saving.num_bytes / 1e6:,.1f} MB"
    run.logger.info("saved %s (%s, %.1f s%s)", new.folder, size, saving.seconds, blocked)


def export(run: Run, best: bool = False) -> None:
    """Write a permanent export of the current weights, or export/best of the weights measured by
    --keep_best."""
    refuse_bad_steps(run)
    directory, config = run.experiment.export(None if best else run.iteration), run.config
    if directory is None:
        return
    refuse_broken_weights(run)
    run.distributed.progress.phase = "the export"
    if best:
        measured = "average" if "averaged" in (run.best.metric or "") else "raw"
        config = changed(config, {"export_weights": measured})
    averaged = config.training.export_weights == "average"
    if config.training.export_format == "distributed":
        write_now(_new_save(run, directory if best else directory.parent))
        for _, older in find_checkpoints(directory) if best and run.distributed.rank == 0 else ():
            if older.name != str(run.iteration):
                remove_folder(older)
    else:
        try:
            run.write_export(directory, config)
        except NumericsError as error:  # the trained weights are fine, and saved
            run.logger.warning("no export of iteration %d: %s", run.iteration, error)
            return
    run.logger.info("exported %s%s", directory, " (averaged weights)" if averaged else "")
    if not best:  # the next best one replaces it, even while a program reads it
        run.callback.start(directory)
    if run.mirror:
        run.mirror.update()


def save_and_stop(run: Run, reason: str) -> tuple[int, str]:
    """Save after a stop request; return the exit code and how the run ended."""
    if run.config.training.train_iters == 0:
        return (
            1,
            f"stopped by {reason} during an evaluation; there is nothing to save: --train_iters=0",
        )
    refuse_bad_steps(run)
    if run.experiment.checkpoints is None:
        return (
            1,
            f"stopped by {reason} at iteration {run.iteration}; nothing was saved (no --experiment_dir)",
        )
    save(run, run.evaluation_due, stopping=True)
    return (
        EXIT_PREEMPTED,
        f"stopped by {reason}: saved at iteration {run.iteration}; the same command resumes",
    )


def save_before_end(run: Run, error: RunError) -> None:
    """Save what this start has trained before unreadable data end the run: the weights are good."""
    if not error.agreed or run.iteration == run.resumed.iteration:
        return
    try:
        save(run, run.evaluation_due, stopping=True)
    except RunError as problem:  # the data remain the reason for the run's end
        run.logger.warning("iteration %d is not saved: %s", run.iteration, problem)


def completion(run: Run) -> str:
    """Return the closing message of a run that completed all iterations."""
    plural, best = "s" * (run.iteration != 1), f"; {run.best}" * (run.best.metric is not None)
    lost = "; nothing is saved without --experiment_dir" * (run.experiment.root is None)
    return f"training complete: {run.iteration} iteration{plural}{run.optimizer.guard.dropped.ending()}{best}{lost}"


def early_end(run: Run) -> str:
    """Return the closing message of a run ended by --early_stopping_patience, now or in an earlier
    start."""
    stopped = f"stopped early at iteration {run.iteration} of {run.config.training.train_iters}"
    ending = (
        f"{stopped}{run.optimizer.guard.dropped.ending()}; {run.best} (--early_stopping_patience)"
    )
    if run.iteration > run.resumed.iteration:
        return ending
    return f"the run is complete: {ending}; nothing to do, unless the patience grows or is left out"


def nothing_to_do(run: Run) -> str:
    """Return the closing message of a start that found all iterations done, maybe more, and how to
    export them."""
    training, export = run.config.training, run.experiment.export(run.iteration)
    is_more = run.iteration > training.train_iters
    done = f"iteration {run.iteration}" + (", more than --train_iters=" if is_more else " of ")
    lacks_export = (
        training.export_interval is not None and export is not None and not export.exists()
    )
    hint = ""
    if lacks_export and run.config.adapters.lora_rank:  # checkpoints have no model to convert
        hint = "; it exports when it trains on, with a larger --train_iters"
    elif lacks_export:
        hint = as_installed("; scripts/convert_checkpoint.py exports its checkpoint")
    return f"the run is complete: {done}{training.train_iters}; nothing to do{hint}"


def planned_stop(run: Run) -> str:
    """Return the closing message of a run that saved and stopped at a multiple of
    --stop_interval."""
    training, root = run.config.training, run.experiment.checkpoints
    assert root is not None, "validated"
    return (
        f"stopped at iteration {run.iteration} of {training.train_iters} as planned by "
        f"--stop_interval={training.stop_interval}{run.optimizer.guard.dropped.ending()}; "
        f"saved {root / str(run.iteration)}; the same command continues"
    )
