"""The training loop: `train` iterates, `train_step` updates the weights once."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from megatron_lite.data.host_batch import HostBatch
from megatron_lite.data.loader import Waiting, next_batch
from megatron_lite.data.reading import SLOW_MS
from megatron_lite.errors import EXIT_DONE, DataError, WorkerError
from megatron_lite.optimizer.optimizer import Update
from megatron_lite.outputs.evaluation import evaluate_and_export, evaluate_first
from megatron_lite.outputs.replicas import check_replicas
from megatron_lite.outputs.run import Run
from megatron_lite.outputs.saving import (
    advance_save,
    completion,
    early_end,
    is_due,
    is_save_due,
    is_time_to_save,
    nothing_to_do,
    planned_stop,
    save,
    save_and_stop,
    save_before_end,
)
from megatron_lite.outputs.step_inputs import counted_labels, step_inputs, watch_labels
from megatron_lite.outputs.training_log import (
    is_early,
    is_log_due,
    log_training,
    progress_bar,
    show_early,
)
from megatron_lite.run.stop_signal import StopRequested
from megatron_lite.schedules.learning_rate import learning_rate


def train(run: Run) -> tuple[int, str]:
    """Run the remaining iterations; return the exit code and how the run ended."""
    config = run.config
    training = run.config.training
    first = run.iteration + 1
    try:
        if config.distributed.preflight == "only":
            return EXIT_DONE, "nothing was trained: --preflight=only"
        if training.train_iters == 0:
            evaluate_and_export(run, last=True)
            return EXIT_DONE, "nothing to train: --train_iters=0"
        evaluate_first(run)
        if first > training.train_iters:
            return EXIT_DONE, nothing_to_do(run)
        if run.best.ends:
            return EXIT_DONE, early_end(run)
        batches = run.data.batches("training", run.iteration, training.train_iters - run.iteration)
        waiting = Waiting(config.data)
        if run.profiles is not None:
            run.profiles.begin(first)
        with contextlib.closing(progress_bar(run)) as bar:
            for iteration in range(first, training.train_iters + 1):
                # The second iteration's data may wait for workers to start, which is no reason to
                # warn.
                run.distributed.progress.at("the wait for data", iteration)
                warn_ms = SLOW_MS if iteration > first + 1 else None
                batch = next_batch(
                    batches, run.distributed, run.stop, warn_ms, is_time_to_save(run)
                )
                if warn_ms is not None and (warning := waiting.add(batch.waited_s)) is not None:
                    run.logger.warning(warning)
                run.save_requested = batch.save
                run.distributed.progress.at("the step", iteration)
                update = train_step(run, batch.micro_batches, iteration)
                run.window.add(update.loss, update.tokens, update.verdict.skipped, batch.waited_s)
                watch_labels(run, "training", update.tokens)
                run.iteration = iteration
                last = iteration == training.train_iters
                run.timer.end_step(iteration)
                if last or is_log_due(run):
                    log_training(run, update)
                elif is_early(iteration - first + 1, config.run.log_interval):
                    show_early(run, update)
                bar.update(iteration)
                with run.timer.excluded(), run.distributed.traffic.paused():
                    if run.memory_history is not None:
                        run.memory_history.end_iteration()
                    advance_save(run)
                    evaluate_and_export(run, last)
                    if is_save_due(run, last):
                        with run.timer.pause("save"):
                            save(run)
                    if run.profiles is not None:
                        run.profiles.iteration_done(iteration)
                if run.best.ends and not last:
                    return EXIT_DONE, early_end(run)
                if not last and is_due(iteration, training.stop_interval):
                    return EXIT_DONE, planned_stop(run)
        return EXIT_DONE, completion(run)
    except StopRequested as stop:
        return save_and_stop(run, stop.reason)
    except (DataError, WorkerError) as error:
        save_before_end(run, error)
        raise


def train_step(run: Run, micro_batches: Sequence[HostBatch], iteration: int) -> Update:
    """Update the weights once, from this rank's micro-batches."""
    debugger = run.debugger
    counted = counted_labels(run, micro_batches)
    inputs = step_inputs(run, micro_batches, iteration, counted)
    with (
        debugger.phase(f"train_{iteration:05d}", len(inputs))
        if debugger
        else contextlib.nullcontext()
    ):
        loss = run.model.forward_backward(inputs)  # fills the gradient shards
        if debugger:
            debugger.gradients_reduced(run.model)
        if run.distributed.world_size > 1:
            check_replicas(run, iteration)
        rate = learning_rate(run.config, iteration, run.data.counts.schedule)
        if run.saving is not None:
            run.saving.wait_for_copy()
        updated = run.watch.follow(iteration, run.model.updated) if run.watch else run.model.updated
        update = run.optimizer.step(iteration, rate, loss, sum(counted), updated)
        if debugger:
            debugger.parameters(run.model, "update")
    run.model.gather_ahead()  # frozen stages, which no update gathers
    run.distributed.end_step(compiles=True)
    return update
