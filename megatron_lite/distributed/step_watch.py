"""Enforce step timeouts on a GPU, for collectives that wait for a hanging rank.

NCCL's `wait` orders streams and returns immediately. A hanging rank therefore blocks another rank's
host at its next wait: for the previous step, a throttling event, an agreement over gloo, data, or a
value from the device. All of these waits poll here and end with our own message.

NCCL's watchdog aborts the process without such a message. Its clock starts when the host queues a
collective. A step is queued only after the last but one has ended, so our message comes at most two
timeouts, plus the time to queue a step, later. Until the first step that compiles kernels has
ended, all limits follow from --startup_timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from megatron_lite.errors import PeerError

POLL_S = 0.0002
# On top of two timeouts: queueing a step and finding out which rank hangs.
QUEUEING_S = 60.0
_LATER = "distributed_timeout"


class Event(Protocol):
    """A point in the GPU's stream."""

    def record(self) -> None: ...

    def query(self) -> bool: ...


class StepWatch:
    """Waits for the newest step that the host has queued.

    timeout_s: limit on each wait, and on a step, from the time that it is queued and the previous
    step has ended. first_s: the same until a step that compiles kernels has ended; a shared kernel
    cache may be slow.
    """

    def __init__(
        self,
        timeout_s: float,
        new_event: Callable[[], Event] = torch.cuda.Event,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        first_s: float | None = None,
    ) -> None:
        self._new_event = new_event
        self._clock_s = clock_s
        self._sleep = sleep
        self._newest: Event | None = None
        self._deadline_s = 0.0
        self._flag, self._timeout_s = _LATER, timeout_s
        self._later_s: float | None = None  # the limit once kernels are compiled, None afterwards
        self._compiled = False  # whether the newest step compiles kernels
        if first_s is not None:
            self._flag = "startup_timeout"
            self._timeout_s = first_s
            self._later_s = timeout_s
        # called with a new `watchdog_timeout_s`
        self.on_watchdog: Callable[[float], None] = lambda timeout_s: None

    @property
    def watchdog_timeout_s(self) -> float:
        """Timeout for NCCL's watchdog, long enough that our message comes first."""
        return 2 * self._timeout_s + QUEUEING_S

    def end_step(self, compiles: bool = False) -> None:
        """Mark the end of a step and wait for the previous one, so that the host is at most one
        step ahead."""
        event = self._new_event()
        event.record()
        self.finish()
        if self._compiled and self._later_s is not None:
            self._flag = _LATER
            self._timeout_s = self._later_s
            self._later_s = None
            self.on_watchdog(self.watchdog_timeout_s)
        self._compiled = compiles
        self._newest, self._deadline_s = event, self._clock_s() + self._timeout_s

    def finish(self) -> None:
        """Wait for the end of the newest step."""
        while not self.has_ended():
            self._sleep(POLL_S)

    def has_ended(self) -> bool:
        """Return whether the newest step has ended; call this in every polling loop of the host.

        Raises:
            PeerError: if the step is late.
        """
        if self._newest is not None and self._is_over(self._newest, self._deadline_s):
            self._newest = None
        return self._newest is None

    def wait_for(self, event: Event) -> None:
        """Wait for an event of the step that the host is queueing.

        Raises:
            PeerError: if the wait takes longer than the timeout.
        """
        deadline_s = self._clock_s() + self._timeout_s
        while not self._is_over(event, deadline_s):
            self._sleep(POLL_S)

    def _is_over(self, event: Event, deadline_s: float) -> bool:
        is_over = event.query()
        if not is_over and self._clock_s() > deadline_s:
            raise PeerError(
                f"another rank hangs or died: a step did not end within --{self._flag}={self._timeout_s:g} s"
            )
        return is_over
