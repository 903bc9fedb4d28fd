"""The training loop: `train` iterates, `train_step` updates the weights once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_lite.checkpoint import sharded
from megatron_lite.config import Config
from megatron_lite.data.loader import HostBatch, micro_batch
from megatron_lite.distributed import startup
from megatron_lite.distributed.agreement import raise_first, together
from megatron_lite.errors import EXIT_DONE, EXIT_PREEMPTED, NumericsError, RunError
from megatron_lite.huggingface.export import export_weights, save_huggingface
from megatron_lite.monitor.export_callback import STOPPED_WAIT_S
from megatron_lite.monitor.logging import MIB, communication_lines
from megatron_lite.monitor.metrics import format_record
from megatron_lite.monitor.progress import ProgressBar
from megatron_lite.optimizer.optimizer import Update
from megatron_lite.run import exit_status
from megatron_lite.run.experiment import Experiment
from megatron_lite.run.launch import launch_rank
from megatron_lite.run.stop_signal import StopRequested, StopSignal
from megatron_lite.schedules.batch_size import batch_schedule, consumed_tokens, iteration_tokens
from megatron_lite.schedules.learning_rate import learning_rate
from megatron_lite.seeds import derive_seed
from megatron_lite.setup_run import Run, build
from megatron_lite.validation.messages import Note

# Sentinel sent instead of a signal number: this rank failed.
FAILED = 1 << 16


def pretrain(config: Config, notes: tuple[Note, ...], environment: Mapping[str, str] | None = None) -> int:
    """Train as configured and return the exit code, which exit.json repeats.

    notes: of the command line, logged below the banner. environment: variables of --export_callback_env.
    """
    rank, run_number, run = launch_rank(), 0, None
    stop = StopSignal()
    try:
        group = startup.initialize(config.distributed)
        experiment = Experiment(config, group)
        run_number = experiment.run
        run = build(config, group, experiment, stop, notes, environment)
        stop.saves = True
        together(group, lambda: experiment.record(run.config) if rank == 0 else None)
        if rank == 0:
            exit_status.write_exit(config.run.experiment_dir, None, "running", "", run_number)
        code, message = train(run)
        run.data.close()
        run.model.finish()
        limit_s = STOPPED_WAIT_S if code == EXIT_PREEMPTED else config.distributed.startup_timeout / 2
        run.callback.close(limit_s, lambda: code != EXIT_PREEMPTED and bool(stop.received))
        run.trackers.close(code)
        if rank == 0:
            status = "done" if code == EXIT_DONE else "stopped"
            exit_status.write_exit(config.run.experiment_dir, code, status, message, run_number)
        group.barrier()
        group.close()
        return code
    except BaseException as error:
        code = exit_status.report(error, config.run.experiment_dir, prints=rank == 0, rank=rank, run=run_number)
        if run is not None:
            run.callback.close(0.0)
            run.trackers.close(code)
        exit_status.leave(code)  # a normal exit could hang: peers may wait for this rank in a collective


def train(run: Run) -> tuple[int, str]:
    """Run the remaining iterations; return the exit code and how the run ended."""
    config, training, first = run.config, run.config.training, run.iteration + 1
    loss: float | None = None
    try:
        if training.train_iters == 0:
            evaluate_and_export(run, last=True)
            return EXIT_DONE, "nothing to train: --train_iters=0"
        evaluate_first(run)
        if first > training.train_iters:
            message = f"the run is complete: iteration {run.iteration} of {training.train_iters}; nothing to do"
            run.logger.info(message)
            return EXIT_DONE, message
        batches = run.data.batches("training", run.iteration, training.train_iters - run.iteration)
        with contextlib.closing(ProgressBar(training.train_iters, run.iteration, run.distributed.rank == 0)) as bar:
            for iteration in range(first, training.train_iters + 1):
                # The first wait includes the start of the workers and is no reason to warn.
                micro_batches, data_wait_s = next_batch(run, batches, warn=iteration > first)
                update = train_step(run, micro_batches, iteration)
                tokens = iteration_tokens(config.batch, iteration)
                run.window.add(update.loss, tokens, update.verdict.skipped, data_wait_s)
                run.iteration = iteration
                last = iteration == training.train_iters
                if last or is_due(iteration, config.run.log_interval, config.run.log_offset):
                    loss = log_training(run, update)
                bar.update(iteration, loss)
                with run.timer.excluded(), run.distributed.traffic.paused():
                    evaluate_and_export(run, last)
                    if is_save_due(run, last):
                        save(run)
                if not last and is_due(iteration, training.stop_interval, training.stop_offset):
                    return EXIT_DONE, f"stopped at iteration {iteration} as planned by --stop_interval"
        message = f"training complete: {run.iteration} iterations"
        run.logger.info(message)
        return EXIT_DONE, message
    except StopRequested:
        return save_and_stop(run)


def train_step(run: Run, micro_batches: list[HostBatch], iteration: int) -> Update:
    """Update the weights once, from this rank's micro-batches."""
    config, debugger, seed = run.config, run.debugger, run.config.distributed.seed
    split = run.data.split("training", iteration)
    tokens = split.samples * config.batch.sequence_length  # over all ranks, without padding
    scale = run.optimizer.loss_scale.scale / tokens
    weights = split.loss_weights(config.training.loss_reduction)
    inputs = []
    for index, (batch, weight) in enumerate(zip(micro_batches, weights, strict=True)):
        dropout_seed = derive_seed(seed, "dropout", iteration, index, run.distributed.rank)
        inputs.append(micro_batch(batch, run.distributed.device, scale, dropout_seed, weight))
    with debugger.phase(f"train_{iteration:05d}", len(inputs)) if debugger else contextlib.nullcontext():
        loss = run.model.forward_backward(inputs)  # fills the gradient shards
        if debugger:
            debugger.gradients_reduced(run.model)
        rate = learning_rate(config, iteration)
        update = run.optimizer.step(iteration, rate, loss, tokens, run.model.updated)
        if debugger:
            debugger.parameters(run.model, "update")
    run.model.gather_ahead()  # frozen stages, which no update gathers
    run.distributed.end_step()
    return update


