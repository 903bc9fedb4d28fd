"""Limit how far the host runs ahead of the GPU.

Queued operations keep their memory: if the host is many stages ahead, the allocator reserves
several stages' temporaries at once and flushes its cache when they no longer fit (Lamy-Poirier
2022, appendix D.2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from megatron_lite.distributed.step_watch import Event


class Throttle:
    """Records an event every `rate` steps, then waits for the event recorded `delay` events ago.
    Never reads a value back.

    wait_for: waits for an event with a timeout, so that a hanging rank stops the others here first.
    """

    def __init__(
        self,
        rate: int,
        delay: int,
        wait_for: Callable[[Event], None],
        new_event: Callable[[], Event] = torch.cuda.Event,
    ) -> None:
        self._rate = rate
        self._delay = delay
        self._wait_for = wait_for
        self._new_event = new_event
        self._events: deque[Event] = deque()
        self._steps = 0

    def step(self) -> None:
        """Record and wait if due; call after each step of the schedule."""
        self._steps += 1
        if self._steps % self._rate:
            return
        event = self._new_event()
        event.record()
        self._events.append(event)
        if len(self._events) > self._delay:
            self._wait_for(self._events.popleft())
