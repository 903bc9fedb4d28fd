"""Run the evaluations, samples and exports of a run."""

from __future__ import annotations

import torch

from megatron_lite.data.host_batch import micro_batch
from megatron_lite.data.loader import next_batch
from megatron_lite.monitor.logging import log_both
from megatron_lite.monitor.metric_lines import format_record
from megatron_lite.outputs.run import Run
from megatron_lite.outputs.saving import export, is_due, refuse_bad_steps, save
from megatron_lite.outputs.step_inputs import counted_labels, watch_labels


def evaluate_first(run: Run) -> None:
    """Run the evaluations that a stopped start missed, and --validation_at_start in a fresh run."""
    training, last = run.config.training, run.iteration >= run.config.training.train_iters
    with run.timer.excluded(), run.distributed.traffic.paused():
        if run.evaluation_due:
            evaluate_and_export(run, last)
            if last or run.best.ends or run.best.is_best(run.iteration):
                save(run)
        if run.iteration == 0 and training.validation_at_start and training.validation_iters:
            evaluate(run, "validation")


def evaluate_and_export(run: Run, last: bool) -> None:
    """Evaluate, sample and export as due after an iteration, and export new best weights.

    Call this before saving the checkpoint, so that a resumed run does not repeat it. If a stop is
    requested meanwhile, `run.evaluation_due` stays set, and the next start repeats all of it.
    """
    training, iteration = run.config.training, run.iteration
    run.evaluation_due = True
    if training.validation_iters and (last or iteration % training.validation_interval == 0):
        with run.timer.pause("validation"):
            record = evaluate(run, "validation")
        if run.best.metric is not None:
            run.best.add(iteration, record)
            run.logger.info("%s", run.best)
        if run.best.is_best(iteration):
            with run.timer.pause("export"):
                export(run, best=True)
        last = last or run.best.ends
    if training.test_iters and last:
        evaluate(run, "test")
    if run.samples is not None and (last or is_due(iteration, training.sample_interval)):
        refuse_bad_steps(run)
        with run.timer.pause("samples"):
            run.samples.write(run.model, iteration, run.logger)
    if training.export_interval is not None and (
        last or is_due(iteration, training.export_interval)
    ):
        with run.timer.pause("export"):
            export(run)
    run.evaluation_due = False


def evaluate(run: Run, phase: str) -> dict[str, str | float | None]:
    """Log and return the mean loss per token of weights and of their averages; a phase always uses
    the same batches.

    With --validation_by_dataset, or several data sets in --valid_data_path or --test_data_path,
    also do so for each alone.
    """
    refuse_bad_steps(run)
    losses = _losses(run, phase)
    record = {
        "phase": phase,
        "iteration": run.iteration,
        "train_iters": run.config.training.train_iters,
        **losses,
    }
    record |= {"evaluation_order": run.data.identity["evaluation_order"]}
    for name, alone in run.data.alone(phase).items():
        record |= {f"{kind}/{name}": loss for kind, loss in _losses(run, alone).items()}
    named = {
        f"{phase} {kind.replace('_', ' ')}": loss
        for kind, loss in losses.items()
        if loss is not None
    }
    run.evaluated = {run.iteration: {**run.evaluated.get(run.iteration, {}), **named}}
    run.trackers.log(record)
    log_both(run.logger, console=run.console.evaluation(record), file=format_record(record))
    return record


def _losses(run: Run, phase: str) -> dict[str, float | None]:
    """Return the mean loss per token of the weights, `loss`, and of the averaged weights,
    `averaged_loss`.

    None, with a warning, if no label counts.
    """
    batches, device = run.data.batches(phase), run.distributed.device
    kinds = ("loss", "averaged_loss") if run.config.averaging.enabled else ("loss",)
    # loss sums, token count
    losses = torch.zeros(len(kinds), dtype=torch.float64, device=device)
    tokens = 0
    run.distributed.progress.phase = f"the {phase}"
    for _ in range(run.data.phases[phase].iterations):
        following = next_batch(batches, run.distributed, run.stop)
        inputs = [micro_batch(batch, device, None, None) for batch in following.micro_batches]
        tokens += sum(counted_labels(run, following.micro_batches))
        losses[0] += run.model.evaluate(inputs)
        if run.config.averaging.enabled:
            with run.model.averaged():
                losses[1] += run.model.evaluate(inputs)
        run.distributed.end_step(compiles=not run.model.training)
    if run.distributed.tensor.rank != 0:  # as in a step: see `Optimizer.step`
        losses.zero_()
    summed = run.distributed.layers.sum_in_rank_order(
        run.distributed.pipeline.sum_in_rank_order(losses)
    )
    run.distributed.wait_for_device()
    watch_labels(run, phase, tokens)
    return {
        kind: total / tokens if tokens else None
        for kind, total in zip(kinds, summed.tolist(), strict=True)
    }
