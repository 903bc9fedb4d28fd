"""A limit on how far the host runs ahead of the GPU.

Queued operations hold their memory: if the host is many stages ahead, the allocator holds several stages' temporaries
at once and flushes its cache when they no longer fit (Lamy-Poirier 2022, appendix D.2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A point in the GPU's stream."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Throttle:
    """Records an event every `rate` steps, then waits for the event recorded `delay` events ago. Reads no value."""

    def __init__(self, rate: int, delay: int, new_event: Callable[[], Event] = torch.cuda.Event) -> None:
        self._rate, self._delay, self._new_event = rate, delay, new_event
        self._events: deque[Event] = deque()
        self._steps = 0

    def step(self) -> None:
        """Record and wait if it is time; call after each step of the schedule."""
        self._steps += 1
        if self._steps % self._rate:
            return
        event = self._new_event()
        event.record()
        self._events.append(event)
        if len(self._events) > self._delay:
            self._events.popleft().synchronize()
