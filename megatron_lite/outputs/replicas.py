"""Compare replicated state between ranks and end the run if it differs (--check_replicas_interval).

Ranks with the same pipeline and tensor-parallel rank have the same weights, and norms and some
other parameters are replicated over a tensor-parallel group.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from megatron_lite.checkpoint.names import newest_before
from megatron_lite.config.values import digest
from megatron_lite.errors import NumericsError
from megatron_lite.monitor.hashes import describe_differences, weight_hashes
from megatron_lite.outputs.run import Run
from megatron_lite.outputs.saving import is_due
from megatron_lite.schedules.batch_size import batch_schedule
from megatron_lite.schedules.learning_rate import learning_rate

# Option areas that affect results; paths may differ between machines.
_AREAS = ("model", "batch", "learning_rate", "optimizer", "averaging", "multi_stage")


def check_replicas(run: Run, iteration: int) -> None:
    """Compare the ranks, if due, after an iteration's gradients and before its update.

    At that point the buffers still contain the weights of the passes, and a wrong gradient has
    changed nothing.

    Raises:
        NumericsError: on every rank, if anything differs.
    """
    interval = run.config.distributed.check_replicas_interval
    if not is_due(iteration, interval):
        return
    with run.timer.excluded(), run.distributed.traffic.paused():
        run.distributed.wait_for_device()
        start_s = time.perf_counter()
        found = weight_hashes(run.model.local_weights())
        counters = {name: digest(value) for name, value in _counters(run, iteration).items()}
        stages = run.distributed.pipeline.rank
        digests = {
            f"{stages} {holders}": digest(fingerprint) for holders, fingerprint in found.items()
        }
        if describe_differences(
            run.distributed.gather_objects({**digests, "counters": digest(counters)})
        ):
            everything = {
                name: value for some in (*found.values(), counters) for name, value in some.items()
            }
            raise NumericsError(
                _message(run, iteration, run.distributed.gather_objects(everything))
            )
    if run.agreed_at is None:
        ms = 1e3 * (time.perf_counter() - start_s)
        run.logger.info(
            "all ranks hold the same state; such a check takes %.1f ms every %d iterations",
            ms,
            interval,
        )
    run.agreed_at = iteration


def _counters(run: Run, iteration: int) -> dict[str, Any]:
    """Return everything but the weights that determines the next update (reads the device)."""
    options = {area: dataclasses.asdict(getattr(run.config, area)) for area in _AREAS}
    return {
        "the iteration": [run.iteration, iteration],
        "the learning rate": learning_rate(run.config, iteration, run.data.counts.schedule),
        "the position in the data": batch_schedule(run.config.batch).consumed_samples(iteration),
        **{f"the optimizer's {name}": value for name, value in run.optimizer.state().items()},
        **{f"the options of {area}": values for area, values in options.items()},
    }


def _message(run: Run, iteration: int, by_rank: list[dict[str, str]]) -> str:
    last = "no earlier check of this start found the ranks equal"
    trust = "trust no checkpoint of this start"
    if run.agreed_at is not None:
        last = f"the last check without a difference was at iteration {run.agreed_at}"
        if (safe := newest_before(run.experiment.checkpoints, run.agreed_at)) is not None:
            trust = f"{safe} is the newest checkpoint from before it; resume with --resume_iteration={safe.name}"
    return (
        f"the ranks no longer hold the same state in iteration {iteration}: {describe_differences(by_rank)}. Memory, a "
        f"network or a device has changed bits, or the ranks run different programs. This update was not made; {last}; "
        f"{trust}"
    )
