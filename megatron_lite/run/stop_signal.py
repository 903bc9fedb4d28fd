"""Requests to stop: SIGTERM, SIGINT and SIGUSR1 set a flag, and all ranks agree on it before the next iteration."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# A scheduler signals every process of a job, and torchrun passes its own signal on: that is one request, not two.
SAME_REQUEST_S = 1.0


class StopSignal:
    """The first signal asks for a checkpoint and a clean end; another, over a second later, ends the process at once.

    Before training nothing could be saved, so until `saves` is set the first signal ends the process too. A rank that
    waits for its peers inside a collective runs no Python signal handler. The wake-up descriptor is
    written all the same, and a thread of its own sees the second signal there.
    """

    def __init__(self) -> None:
        self.received = 0
        self.saves = False  # whether a request is answered by a checkpoint
        self._previous = {number: signal.signal(number, self._receive) for number in SIGNALS}
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), daemon=True, name="stop-signal").start()

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        signal.set_wakeup_fd(-1)
        os.close(self._writer)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number

    def _watch(self, reader: int) -> None:
        """Count the signals as they arrive; ends when the other end of the pipe is closed."""
        first_s: float | None = None
        while numbers := os.read(reader, 1):
            if numbers[0] not in SIGNALS:
                continue
            if not self.saves:
                os._exit(128 + numbers[0])
            if first_s is None:
                first_s = time.monotonic()
            elif time.monotonic() - first_s > SAME_REQUEST_S:
                os._exit(128 + numbers[0])
        os.close(reader)