def next_batch(run: Run, batches: Iterator[list[HostBatch]], warn: bool = False) -> tuple[list[HostBatch], float]:
    """Return the micro-batches of the next iteration and the seconds spent waiting for them.

    Ranks agree here, over the CPU group with its long time-out: data may take long, a step's collectives may not.

    Raises:
        StopRequested: on every rank, if any rank received a signal.
        DataError: on every rank, if any rank cannot read its data.
    """
    failure: RunError | None = None
    micro_batches: list[HostBatch] = []
    start_s = time.perf_counter()
    try:
        micro_batches = next(batches)
    except RunError as error:
        failure = error
    waited_s = time.perf_counter() - start_s
    if warn and waited_s * 1e3 > run.config.data.data_batch_warn_time_ms:
        run.logger.warning("waited %.1f s for data; more --num_workers may help", waited_s)
    signal = run.distributed.agree_max(run.stop.received if failure is None else FAILED)
    if signal == FAILED:
        raise_first(run.distributed, failure)
    if signal:
        raise StopRequested
    return micro_batches, waited_s


def evaluate_first(run: Run) -> None:
    """Evaluate what a stopped start left undone, and a fresh run with --validation_at_start."""
    training, last = run.config.training, run.iteration >= run.config.training.train_iters
    with run.timer.excluded(), run.distributed.traffic.paused():
        if run.evaluation_due:
            evaluate_and_export(run, last)
            if last:
                save(run)
        if run.iteration == 0 and training.validation_at_start and training.validation_iters:
            evaluate(run, "validation")


