"""Stop requests: SIGTERM, SIGINT, SIGHUP and SIGUSR1 set a flag, on which all ranks agree before the next iteration."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

from megatron_lite.errors import RunError
from megatron_lite.run.time_limit import FLAGS, TimeLimit, passed

# torchrun passes on SIGTERM, SIGINT and SIGHUP (a closed terminal); SIGUSR1 ends torchrun, but not a rank.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# A scheduler signals every process of a job and torchrun forwards its own signal: count both as one request.
SAME_REQUEST_S = 1.0


def leave_at_once(number: int) -> NoReturn:
    """End the process with the code that a shell shows for a signal."""
    os._exit(128 + number)


class StopRequested(Exception):  # noqa: N818 - not an error
    """Raised on every rank once all agree that one of them received a stop signal, or is out of time.

    received: the largest `StopSignal.received` of all ranks.
    """

    def __init__(self, received: int) -> None:
        self.reason = FLAGS.get(received, "a signal")


class StopSignal:
    """Handlers of the stop signals.

    The first signal requests a checkpoint and a clean end. Another one, over a second later, ends the process at once.
    Until `saves` is set there is nothing to save, and the first signal ends the process too. A rank that waits inside
    a collective runs no Python signal handler, but Python still writes the signal to the wake-up descriptor, where a
    separate thread sees it.

    before_saves: called in that thread, with the signal, to end the process while there is nothing to save. on_request:
    called there after SIGUSR2.
    """

    def __init__(
        self, before_saves: Callable[[int], NoReturn] = leave_at_once, on_request: Callable[[], None] = lambda: None
    ) -> None:
        self._before_saves, self._on_request = before_saves, on_request
        self.limits: Sequence[TimeLimit] = ()  # the run stops once any of them has passed
        self._signal = 0
        self.saves = False  # whether a request saves a checkpoint
        self._requested_s: float | None = None  # when the first signal came
        self.failure: RunError | None = None  # found by another thread; all ranks end with it before the next iteration
        handled = [number for number in SIGNALS if number != signal.SIGHUP or not _is_ignored(number)]
        self._previous = {number: signal.signal(number, self._receive) for number in handled}
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True, name="stop-signal").start()

    @property
    def received(self) -> int:
        """The newest signal, or the number of a time limit that has passed; 0 if the run may go on."""
        return self._signal or passed(self.limits)

    @received.setter
    def received(self, number: int) -> None:
        self._signal = number

    @property
    def is_saving(self) -> bool:
        """Whether a signal has come, after which the run saves and ends."""
        return self.saves and self._requested_s is not None

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        signal.set_wakeup_fd(-1)
        os.close(self._writer)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def ignore(self) -> None:
        """Ignore the signals from now on: everything is saved, and only the exit code is left to give.

        torchrun signals the other ranks as soon as one has ended; Python's own handlers are gone by then.
        """
        for number in self._previous:
            signal.signal(number, signal.SIG_IGN)

    def fail(self, failure: RunError) -> None:
        """End the run with this error, from any thread."""
        self.failure = failure

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def _watch(self, reader: int) -> None:
        """Count signals as they arrive, until the writing end of the pipe is closed."""
        while numbers := os.read(reader, 1):
            if numbers[0] == signal.SIGUSR2:
                self._on_request()
            if numbers[0] not in SIGNALS:
                continue
            if not self.saves:
                self._before_saves(numbers[0])
            if self._requested_s is None:
                self._requested_s = time.monotonic()
            elif time.monotonic() - self._requested_s > SAME_REQUEST_S:
                leave_at_once(numbers[0])
        os.close(reader)


def _is_ignored(number: int) -> bool:
    """Whether the signal was ignored from the start, as SIGHUP is under nohup."""
    return signal.getsignal(number) == signal.SIG_IGN
