"""A rank that hangs on a GPU: every wait of the others ends with our message, before NCCL's
watchdog aborts them."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_lite.data.reading import Samples
from megatron_lite.data.workers import Workers
from megatron_lite.distributed.process_group import Distributed
from megatron_lite.distributed.step_watch import QUEUEING_S, StepWatch
from megatron_lite.errors import PeerError
from megatron_lite.zero.throttle import Throttle
from tests.support.harness import run_distributed, tiny_config, train_whole

LATE = r"another rank hangs or died: a step did not end within --distributed_timeout="


class Gpu:
    """A clock, and events that complete at times given in the order of their recording; None:
    never."""

    def __init__(self, *ends_s: float | None) -> None:
        self.now_s, self.waits = 0.0, 0
        self._ends_s = iter(ends_s)

    def event(self) -> Any:
        end_s = next(self._ends_s)
        return SimpleNamespace(
            record=lambda: None, query=lambda: end_s is not None and self.now_s >= end_s
        )

    def sleep(self, seconds: float) -> None:
        self.now_s += max(seconds, 0.05)
        self.waits += 1

    def watch(self, timeout_s: float) -> StepWatch:
        return StepWatch(timeout_s, self.event, lambda: self.now_s, self.sleep)


def test_the_host_stays_one_step_ahead() -> None:
    """The end of a step waits for the step before, not for its own; `finish` waits for both."""
    gpu = Gpu(10.0, 20.0)
    watch = gpu.watch(60.0)
    watch.end_step()
    assert gpu.now_s == 0.0 and not watch.has_ended()
    watch.end_step()
    assert 10.0 <= gpu.now_s < 11.0
    watch.finish()
    assert 20.0 <= gpu.now_s < 21.0 and watch.has_ended()


def test_a_wait_while_the_newest_step_hangs_ends_after_the_time_out() -> None:
    """The step before has ended, so `end_step` returns; the next wait of the host, whatever it is,
    finds the hang."""
    gpu = Gpu(1.0, None)
    watch = gpu.watch(60.0)
    watch.end_step()
    watch.end_step()
    began_s = gpu.now_s
    with pytest.raises(PeerError, match=LATE + "60 s"):
        while not watch.has_ended():
            gpu.sleep(0.05)
    assert 60.0 < gpu.now_s - began_s < 61.0


def test_long_waits_for_others_are_no_hang() -> None:
    """Data may take an hour, and a step may end during a wait of any length."""
    gpu = Gpu(1.0, 30.0)
    watch = gpu.watch(60.0)
    watch.end_step()
    gpu.now_s = 4000.0
    watch.end_step()
    gpu.now_s = 8000.0
    assert watch.has_ended()


def test_the_first_training_step_may_take_as_long_as_the_start() -> None:
    """It compiles kernels, maybe for minutes; an evaluation before it does not count. Later steps
    have less."""
    gpu, watchdogs = Gpu(1.0, 2.0, 3000.0, 3001.0, None, None), list[float]()
    watch = StepWatch(60.0, gpu.event, lambda: gpu.now_s, gpu.sleep, first_s=3600.0)
    watch.on_watchdog = watchdogs.append
    assert watch.watchdog_timeout_s == 2 * 3600.0 + QUEUEING_S
    watch.end_step()  # an evaluation, and the wait for its result
    watch.end_step()
    watch.finish()
    watch.end_step(compiles=True)
    watch.wait_for(SimpleNamespace(record=lambda: None, query=lambda: gpu.now_s > 2000.0))  # type: ignore[arg-type]
    assert not watchdogs and not watch.has_ended()
    watch.end_step(compiles=True)
    assert 3000.0 <= gpu.now_s < 3001.0 and watchdogs == [2 * 60.0 + QUEUEING_S] == [
        watch.watchdog_timeout_s
    ]
    watch.end_step(compiles=True)
    began_s = gpu.now_s
    with pytest.raises(PeerError, match=LATE + "60 s"):
        watch.finish()
    assert gpu.now_s - began_s < 61.0 and len(watchdogs) == 1


def test_a_first_step_that_hangs_names_its_own_limit() -> None:
    gpu = Gpu(None)
    watch = StepWatch(60.0, gpu.event, lambda: gpu.now_s, gpu.sleep, first_s=3600.0)
    watch.end_step(compiles=True)
    with pytest.raises(PeerError, match="a step did not end within --startup_timeout=3600 s"):
        watch.finish()
    assert 3600.0 < gpu.now_s < 3601.0


@pytest.mark.parametrize("hangs_in", ["throttle", "end of the step", "wait after the step"])
@pytest.mark.parametrize("timeout_s", [1.0, 60.0, 600.0])
def test_our_message_comes_before_the_watchdogs_abort(timeout_s: float, hangs_in: str) -> None:
    """The worst case: the step before ends just before its own time-out, while the first collective
    of the next one hangs already, and queueing takes almost a minute. The watchdog counts from the
    moment when that is queued."""
    queueing_s = QUEUEING_S - 10.0  # ten seconds remain for finding out which rank hangs
    before_ends_s = None if hangs_in == "end of the step" else timeout_s - 0.1
    gpu = Gpu(before_ends_s, None, None)
    watch = gpu.watch(timeout_s)
    watch.end_step()
    queued_s = gpu.now_s  # the first collective of the next step
    gpu.now_s += queueing_s
    with pytest.raises(PeerError, match=LATE):
        if hangs_in == "throttle":
            Throttle(1, 0, watch.wait_for, gpu.event).step()
        watch.end_step()
        watch.finish()
    assert gpu.now_s + 5.0 < queued_s + watch.watchdog_timeout_s


# -- where the host waits
# --------------------------------------------------------------------------------------------


def late_watch(timeout_s: float) -> StepWatch:
    """A watch of a step that never ends."""
    watch = StepWatch(timeout_s, Gpu(None, None, None).event)
    watch.end_step()
    return watch


def agree_while_a_peer_hangs(distributed: Distributed) -> tuple[str, float]:
    if distributed.rank == 1:
        time.sleep(2)  # its host hangs between two steps, before it says a word
        distributed.agree_max(0)
        return "", 0.0
    distributed.watch = late_watch(0.2)
    began_s = time.monotonic()
    message = ""
    try:
        distributed.agree_max(0)
    except PeerError as error:
        message = str(error)
    seconds, distributed.watch = time.monotonic() - began_s, None
    return message, seconds


def test_an_agreement_ends_when_the_newest_step_is_late() -> None:
    """Over gloo, whose own time-out is an hour by default."""
    (message, seconds), _ = run_distributed(2, agree_while_a_peer_hangs)
    assert message.startswith("another rank hangs or died") and 0.2 <= seconds < 1.8


def agree_after_the_step(distributed: Distributed) -> list[Any]:
    distributed.watch = StepWatch(0.2, Gpu(0.0).event)
    distributed.watch.end_step()
    time.sleep(0.4 * distributed.rank)
    return [
        distributed.agree_max(distributed.rank),
        distributed.gather_objects(f"rank {distributed.rank}"),
    ]


def test_an_agreement_waits_for_a_slow_peer_when_no_step_is_late() -> None:
    assert run_distributed(2, agree_after_the_step) == [[1, ["rank 0", "rank 1"]]] * 2


class SlowReader:
    """A reader whose file system hangs."""

    def read(self, first: int, count: int) -> Samples:
        time.sleep(30)
        return Samples(np.zeros((count, 2), dtype=np.int64), (), None)


def test_a_wait_for_data_ends_when_the_newest_step_is_late() -> None:
    watch = late_watch(0.5)
    reader: Any = SlowReader()
    workers = Workers(reader, iter([(0, 1)]), 1, 1, "fork", lambda: watch.has_ended() and None)
    began_s = time.monotonic()
    try:
        with pytest.raises(PeerError, match=LATE):
            next(iter(workers))
    finally:
        workers.close()
    assert time.monotonic() - began_s < 5


def reads(distributed: Distributed, folder: str) -> list[str]:
    waits: list[str] = []
    Distributed.wait_for_device = lambda self: waits.append(sys._getframe(1).f_code.co_name)  # type: ignore[method-assign]
    more: dict[str, Any] = dict(
        experiment_dir=folder,
        train_iters=2,
        log_interval=2,
        log_offset=0,
        export_interval=2,
        validation_iters=1,
    )
    train_whole(distributed, tiny_config(**more, validation_interval=2))
    return waits


def test_every_read_of_the_device_is_waited_for(tmp_path: Path) -> None:
    """A read has no time-out: log lines, evaluations, saves and exports read behind a wait that has
    one."""
    (waits,) = run_distributed(1, reads, str(tmp_path))
    assert waits[0] == "show_early"
    assert {"log_training", "_losses", "refuse_bad_steps", "_write_all"} <= set(waits)