def evaluate_and_export(run: Run, last: bool) -> None:
    """Evaluate, sample and export as due after an iteration.

    This comes before the checkpoint, so that resuming repeats none of it. A stop request on the way leaves
    `run.evaluation_due` set: the next start repeats all of it.
    """
    training, iteration = run.config.training, run.iteration
    run.evaluation_due = True
    if training.validation_iters and (last or iteration % training.validation_interval == 0):
        evaluate(run, "validation")
    if training.test_iters and last:
        evaluate(run, "test")
    if run.samples is not None and (last or is_due(iteration, training.sample_interval)):
        refuse_bad_steps(run)
        run.samples.write(run.model, iteration, run.logger)
    if training.export_interval is not None and (last or is_due(iteration, training.export_interval)):
        export(run)
    run.evaluation_due = False


def evaluate(run: Run, phase: str) -> None:
    """Log the mean loss per token of a phase, always on the same batches, of the weights and of their averages."""
    refuse_bad_steps(run)
    batches, device = run.data.evaluation_batches(phase), run.distributed.device
    kinds = ("loss", "averaged_loss") if run.config.averaging.enabled else ("loss",)
    losses = torch.zeros(len(kinds), dtype=torch.float64, device=device)  # summed over tokens
    for _ in range(run.data.evaluation_iterations(phase)):
        inputs = [micro_batch(batch, device, None, None) for batch in next_batch(run, batches)[0]]
        losses[0] += run.model.evaluate(inputs)
        if run.config.averaging.enabled:
            with run.model.averaged():
                losses[1] += run.model.evaluate(inputs)
        run.distributed.end_step()
    totals = run.distributed.sum_in_rank_order(losses).tolist()
    tokens = run.data.evaluation_samples(phase) * run.config.batch.sequence_length
    record = {
        "phase": phase,
        "iteration": run.iteration,
        "train_iters": run.config.training.train_iters,
        **{kind: total / tokens for kind, total in zip(kinds, totals, strict=True)},
    }
    run.trackers.log(record)
    run.logger.info(format_record(record))


def is_due(iteration: int, interval: int | None, offset: int = 0) -> bool:
    """Whether an event with this interval and offset is due after an iteration."""
    return interval is not None and iteration >= offset and (iteration - offset) % interval == 0


def is_save_due(run: Run, last: bool) -> bool:
    """Whether to save now: at the last iteration, at a planned stop, and at every checkpoint interval."""
    training, iteration = run.config.training, run.iteration
    stopping = is_due(iteration, training.stop_interval, training.stop_offset)
    return last or stopping or is_due(iteration, training.checkpoint_interval, training.checkpoint_offset)


def log_training(run: Run, update: Update) -> float | None:
    """Log one line and one record of metrics.jsonl, and return its loss. Reads the device, so it waits for the step."""
    iterations, config = run.window.iterations, run.config
    dropped = run.optimizer.guard.dropped.close()
    record: dict[str, Any] = {
        "phase": "training",
        "iteration": run.iteration,
        "train_iters": config.training.train_iters,
        **run.window.close(),
        "learning_rate": learning_rate(config, run.iteration),
        "grad_norm": float(update.grad_norm),
        "skipped_iters": dropped.skipped,
        "nan_iters": dropped.nan,
        "loss_scale": float(run.optimizer.loss_scale.scale),
        **run.optimizer.record(),
        "batch_size": batch_schedule(config.batch).batch_size(run.iteration),
        "consumed_samples": batch_schedule(config.batch).consumed_samples(run.iteration),
        "consumed_tokens": consumed_tokens(config.batch, run.iteration),
    }
    timing, console = run.timer.lap(run.iteration)
    record |= timing
    if dropped.reason is not None:
        record["skip_reason"] = dropped.reason
    if run.distributed.device.type == "cuda":
        record["max_allocated_mib"] = torch.cuda.max_memory_allocated() / MIB
        record["max_reserved_mib"] = torch.cuda.max_memory_reserved() / MIB
        console["allocated_mib"] = torch.cuda.memory_allocated() / MIB
        console["reserved_mib"] = torch.cuda.memory_reserved() / MIB
    run.trackers.log(record)
    run.logger.info(format_record(record, console))
    if config.run.log_communication:
        for line in communication_lines(run.distributed.traffic.take(), iterations, run.collectives_alone_s):
            run.logger.info(line)
    if dropped.reason is not None:
        run.logger.warning("updates dropped since the last line: %d; the last, %s", dropped.new, dropped.reason)
    if dropped.stop is not None:
        raise NumericsError(dropped.stop)
    loss: float | None = record["loss"]
    return loss


