"""Write training's log lines and its records in metrics.jsonl."""

from __future__ import annotations

from typing import Any

import torch

from megatron_lite.errors import NumericsError
from megatron_lite.monitor.communication import communication_lines
from megatron_lite.monitor.logging import MIB, ProgressBar, log_both
from megatron_lite.monitor.metric_lines import format_record
from megatron_lite.optimizer.optimizer import Update
from megatron_lite.outputs.bad_steps import leave_bad_step
from megatron_lite.outputs.run import Run
from megatron_lite.outputs.saving import is_due
from megatron_lite.schedules.learning_rate import learning_rate


def progress_bar(run: Run) -> ProgressBar:
    """Return rank 0's progress bar: latest logged loss, speed and time left."""
    total, shown = run.config.training.train_iters, run.distributed.rank == 0
    return ProgressBar(
        total, run.iteration, lambda iteration: run.console.bar(run.timer.pace(iteration)), shown
    )


def log_training(run: Run, update: Update) -> None:
    """Log one line and one record of metrics.jsonl. Waits for the step, because it reads the
    device."""
    run.distributed.wait_for_device()
    iterations = run.window.iterations
    config = run.config
    batches = run.data.counts.schedule
    suspect = run.optimizer.guard.dropped.suspect()
    dropped = run.optimizer.guard.dropped.close()
    record: dict[str, Any] = {
        "phase": "training",
        "iteration": run.iteration,
        "train_iters": config.training.train_iters,
        **run.window.close(),
        "learning_rate": learning_rate(config, run.iteration, batches),
        "grad_norm": float(update.grad_norm),
        "skipped_iters": dropped.skipped,
        "nan_iters": dropped.nan,
        "loss_scale": float(run.optimizer.loss_scale.scale),
        **run.optimizer.record(),
        "batch_size": batches.batch_size(run.iteration),
        "consumed_samples": batches.consumed_samples(run.iteration),
        "consumed_tokens": batches.consumed_tokens(run.iteration),
    }
    glance = run.timer.glance(run.iteration)
    timing, more = run.timer.lap(run.iteration)
    record |= timing
    if (remaining_s := more.get("remaining_seconds")) is not None:
        record["remaining_seconds"] = round(remaining_s, 1)
    if batches.since:
        record["counted_since"] = batches.segments[1].start
    if dropped.reason is not None:
        record["skip_reason"] = dropped.reason
    if run.distributed.device.type == "cuda":
        record["max_allocated_mib"] = torch.cuda.max_memory_allocated() / MIB
        record["max_reserved_mib"] = torch.cuda.max_memory_reserved() / MIB
        more["allocated_mib"] = torch.cuda.memory_allocated() / MIB
        more["reserved_mib"] = torch.cuda.memory_reserved() / MIB
    run.trackers.log(record)
    log_both(
        run.logger,
        console=run.console.training({**record, **glance}),
        file=format_record(record, more),
    )
    if config.run.log_communication:
        for line in communication_lines(
            run.distributed.traffic.take(), iterations, run.collectives_alone_s
        ):
            run.logger.info(line)
    if dropped.reason is not None:
        run.logger.warning(
            "updates dropped since the last line: %d; the last, %s", dropped.new, dropped.reason
        )
    leave_bad_step(run, suspect)
    if dropped.stop is not None:
        raise NumericsError(dropped.stop)


def is_log_due(run: Run) -> bool:
    """Return whether to log this iteration; with the default interval, also early ones
    (`is_early`)."""
    options = run.config.run
    due = is_due(run.iteration, options.log_interval, options.log_offset)
    return due or (run.logs_early and is_early(run.iteration, options.log_interval))


def is_early(iterations: int, log_interval: int) -> bool:
    """Return whether to show progress after N iterations: powers of 2 within the first log
    interval."""
    return iterations < log_interval and iterations & (iterations - 1) == 0


def show_early(run: Run, update: Update) -> None:
    """Print an early progress line on rank 0's console only.

    The log file, metrics.jsonl and the log window are not affected. Rank 0 reads its device without
    communication.
    """
    if run.distributed.rank != 0:
        return
    run.distributed.wait_for_device()
    values: dict[str, Any] = {
        "iteration": run.iteration,
        "train_iters": run.config.training.train_iters,
        "loss": run.window.mean_loss(),  # since the log file's last line
        "learning_rate": learning_rate(run.config, run.iteration, run.data.counts.schedule),
        "grad_norm": float(update.grad_norm),
        **run.timer.glance(run.iteration),
    }
    log_both(run.logger, console=run.console.training(values), file="")
