"""Stop requests from a signal, a time limit or a file; all ranks agree on them before the next
iteration.

SIGTERM, SIGINT, SIGHUP and SIGUSR1 set a flag. A time limit saves and stops a run before a
scheduler kills it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NamedTuple, NoReturn

from megatron_lite.config import Config
from megatron_lite.errors import RunError
from megatron_lite.run.launch import asked_job_end_s, in_slurm_step, job_end_s, launch_rank

# torchrun forwards SIGTERM, SIGINT and SIGHUP (a closed terminal); SIGUSR1 ends torchrun, but not a
# rank.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
SAME_REQUEST_S = (
    1.0  # a scheduler signals every process and torchrun forwards its own signal: count both as one
)
# Numbers of the limits for the agreement between ranks, above all signal numbers.
MAX_MINUTES = 100
BEFORE_END = 101
STOP_FILE = 102
FLAGS = {
    MAX_MINUTES: "--max_minutes",
    BEFORE_END: "--stop_before_end_s",
    STOP_FILE: "a file (--stop_file)",
}


def leave_at_once(number: int) -> NoReturn:
    """End the process immediately with the shell's exit code for a signal."""
    os._exit(128 + number)


class StopRequested(Exception):  # noqa: N818 - not an error
    """Raised on every rank once all agree that one of them received a stop signal or ran out of
    time.

    received: the maximum of `StopSignal.received` over ranks.
    """

    def __init__(self, received: int) -> None:
        self.reason = FLAGS.get(received, "a signal")


class StopSignal:
    """Handles the stop signals.

    The first signal requests a checkpoint and a clean end. A second signal, over a second later,
    kills the process, except SIGTERM from Slurm: Slurm sends it at the end of a grace time, and
    SIGKILL follows.
    Until `saves` is set there is nothing to save, and the first signal ends the process. A rank
    blocked inside a collective runs no Python signal handler, but Python still writes the signal to
    the wake-up descriptor, which a separate thread reads.

    before_saves: called in that thread with the signal to end the process while there is nothing to
    save. on_request: called in that thread after SIGUSR2.
    """

    def __init__(
        self,
        before_saves: Callable[[int], NoReturn] = leave_at_once,
        on_request: Callable[[], None] = lambda: None,
    ) -> None:
        self._before_saves, self._on_request = before_saves, on_request
        self.limits: Sequence[TimeLimit] = ()  # the run stops once one of them has passed
        self.signal = 0  # the newest one; 0: none
        self.saves = False  # whether a request saves a checkpoint
        self._requested_s: float | None = None  # time of the first signal
        self.failure: RunError | None = (
            None  # set by any thread; all ranks end with it before the next iteration
        )
        # Under nohup, SIGHUP is ignored already.
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        self._handled = [number for number in SIGNALS if number != signal.SIGHUP or not is_ignored]
        for number in self._handled:
            signal.signal(number, self._receive)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(
            target=self._watch, args=(reader,), daemon=True, name="stop-signal"
        ).start()

    @property
    def received(self) -> int:
        """The newest signal, or the number of a time limit that has passed; 0 if the run may
        continue."""
        return self.signal or max(
            (limit.number for limit in self.limits if limit.left_s() <= 0), default=0
        )

    @property
    def is_saving(self) -> bool:
        """Whether a signal has arrived, after which the run saves and ends."""
        return self.saves and self._requested_s is not None

    def ignore(self) -> None:
        """Ignore the signals from now on: everything is saved, and only the exit code remains to be
        returned.

        torchrun signals the other ranks as soon as one has ended, when Python's handlers may
        already be gone.
        """
        for number in self._handled:
            signal.signal(number, signal.SIG_IGN)

    def fail(self, failure: RunError) -> None:
        """End the run with this error, from any thread."""
        self.failure = failure

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.signal = number

    def _watch(self, reader: int) -> None:
        """Count signals as they arrive."""
        while True:
            (number,) = os.read(reader, 1)
            if number == signal.SIGUSR2:
                self._on_request()
            if number not in SIGNALS:
                continue
            if not self.saves:
                self._before_saves(number)
            if self._requested_s is None:
                self._requested_s = time.monotonic()
            elif number == signal.SIGTERM and in_slurm_step():
                continue
            elif time.monotonic() - self._requested_s > SAME_REQUEST_S:
                leave_at_once(number)


class TimeLimit(NamedTuple):
    """A time at which a start stops."""

    number: int
    left_s: Callable[[], float]  # the remaining time; negative afterwards

    def describe(self) -> str:
        """Return a log line about when the run stops."""
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + self.left_s()))
        return f"the run saves and stops at {moment} ({FLAGS[self.number]})"


class JobEnd:
    """A limit some seconds before the end of a Slurm job, which `scontrol update TimeLimit` may
    have moved meanwhile.

    end_s: by the wall clock, when the job began. When it is near, squeue is asked, and again once
    the end has moved.
    """

    def __init__(self, end_s: float, before_s: float, clock_s: Callable[[], float]) -> None:
        self._end_s = end_s
        self._before_s = before_s
        self._clock_s = clock_s
        self._may_move = True

    def left_s(self) -> float:
        """Return the remaining time; negative afterwards."""
        if self._may_move and self._end_s - self._before_s <= self._clock_s():
            end_s = asked_job_end_s() or self._end_s
            self._end_s, self._may_move = end_s, end_s > self._end_s
        return self._end_s - self._before_s - self._clock_s()


def time_limits(
    config: Config,
    clock_s: Callable[[], float] = time.monotonic,
    wall_clock_s: Callable[[], float] = time.time,
) -> tuple[TimeLimit, ...]:
    """Return the limits of a start that begins now.

    Slurm's end is wall-clock time. Only rank 0 looks at it: thousands of ranks would overload
    Slurm. Minutes are counted by a monotonic clock, so that clock corrections (NTP) neither end the
    run early nor prolong it.
    """
    training = config.training
    begin_s = clock_s()
    limits = []
    if (minutes := training.max_minutes) is not None:
        limits.append(TimeLimit(MAX_MINUTES, lambda: begin_s + 60 * minutes - clock_s()))
    before_s = None if launch_rank() else training.stop_before_end_s
    if before_s is not None and (end_s := job_end_s()) is not None:
        limits.append(TimeLimit(BEFORE_END, JobEnd(end_s, before_s, wall_clock_s).left_s))
    return tuple(limits)


def idle_limit(config: Config, limits: Sequence[TimeLimit]) -> str | None:
    """Return a warning for rank 0 if --stop_before_end_s has no effect. limits: this start's."""
    has_limit = any(limit.number == BEFORE_END for limit in limits)
    if config.training.stop_before_end_s is None or has_limit or launch_rank():
        return None
    return (
        "--stop_before_end_s has no effect: there is no SLURM_JOB_END_TIME, which Slurm sets since version 23.02, and "
        "squeue names no end of this job"
    )