def refuse_bad_steps(run: Run) -> None:
    """Publish nothing after a step that must stop the run, although its update was dropped.

    Raises:
        NumericsError: on every rank, if there was such a step.
    """
    if (reason := run.optimizer.guard.dropped.stop_reason()) is not None:
        raise NumericsError(reason)


def refuse_broken_weights(run: Run) -> None:
    """Save no weights that are not finite: they would displace a good checkpoint.

    Raises:
        NumericsError: on every rank, if any weight is infinite or NaN.
    """
    if run.distributed.agree_max(int(not run.model.is_finite())):
        raise NumericsError(
            f"the weights are no longer finite at iteration {run.iteration}: an update was too large. They were not "
            "saved; resume from the newest checkpoint with a lower --lr"
        )


def _state(run: Run, evaluation_due: bool = False) -> dict[str, Any]:
    """Return what a checkpoint holds besides the shards (reads the device)."""
    return {"optimizer": run.optimizer.state(), "window": run.window.state(), "evaluation_due": evaluation_due}


def save(run: Run, evaluation_due: bool = False) -> None:
    """Write a checkpoint, then delete those beyond --max_checkpoints."""
    refuse_bad_steps(run)
    root = run.experiment.checkpoints
    if root is None:
        return
    refuse_broken_weights(run)
    start_s = time.perf_counter()
    sharded.save(root, run.iteration, run.model, _state(run, evaluation_due), run.config, run.distributed)
    if run.distributed.rank == 0:
        sharded.prune(root, run.config.training.max_checkpoints, run.iteration)
    run.logger.info("saved %s (%.1f s)", root / str(run.iteration), time.perf_counter() - start_s)


def export(run: Run) -> None:
    """Write a permanent export of the weights as they are now."""
    refuse_bad_steps(run)
    directory = run.experiment.export(run.iteration)
    if directory is None:
        return
    refuse_broken_weights(run)
    averaged = run.config.training.export_weights == "average"
    if run.config.training.export_format == "distributed":
        sharded.save(directory.parent, run.iteration, run.model, _state(run), run.config, run.distributed)
    else:
        weights = export_weights(run.model, run.config, run.distributed)
        try:
            save_huggingface(directory, run.model, run.config, run.distributed, weights)
        except NumericsError as error:  # the trained weights are fine, and saved
            run.logger.warning("no export of iteration %d: %s", run.iteration, error)
            return
    run.logger.info("exported %s%s", directory, " (averaged weights)" if averaged else "")
    run.callback.start(directory)


def save_and_stop(run: Run) -> tuple[int, str]:
    """Answer a stop request: save, and return the exit code and how the run ended."""
    if run.config.training.train_iters == 0:
        return 1, "stopped by a signal during an evaluation; there is nothing to save: --train_iters=0"
    refuse_bad_steps(run)
    if run.experiment.checkpoints is None:
        message = f"stopped by a signal at iteration {run.iteration}; nothing was saved (no --experiment_dir)"
        run.logger.info(message)
        return 1, message
    save(run, run.evaluation_due)
    message = f"stopped by a signal: saved at iteration {run.iteration}; the same command resumes"
    run.logger.info(message)
    return EXIT_PREEMPTED, message
