"""Requests to stop: SIGTERM, SIGINT and SIGUSR1 set a flag, and all ranks agree on it before the next iteration."""

from __future__ import annotations

import signal
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignal:
    """The first signal asks for a checkpoint and a clean end; a second one ends the process at once."""

    def __init__(self) -> None:
        self.received = 0
        self._previous = {number: signal.signal(number, self._receive) for number in SIGNALS}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.received = number

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
